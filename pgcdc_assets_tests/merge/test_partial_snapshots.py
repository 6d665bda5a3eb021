"""Partial snapshots: the rows that match a predicate are replaced, and no others."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2
import psycopg2.extensions
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.merge import MergeFailure, rebuild_table
from pgcdc_assets.orchestration.runs.applied_snapshots import (
    check_applied,
    check_new_applied,
    find_merged,
)
from pgcdc_assets.postgres.snapshots import plain as plain_snapshot
from pgcdc_assets.postgres.wal.positions import advance_wal
from pgcdc_assets.raw.retention import remove_partial_snapshots
from pgcdc_assets.raw.snapshots import SnapshotStore
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import has_applied, table_path
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.partial_snapshots import take

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

T = CdcTable("public", "t", (1, 2))
SOFT = CdcTable("public", "u", soft_deletes=True)
COLUMNS = "id int primary key, v text, big text"
VALUES = "select n, 'row ' || n, repeat(md5(n::text), 200) from generate_series(1, 8) n"


def rows(pipeline: Pipeline, table: CdcTable, scd: int) -> list[dict[str, Any]]:
    """Return all rows of an SCD table with all columns, in order."""
    path = table_path(pipeline.zone.lake, pipeline.zone.name, *table.name, scd)
    found = pipeline.spark.read.format("delta").load(path).collect()
    return sorted((row.asDict() for row in found), key=lambda row: str(row))


def damage_snapshot(pipeline: Pipeline, table: str) -> None:
    """Make the snapshot in the raw zone differ from the source: rows 2, 3, 7, 98 and 99."""
    raw = DeltaTable(pipeline.zone.snapshots.table.uri)
    of_table = f"\"table\" = '{table}'"
    # A merge refuses a snapshot with fewer rows.
    moved = {"2": ["98", "gone", "x"], "3": ["3", "wrong", "x"], "7": ["7", "wrong", "x"]}
    for key, changed in moved.items():
        texts = ", ".join(f"'{text}'" for text in changed)
        raw.update(
            updates={"new": f"make_array({texts})"}, predicate=f"{of_table} AND new[1] = '{key}'"
        )
    raw.update(
        updates={"new": "make_array('99', 'gone', 'x')"}, predicate=f"{of_table} AND new[1] = '8'"
    )


@pytest.mark.sampled
def test_the_matching_rows_are_those_of_the_source_and_a_rebuild_agrees(
    pipeline: Pipeline, spark: SparkSession
) -> None:
    """C12: changes after the snapshot win, and other rows stay as they are."""
    database = pipeline.database
    pipeline.start(
        f"create table t ({COLUMNS})",
        f"create table u ({COLUMNS})",
        f"insert into t {VALUES}",
        f"insert into u {VALUES}",
    )
    for table in ("t", "u"):
        damage_snapshot(pipeline, table)
    pipeline.sync(T, SOFT)
    database.execute(
        "update t set v = 'before' where id = 5; update u set v = 'before' where id = 5"
    )
    taken = {table: take(pipeline, "id <= 6", table) for table in ("t", "u")}
    assert [report.row_count for report in taken.values()] == [6, 6]
    for table in ("t", "u"):
        # The second change of a row leaves its TOAST value out.
        database.execute(f"delete from {table} where id = 1")
        database.execute(f"update {table} set v = 'after' where id = 4")
        database.execute(f"update {table} set id = 20 where id = 2")
    pipeline.sync(T, SOFT)

    source = dict(database.query("select id, (id, v, md5(big))::text from t"))
    found = {row["id"]: row for row in rows(pipeline, T, 1)}
    assert set(found) == {*source, 98, 99} - {8}
    current = {row["id"]: row for row in rows(pipeline, T, 2) if row["_is_current"]}
    assert current.keys() == found.keys()
    kept = {row["id"]: row for row in rows(pipeline, SOFT, 1) if not row["_deleted"]}
    assert kept.keys() == found.keys()
    healed = [3, 4, 5, 6, 20]
    expected = database.query("select id, v, big from t where id = any(%s) order by id", (healed,))
    for image in (found, current, kept):
        assert [(image[n]["id"], image[n]["v"], image[n]["big"]) for n in healed] == expected
        assert image[7]["v"] == "wrong"

    lsn = int(taken["t"].snapshot_lsn)
    assert (found[6]["_lsn"], found[6]["_ordinal"], found[6]["_commit_ts"]) == (lsn, -1, None)
    history = rows(pipeline, T, 2)
    opened = {row["id"] for row in history if row["_valid_from_lsn"] == lsn}
    ended = {row["id"] for row in history if row["_valid_to_lsn"] == lsn}
    assert (opened, ended) == ({2, 3}, {3})
    assert {row["_op"] for row in history if row["_valid_from_lsn"] == lsn} == {"S"}

    for target, scd in ((T, 1), (T, 2), (SOFT, 1)):
        before = rows(pipeline, target, scd)
        rebuild_table(spark, pipeline.zone, target, scd)
        assert rows(pipeline, target, scd) == before


@pytest.mark.sampled
def test_a_change_whose_commit_record_begins_at_the_snapshot_comes_after_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: the writer commits between the proof of the LSN and the next record of the WAL."""
    pipeline.start(f"create table t ({COLUMNS})", f"insert into t {VALUES}")
    waiting: list[psycopg2.extensions.connection] = []
    calls = []

    def commit_first(conn: psycopg2.extensions.connection) -> None:
        # The first call comes before the proof, the second one after it.
        calls.append(conn)
        if len(calls) % 2 == 0:
            waiting.pop().commit()
        advance_wal(conn)

    monkeypatch.setattr(plain_snapshot, "advance_wal", commit_first)
    for number in range(5):
        with closing(psycopg2.connect(pipeline.database.conninfo)) as writer:
            with writer.cursor() as cursor:
                cursor.execute("update t set v = 'at ' || %s where id = 1", (number,))
                cursor.execute("update t set id = -id where abs(id) = 2")
            waiting.append(writer)
            lsn = int(take(pipeline, "id <= 4").snapshot_lsn)
        pipeline.sync(T)
        history = rows(pipeline, T, 2)
        begun = {(row["id"], row["_op"]) for row in history if row["_valid_from_lsn"] == lsn}
        if begun:
            break
        # The server has written a record of its own between the two.
    assert begun == {(1, "U"), (-2 if number % 2 == 0 else 2, "U")}
    assert {row["id"] for row in history if row["_valid_to_lsn"] == lsn} == {
        1,
        2 if number % 2 == 0 else -2,
    }
    current = {row["id"]: row["v"] for row in history if row["_is_current"]}
    assert current == dict(pipeline.database.query("select id, v from t"))
    pipeline.assert_equal("t")


