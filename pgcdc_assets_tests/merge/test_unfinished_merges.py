"""A merge that ended between its commits leaves notes, which hold for one table and its old rows.

A note of a copied table, or one of an earlier state, changes no row.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.errors import TableRefused
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables, rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.errors import condition_of, is_conflict
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.columns import unused_names
from pgcdc_assets.tables.merge_notes import FILL, FOLLOWED, NOTES
from pgcdc_assets.tables.state import read_scd_state
from pgcdc_assets.verify import check_all, small_table
from pgcdc_assets.verify.table_version import open_merged
from pgcdc_assets.verify.target_at import version_through
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.pipeline import Killed
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_ITEMS = CdcTable("shop", "items")
_HISTORY = CdcTable("shop", "items", (2,))
_BOTH = CdcTable("public", "t", scd=(1, 2))
_ADDED = "alter table t add n int default 5"
_WIDER = "alter table t alter c type bigint"


def _fail(pipeline: Pipeline, target: CdcTable) -> None:
    (failure,) = pipeline.merge(None, target).values()
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error.__cause__, Killed)


def _succeed(pipeline: Pipeline, target: CdcTable) -> None:
    for report in pipeline.merge(None, target).values():
        assert isinstance(report, MergeReport), report.error.__cause__ or report.error


@pytest.mark.sampled
@pytest.mark.parametrize("target", [_ITEMS, _HISTORY], ids=["SCD1", "SCD2"])
def test_a_table_that_was_made_again_keeps_the_values_of_an_added_column(
    spark: SparkSession, zone: RawZone, target: CdcTable
) -> None:
    before = relation(column("id"), column("v", "text"))
    after = relation(column("id"), column("v", "text"), column("n", missing="5"))
    landing = Landing(zone, [before, after])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([update("1", "A", "42", version=2)])
    path = merge(spark, landing, target).path
    entry = max(Path(path, "_delta_log").glob("*.json"))
    entry.write_text(entry.read_text()[:20])
    rebuild_table(spark, zone, target, target.scd[0])
    state = read_scd_state(zone.lake, zone.name, path)
    assert state is not None and not set(NOTES) & set(state.properties)
    landing.land([insert("3", "c", "7", version=2)])
    merge(spark, landing, target)
    rows = (
        spark.read.format("delta")
        .load(path)
        .where("_op <> 'S' or id = 2" if 2 in target.scd else "true")
    )
    assert {(row.id, row.v, row.n) for row in rows.collect()} == {
        (1, "A", 42),
        (2, "b", 5),
        (3, "c", 7),
    }


@pytest.mark.sampled
@pytest.mark.parametrize("most_rows", [small_table.SMALL_ROWS, 0], ids=["copy", "clone"])
def test_a_comparison_does_not_fill_the_values_of_an_added_column(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    monkeypatch.setattr(small_table, "SMALL_ROWS", most_rows)
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    pipeline.database.execute("alter table t add n int default 5")
    pipeline.database.execute("insert into t values (2, 'b', 6)")
    pipeline.sync()
    pipeline.database.execute("update t set n = 42 where id = 1")
    pipeline.sync()
    pipeline.database.execute("insert into t values (3, 'c', 7)")
    found = verify(pipeline)
    assert found.is_equal, found


@pytest.mark.sampled
@pytest.mark.parametrize("most_rows", [small_table.SMALL_ROWS, -1], ids=["copy", "clone"])
@pytest.mark.parametrize("altered", [[_ADDED], [_WIDER, _ADDED]], ids=["added", "wider"])
def test_a_comparison_reads_the_rows_before_an_unfinished_merge(
    pipeline: Pipeline,
    kills: list[str],
    monkeypatch: pytest.MonkeyPatch,
    most_rows: int,
    altered: list[str],
) -> None:
    monkeypatch.setattr(small_table, "SMALL_ROWS", most_rows)
    pipeline.start("create table t (id int primary key, c int)", "insert into t values (1, 1)")
    pipeline.sync()
    for statement in altered:
        pipeline.database.execute(statement)
    pipeline.database.execute("insert into t values (2, 2, 6)")
    pipeline.capture()
    kills += [failpoints.AFTER_COLUMNS_ADDED]
    _fail(pipeline, CdcTable("public", "t"))
    assert pipeline.rows(columns="id, n") == [(1, None)]
    found = verify(pipeline)
    assert found.is_equal, found
    assert found.target_rows == 2


@pytest.mark.sampled
def test_a_comparison_reads_the_rows_before_those_without_the_new_key_ended(
    pipeline: Pipeline,
) -> None:
    soft = CdcTable("public", "t", soft_deletes=True)
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.capture()
    _succeed(pipeline, soft)
    table = delta_table(pipeline.path())
    pipeline.spark.sql(f"ALTER TABLE {table} ADD CONSTRAINT c CHECK (v <> 'x')")
    pipeline.database.execute("alter table t drop constraint t_pkey, add k serial primary key")
    pipeline.database.execute("insert into t values (2, 'x')")
    pipeline.capture()
    pipeline.copy("t")
    window = pipeline.capture()
    (failure,) = pipeline.merge(None, soft).values()
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TableRefused)
    assert pipeline.rows(columns="id, _deleted") == [(1, True)]
    zone, path = pipeline.zone, pipeline.path()
    log = open_merged(zone, path, "public.t")
    found = version_through(zone, log, path, window.epoch, window.end)
    assert found is not None
    before = pipeline.spark.read.format("delta").option("versionAsOf", found.version).load(path)
    assert [row._deleted for row in before.collect()] == [False]


@pytest.mark.sampled
def test_a_column_is_filled_although_the_source_has_changed_again(
    pipeline: Pipeline, kills: list[str]
) -> None:
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    pipeline.database.execute("alter table t add n int default 5")
    pipeline.database.execute("insert into t values (2, 'b', 6)")
    pipeline.capture()
    kills += [failpoints.AFTER_COLUMNS_ADDED]
    _fail(pipeline, CdcTable("public", "t"))
    pipeline.database.execute("alter table t rename v to w")
    pipeline.database.execute("insert into t values (3, 'c', 7)")
    pipeline.capture()
    _succeed(pipeline, CdcTable("public", "t"))
    assert pipeline.rows(columns="id, w, n") == [(1, "a", 5), (2, "b", 6), (3, "c", 7)]


@pytest.mark.sampled
@pytest.mark.parametrize("is_killed", [False, True], ids=["whole", "killed after its commit"])
def test_a_rebuilt_table_keeps_its_values_after_a_merge_that_did_not_fill(
    pipeline: Pipeline, kills: list[str], is_killed: bool
) -> None:
    """A rebuild removes the notes in a commit after that of its rows."""
    target = CdcTable("public", "t")
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    pipeline.database.execute("alter table t add n int default 5")
    pipeline.database.execute("update t set n = 42 where id = 1")
    pipeline.capture()
    kills += [failpoints.AFTER_COLUMNS_ADDED]
    _fail(pipeline, target)
    kills += [failpoints.AFTER_REBUILD_COMMIT] if is_killed else []
    with pytest.raises(Killed) if is_killed else nullcontext():
        rebuild_table(pipeline.spark, pipeline.zone, target, 1)
    pipeline.database.execute("insert into t values (2, 'b', 6)")
    pipeline.capture()
    _succeed(pipeline, target)
    assert pipeline.rows(columns="id, n") == [(1, 42), (2, 6)]


@pytest.mark.sampled
def test_a_wider_type_is_followed_once_although_the_rows_were_not_written(
    pipeline: Pipeline, kills: list[str]
) -> None:
    pipeline.start("create table t (id int primary key, c int)", "insert into t values (1, 1)")
    pipeline.capture()
    _succeed(pipeline, _BOTH)
    pipeline.database.execute("update t set c = 2")
    pipeline.database.execute("alter table t alter c type bigint")
    pipeline.database.execute("alter table t add n int default 5")
    pipeline.database.execute("insert into t values (2, 5000000000, 6)")
    pipeline.capture()
    for scd in (1, 2):
        one = _BOTH.of_kinds([scd])
        kills += [failpoints.AFTER_COLUMNS_ADDED]
        _fail(pipeline, one)
        _succeed(pipeline, one)
    pipeline.assert_equal("t")
    assert check_all(pipeline.spark, pipeline.zone, _BOTH, 2).is_sound
    state = read_scd_state(pipeline.zone.lake, pipeline.zone.name, pipeline.path("t"))
    assert state is not None and {FILL, FOLLOWED} <= set(state.properties)


@pytest.mark.sampled
def test_a_history_does_not_skip_changes_that_its_owner_refuses(
    spark: SparkSession, zone: RawZone
) -> None:
    """The current image may skip them, because the snapshot has the rows."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([])
    path = merge(spark, landing, _HISTORY).path
    spark.sql(f"ALTER TABLE {delta_table(path)} ADD CONSTRAINT c CHECK (v <> 'x')")
    landing.land([update("1", "x")])
    landing.land([update("1", "b")])
    landing.copy([["1", "b"]])
    landing.land([])
    (failure,) = merge_tables(spark, zone, [_HISTORY], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TableRefused)
    spark.sql(f"ALTER TABLE {delta_table(path)} DROP CONSTRAINT c")
    assert merge(spark, landing, _HISTORY).left_out == ""
    rows = spark.read.format("delta").load(path).collect()
    assert {row.v for row in rows} == {"a", "x", "b"}


def test_a_column_that_another_merge_has_added_is_a_passing_error(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([])
    table = delta_table(merge(spark, landing, _ITEMS).path)
    spark.sql(f"ALTER TABLE {table} ADD COLUMNS (n INT)")
    with pytest.raises(AnalysisException) as raised:
        spark.sql(f"ALTER TABLE {table} ADD COLUMNS (N INT)")
    assert is_conflict(raised.value), condition_of(raised.value)


def test_unused_names_differ_from_each_name_in_any_case() -> None:
    assert unused_names(2, ["_0", "ID", "_1__"]) == ["_0___", "_1___"]
    assert unused_names(1, []) == ["_0"]
