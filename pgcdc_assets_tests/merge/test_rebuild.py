"""Rebuilt tables equal the live tables, and replace them in one commit."""

from __future__ import annotations

import datetime as dt
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.merge.rebuild import RebuildReport, rebuild_table
from pgcdc_assets.raw.staging import REBUILD, remove_stale
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.state import read_watermark, table_path
from pgcdc_assets_tests.support.database import create_database
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

TARGET = CdcTable("public", "t")


def fill(pipeline: Pipeline) -> None:
    """Take a snapshot, and merge changes of all kinds in several windows."""
    pipeline.start(
        "create table t (id int primary key, v text, n numeric(8, 2), ts timestamptz, a int[])",
        "insert into t select i, 'row ' || i, i / 4.0, '2024-01-01', array[i] "
        "from generate_series(1, 200) i",
    )
    pipeline.sync()
    pipeline.database.execute("update t set v = null, n = 'NaN' where id % 10 = 0")
    pipeline.database.execute("delete from t where id % 7 = 0")
    pipeline.sync()
    pipeline.database.execute("insert into t select i, '', 0 from generate_series(300, 320) i")
    pipeline.database.execute("update t set id = 1000 where id = 1")
    pipeline.sync()


def rebuilt(pipeline: Pipeline, through: Lsn | None = None, scd: int = 1) -> RebuildReport:
    return rebuild_table(pipeline.spark, pipeline.zone, TARGET, scd, through)


def contents(pipeline: Pipeline) -> list[tuple[str, ...]]:
    return sorted(
        (tuple(map(str, row)) for row in pipeline.frame().collect()), key=lambda row: int(row[0])
    )


def watermark(pipeline: Pipeline) -> Lsn:
    found = read_watermark(pipeline.zone.lake, pipeline.zone.name, "public", "t", 1)
    assert found is not None
    return found[1]


def staging(zone: RawZone) -> list[Path]:
    folder = Path(zone.lake.path(zone.name, REBUILD))
    return list(folder.iterdir()) if folder.exists() else []


@pytest.fixture
def own_pipeline(
    own_server: EmbeddedServer, zone: RawZone, spark: SparkSession
) -> Iterator[Pipeline]:
    """Return a pipeline from a server that the test may stop."""
    own_server.start()
    yield Pipeline(create_database(own_server), zone, spark)


@pytest.mark.sampled
def test_a_table_is_rebuilt_with_the_source_switched_off(own_pipeline: Pipeline) -> None:
    """H4."""
    pipeline = own_pipeline
    fill(pipeline)
    before, mark = contents(pipeline), watermark(pipeline)
    state = DeltaTable(pipeline.path())
    pipeline.database.server.stop()

    report = rebuilt(pipeline)

    assert contents(pipeline) == before
    assert watermark(pipeline) == mark == report.watermark_after
    assert report.row_count == len(before)
    after = DeltaTable(pipeline.path())
    assert after.schema() == state.schema()
    assert after.metadata().configuration == state.metadata().configuration
    assert after.metadata().id == state.metadata().id
    assert staging(pipeline.zone) == []


def history(pipeline: Pipeline) -> list[tuple[str, ...]]:
    zone = pipeline.zone
    frame = pipeline.spark.read.format("delta").load(
        table_path(zone.lake, zone.name, "public", "t", 2)
    )
    return sorted(tuple(map(str, row)) for row in frame.collect())


@pytest.mark.soak
def test_a_history_that_began_ahead_of_the_capture_is_rebuilt_with_equal_times(
    pipeline: Pipeline,
) -> None:
    """H4: the snapshot is merged before the capture of earlier commits."""
    pipeline.start("create table u (id int primary key)")
    pipeline.database.execute("insert into u values (1)")
    pipeline.capture()
    before = pipeline.database.value("select clock_timestamp()")
    pipeline.database.execute("create table t (id int primary key, v text)")
    pipeline.database.execute("insert into t values (1, 'a'), (2, 'a')")
    pipeline.copy("t")
    target = CdcTable("public", "t", (2,))
    assert isinstance(pipeline.merge(None, target)["t"], MergeReport)
    pipeline.database.execute("update t set v = 'b' where id = 1")
    pipeline.capture()
    assert isinstance(pipeline.merge(None, target)["t"], MergeReport)
    live = history(pipeline)
    zone = pipeline.zone
    path = table_path(zone.lake, zone.name, "public", "t", 2)
    copied = pipeline.spark.read.format("delta").load(path).where("_op = 'S'")
    assert copied.where(f"_valid_from >= '{before.isoformat()}'").count() == 2
    assert copied.where("_valid_from > _valid_to").count() == 0

    rebuild_table(pipeline.spark, zone, target, 2)

    assert history(pipeline) == live