@pytest.mark.sampled
def test_a_later_complete_snapshot_and_retention_end_a_partial_one(pipeline: Pipeline) -> None:
    pipeline.start(f"create table t ({COLUMNS})", f"insert into t {VALUES}")
    pipeline.sync(T)
    first = take(pipeline, "id = 1")
    pipeline.copy("t")
    pipeline.sync(T)
    pipeline.assert_equal("t")
    check_applied(pipeline.zone, T, first.position)
    second = take(pipeline, "id = 1 -- and no other row")
    pipeline.sync(T)
    check_applied(pipeline.zone, T, second.position)
    assert take(pipeline, "id = 0").row_count == 0
    assert len(pipeline.zone.partial_snapshots.complete_snapshots()) == 2
    assert remove_partial_snapshots(pipeline.zone) == 0


@pytest.mark.sampled
def test_a_rebuild_that_used_the_snapshot_has_applied_it(
    pipeline: Pipeline, spark: SparkSession
) -> None:
    """The commit of the rebuild is one write above the LSN of the snapshot."""
    pipeline.start(f"create table t ({COLUMNS})", f"insert into t {VALUES}")
    pipeline.sync(T)
    taken = take(pipeline, "id = 1")
    pipeline.database.execute("update t set v = 'later' where id = 2")
    pipeline.capture()
    # Spark writes a table with constraints.
    history = table_path(pipeline.zone.lake, pipeline.zone.name, *T.name, 2)
    spark.sql(f"ALTER TABLE delta.`{history}` ADD CONSTRAINT positive CHECK (id > 0)")
    for scd in T.scd:
        rebuild_table(spark, pipeline.zone, T, scd)
    check_applied(pipeline.zone, T, taken.position)
    pipeline.assert_equal("t")
    with pytest.raises(TransientError, match="Run it again"):
        check_applied(pipeline.zone, T, Position(taken.epoch, Lsn(taken.snapshot_lsn + 8)))
    before = find_merged(pipeline.zone, [T])
    pipeline.copy("t")
    pipeline.capture()
    for scd in T.scd:
        rebuild_table(spark, pipeline.zone, T, scd)
    check_new_applied(pipeline.zone, before)


