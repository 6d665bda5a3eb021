"""Partial snapshots at random places of random histories, while connections write."""

from __future__ import annotations

import random
from collections.abc import Sequence

import psycopg2
import pytest
from deltalake import DeltaTable
from psycopg2.extensions import cursor as Cursor
from pyspark.sql import SparkSession

from pgcdc_assets.capture.snapshots.pool import SnapshotReport
from pgcdc_assets.merge import MergeReport, rebuild_table
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.convergence.writers import Actor, Writers
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.partial_snapshots import take

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

T = CdcTable("public", "t", (1, 2))
KEYS = 40
PREDICATES = ("id % 3 = 0", "id < 20", "v like '%1%'", "true", "id = 7 or big is null")


def write(cursor: Cursor, decide: random.Random) -> str:
    """Run a transaction; it fails if it waits for another one, or if a key exists."""
    try:
        change(cursor, decide)
        cursor.connection.commit()
        return "committed"
    except psycopg2.Error:
        cursor.connection.rollback()
        return "failed"


def change(cursor: Cursor, decide: random.Random) -> None:
    """Make a few changes; the values of `big` are stored out of line."""
    for _ in range(decide.randint(1, 3)):
        key, other = decide.randint(1, KEYS), decide.randint(KEYS + 1, 2 * KEYS)
        match decide.random():
            case chance if chance < 0.5:
                cursor.execute("update t set v = v || %s where id = %s", (str(key % 10), key))
            case chance if chance < 0.65:
                cursor.execute("delete from t where id in (%s, %s)", (key, other))
            case chance if chance < 0.8:
                cursor.execute("update t set id = %s where id = %s", (other, key))
            case chance if chance < 0.97:
                cursor.execute(
                    "insert into t values (%s, 'new', repeat(md5(%s), 200)) on conflict do nothing",
                    (key, str(key)),
                )
            case _:
                cursor.execute("update t set v = 'x', big = null where id = %s", (key,))


def changed_at(pipeline: Pipeline, taken: Sequence[SnapshotReport]) -> set[tuple[str | None, int]]:
    """Return the keys of the changes whose commit records begin at the LSN of a snapshot."""
    lsns = [int(report.snapshot_lsn) for report in taken]
    changes = DeltaTable(pipeline.zone.changes.table.uri).to_pyarrow_table(
        columns=["commit_lsn", "old", "new"], filters=[("commit_lsn", "in", lsns)]
    )
    return {
        (texts[0], change["commit_lsn"])
        for change in changes.to_pylist()
        for texts in (change["old"], change["new"])
        if texts
    }


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("identity", "rounds"),
    [
        pytest.param("full", 1, id="full"),
        pytest.param("full", 3, id="full, long", marks=pytest.mark.soak),
        pytest.param("default", 3, id="default, long", marks=pytest.mark.soak),
    ],
)
def test_partial_snapshots_change_nothing_that_is_right(
    pipeline: Pipeline, spark: SparkSession, rng: random.Random, identity: str, rounds: int
) -> None:
    """C12: a partial snapshot opens no version, so each one is exact at its LSN.

    A transaction may have its commit record at that LSN. Its versions have the operation of the
    change, and the ends at that LSN are those of its changes.
    """
    pipeline.start(
        "create table t (id int primary key, v text, big text)",
        "alter table t alter big set storage external",
        f"alter table t replica identity {identity}",
        "insert into t select n, 'row', repeat(md5(n::text), 200) "
        f"from generate_series(1, {KEYS}) n",
    )
    seed = rng.randrange(2**32)
    writers = Writers(
        pipeline.database.conninfo, seed, {f"writer {n}": Actor(write, 0.005) for n in range(3)}
    )
    taken = []
    writers.start()
    try:
        for _ in range(rounds):
            taken += [take(pipeline, rng.choice(PREDICATES)) for _ in range(rng.randint(1, 3))]
            pipeline.capture()
            through = rng.choice(pipeline.windows)
            # Otherwise a slow machine would have more changes to merge.
            with writers.paused():
                for report in pipeline.merge(through, T).values():
                    assert isinstance(report, MergeReport), report.error
    finally:
        writers.stop()
    assert writers.outcomes["committed"] > 0
    pipeline.capture()
    for report in pipeline.merge(None, T).values():
        assert isinstance(report, MergeReport), report.error
    pipeline.assert_equal("t")

    def rows(scd: int) -> list[str]:
        path = pipeline.path("t", scd)
        return sorted(map(str, spark.read.format("delta").load(path).collect()))

    history = pipeline.path("t", 2)
    versions = spark.read.format("delta").load(history)
    at = ", ".join(str(int(report.snapshot_lsn)) for report in taken)
    assert versions.where(f"_valid_from_lsn IN ({at}) AND (_op = 'S' OR _ordinal < 0)").count() == 0
    ends = versions.where(f"_valid_to_lsn IN ({at})").select("id", "_valid_to_lsn").collect()
    assert {(str(key), lsn) for key, lsn in ends} <= changed_at(pipeline, taken)
    current = versions.where("_is_current").selectExpr("id", "v", "big").collect()
    source = pipeline.database.query("select id, v, big from t order by id")
    assert sorted(tuple(row) for row in current) == source
    before = {scd: rows(scd) for scd in (1, 2)}
    for scd in (1, 2):
        rebuild_table(spark, pipeline.zone, T, scd)
        assert rows(scd) == before[scd]