@pytest.mark.sampled
def test_a_history_is_rebuilt_exactly_with_the_source_switched_off(own_pipeline: Pipeline) -> None:
    """H4, for SCD2."""
    pipeline = own_pipeline
    target = CdcTable("public", "t", (2,))
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t select i, 'v' from generate_series(1, 20) i",
    )
    for turn in range(3):
        pipeline.database.execute("update t set v = v || %s where id <= 10", (str(turn),))
        pipeline.database.execute("delete from t where id = %s", (20 - turn,))
        pipeline.capture()
        pipeline.merge(None, target)
    before = history(pipeline)
    assert len(before) == 20 + 3 * 10
    pipeline.database.server.stop()
    rebuilt(pipeline, scd=2)
    assert history(pipeline) == before
    rebuilt(pipeline, pipeline.windows[0].end, scd=2)
    assert len(history(pipeline)) == 20 + 10
    pipeline.merge(None, target)
    assert history(pipeline) == before


@pytest.mark.sampled
def test_a_damaged_table_is_rebuilt_and_merges_continue(pipeline: Pipeline) -> None:
    fill(pipeline)
    table = delta_table(pipeline.path())
    pipeline.spark.sql(f"DELETE FROM {table} WHERE id > 100")
    pipeline.spark.sql(f"UPDATE {table} SET v = 'wrong' WHERE id = 2")
    assert not verify(pipeline).is_equal
    rebuilt(pipeline)
    assert verify(pipeline).is_equal
    pipeline.database.execute("update t set v = 'later' where id < 50")
    pipeline.database.execute("delete from t where id = 60")
    pipeline.sync()
    pipeline.assert_equal()


@pytest.mark.soak
def test_the_next_merge_continues_after_a_rebuild_through_an_earlier_lsn(
    pipeline: Pipeline,
) -> None:
    fill(pipeline)
    first = pipeline.windows[0].end
    live = watermark(pipeline)
    report = rebuilt(pipeline, first)
    assert report.watermark_before == (1, live)
    assert watermark(pipeline) == first < live
    assert len(pipeline.rows()) == 200
    assert pipeline.frame().where("v IS NULL").count() == 0
    merged = pipeline.merge()["t"]
    assert getattr(merged, "watermark_before", merged) == first
    assert watermark(pipeline) == live
    pipeline.assert_equal()
    # Merges continue after the rebuild.
    pipeline.database.execute("update t set v = 'later' where id < 50")
    pipeline.sync()
    pipeline.assert_equal()