@pytest.mark.sampled
def test_a_merge_that_passed_the_snapshot_unseen_is_noticed(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that another process planned before the snapshot was landed."""
    pipeline.start(f"create table t ({COLUMNS})", f"insert into t {VALUES}")
    pipeline.sync(T)
    taken = take(pipeline, "id = 1")
    uri = pipeline.zone.partial_snapshots.table.uri
    real = SnapshotStore.complete_snapshots

    def without_partial(store: SnapshotStore, epoch: int | None = None) -> Any:
        return [] if store.table.uri == uri else real(store, epoch)

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotStore, "complete_snapshots", without_partial)
        pipeline.sync(T)
    with pytest.raises(TransientError, match=r"public\.t past the LSN .*Run it again"):
        check_applied(pipeline.zone, T, taken.position)
    # The passed snapshot does not stop later merges.
    pipeline.database.execute("update t set v = 'later' where id = 1")
    pipeline.sync(T)
    pipeline.assert_equal("t")


@pytest.mark.sampled
def test_partial_snapshots_before_a_lost_key_and_after_its_return_are_applied(
    pipeline: Pipeline, spark: SparkSession
) -> None:
    """F9, C12: a merge comes between the two complete snapshots, without a key and with it."""
    database = pipeline.database
    pipeline.start(f"create table t ({COLUMNS})", f"insert into t {VALUES}")
    damage_snapshot(pipeline, "t")
    pipeline.sync(T)
    early = take(pipeline, "id = 3")
    database.execute("alter table t drop constraint t_pkey; insert into t values (9, 'ninth')")
    pipeline.copy("t")
    # The current image becomes a multiset, and the history waits for the key.
    pipeline.merge(pipeline.capture(), T)
    assert len(rows(pipeline, T, 1)) == 9
    database.execute("alter table t add primary key (id)")
    pipeline.copy("t")
    late = take(pipeline, "id < 5")
    database.execute("update t set v = 'after' where id = 4")
    pipeline.sync(T)
    for scd in (1, 2):
        path = table_path(pipeline.zone.lake, pipeline.zone.name, *T.name, scd)
        assert has_applied(pipeline.zone, path, late.position), scd
        before = rows(pipeline, T, scd)
        rebuild_table(spark, pipeline.zone, T, scd)
        assert rows(pipeline, T, scd) == before
    pipeline.assert_equal("t")
    history = rows(pipeline, T, 2)
    healed = [row for row in history if row["_valid_from_lsn"] == int(early.snapshot_lsn)]
    assert [(row["id"], row["v"], row["_op"]) for row in healed] == [(3, "row 3", "S")]
    assert not [row for row in history if row["_valid_from_lsn"] == int(late.snapshot_lsn)]
    current = {row["id"]: row["v"] for row in history if row["_is_current"]}
    assert current == dict(database.query("select id, v from t"))


@pytest.mark.sampled
def test_a_table_that_was_created_again_waits_for_a_complete_snapshot(pipeline: Pipeline) -> None:
    pipeline.start(f"create table t ({COLUMNS})", f"insert into t {VALUES}")
    pipeline.sync(T)
    take(pipeline, "id = 1")
    pipeline.database.execute("drop table t")
    pipeline.database.execute(f"create table t ({COLUMNS})")
    pipeline.database.execute(f"insert into t {VALUES}")
    pipeline.copy("t")
    reports = pipeline.merge(pipeline.capture(), T)
    assert not any(isinstance(report, MergeFailure) for report in reports.values()), reports
    pipeline.assert_equal("t")