@pytest.mark.soak
def test_an_lsn_inside_a_window_is_allowed_like_its_end(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.database.transaction(
        "set local synchronous_commit = on", "insert into t values (2, 'b')"
    )
    middle = Lsn.parse(pipeline.database.value("select pg_current_wal_insert_lsn()::text"))
    pipeline.database.execute("insert into t values (3, 'c')")
    pipeline.sync()
    rebuilt(pipeline, middle)
    assert pipeline.rows() == [(1, "a"), (2, "b")]
    pipeline.merge()
    assert pipeline.rows() == [(1, "a"), (2, "b"), (3, "c")]


def test_an_lsn_that_is_not_captured_and_an_unmerged_table_are_refused(pipeline: Pipeline) -> None:
    with pytest.raises(ConfigurationError, match="Nothing was captured"):
        rebuilt(pipeline)
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    window = pipeline.capture()
    with pytest.raises(ConfigurationError, match="never merged"):
        rebuilt(pipeline)
    pipeline.merge()
    beyond = Lsn(window.end + 1)
    with pytest.raises(ConfigurationError, match=f"captured through {window.end}.*{beyond}"):
        rebuilt(pipeline, beyond)
    with pytest.raises(ConfigurationError, match="starts at"):
        rebuilt(pipeline, Lsn(1))


@pytest.mark.soak
@pytest.mark.sampled
def test_an_append_only_table_is_refused_with_its_remedy(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key)", "insert into t values (1)")
    pipeline.sync()
    path = pipeline.path("t")
    DeltaTable(path).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(ConfigurationError, match="append-only") as refused:
        rebuilt(pipeline)
    statement = str(refused.value).partition("Run in Spark: ")[2].partition(";")[0]
    pipeline.spark.sql(statement)
    rebuilt(pipeline)
    pipeline.assert_equal()


def test_a_rebuilt_table_has_added_columns(pipeline: Pipeline) -> None:
    fill(pipeline)
    first = pipeline.windows[0].end
    pipeline.database.execute("alter table t add column added text")
    pipeline.database.execute("update t set added = 'x' where id < 20")
    pipeline.sync()
    before = contents(pipeline)
    rebuilt(pipeline)
    assert contents(pipeline) == before
    rebuilt(pipeline, first)
    assert "added" not in pipeline.frame().columns
    pipeline.merge()
    assert contents(pipeline) == before
    assert verify(pipeline).is_equal


@pytest.mark.sampled
@pytest.mark.parametrize(
    "point",
    [
        "after_rebuild_staged",
        pytest.param("after_rebuild_moved", marks=pytest.mark.soak),
    ],
)
def test_a_failure_before_the_commit_does_not_change_the_table(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    fill(pipeline)
    before, version = contents(pipeline), DeltaTable(pipeline.path()).version()

    def reach(name: str) -> None:
        if name == point:
            raise OSError("the disk is not available")

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "reach", reach)
        with pytest.raises(OSError, match="the disk"):
            rebuilt(pipeline)
    assert DeltaTable(pipeline.path()).version() == version
    assert contents(pipeline) == before
    rebuilt(pipeline)
    assert contents(pipeline) == before


_KILLED = """
import sys
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.merge.rebuild import rebuild_table

conf = {"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"}
spark = spark_session("killed", conf=conf)
rebuild_table(spark, RawZone(Lake(sys.argv[1]), "test"), CdcTable("public", "t"), 1, None)
"""


@pytest.mark.soak
@pytest.mark.slow
def test_the_next_rebuild_after_a_kill_before_the_commit_succeeds(pipeline: Pipeline) -> None:
    fill(pipeline)
    before, version = contents(pipeline), DeltaTable(pipeline.path()).version()
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, pipeline.zone.lake.uri],
        env={**os.environ, "PGCDC_FAILPOINT": "after_rebuild_moved"},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    assert DeltaTable(pipeline.path()).version() == version
    assert contents(pipeline) == before
    assert len(staging(pipeline.zone)) == 1
    rebuilt(pipeline)
    assert contents(pipeline) == before
    assert remove_stale(pipeline.zone.lake, pipeline.zone.name, dt.timedelta(0)) == 1
    assert staging(pipeline.zone) == []


@pytest.mark.soak
def test_a_table_with_column_mapping_is_rebuilt_and_merges_continue(pipeline: Pipeline) -> None:
    """With column mapping, Delta writes files to folders with random names."""
    target = CdcTable("public", "t", (1, 2))
    pipeline.start('create table t ("the id" int primary key, "v,=" text)')
    pipeline.database.execute("insert into t values (1, 'one'), (2, 'two')")
    pipeline.merge(pipeline.capture(), target)
    for scd in (1, 2):
        rebuild_table(pipeline.spark, pipeline.zone, target, scd)
    pipeline.assert_equal()
    pipeline.database.execute('update t set "v,=" = \'two!\' where "the id" = 2')
    reports = pipeline.merge(pipeline.capture(), target)
    assert isinstance(reports["t"], MergeReport), reports["t"]
    pipeline.assert_equal()
    history = pipeline.path("t", 2)
    assert pipeline.spark.read.format("delta").load(history).count() == 3
