"""Compaction after merges that leave many small files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport
from pgcdc_assets.merge.kinds import current_image
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark import tuning
from pgcdc_assets.spark.session import own_sessions
from pgcdc_assets.spark.session_settings import session_settings
from pgcdc_assets.tables import compaction
from pgcdc_assets.tables.compaction import SMALL_FILE_BYTES, has_many_small_files, needs_optimize
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

FEW = 4


@pytest.fixture
def as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge small tables as large ones, and compact few small files."""
    merge_by_spark(monkeypatch)
    monkeypatch.setattr(tuning, "SMALL_BYTES", 0)
    monkeypatch.setattr(current_image, "is_tiny", lambda *sizes: False)
    monkeypatch.setattr(compaction, "MOST_SMALL_FILES", FEW)


def operations(path: str) -> Counter[str]:
    return Counter(commit["operation"] for commit in DeltaTable(path).history())


def files_of_a_partition(path: str) -> int:
    """Return the number of files of the partition that has most."""
    files = pa.table(DeltaTable(path).get_add_actions(flatten=True))
    names = [name for name in files.column_names if name.startswith("partition.")]
    return max(Counter(tuple(row[n] for n in names) for row in files.to_pylist()).values())


@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
def test_merges_do_not_leave_ever_more_files(pipeline: Pipeline, as_large: None, scd: int) -> None:
    target = CdcTable("public", "t", scd=(scd,))
    path = pipeline.path("t", scd)
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t select n, 'first' from generate_series(1, 50) n",
    )
    most = 0
    for number in range(2 * FEW + 1):
        pipeline.database.execute(f"update t set v = 'v{number}' where id % 12 = {number}")
        pipeline.database.execute(f"insert into t values (100 + {number}, 'new')")
        pipeline.capture()
        report = pipeline.merge(None, target)["t"]
        assert isinstance(report, MergeReport), report.error
        most = max(most, files_of_a_partition(path))
    done = operations(path)
    assert done["MERGE"] >= 2 * FEW
    assert 2 <= done["OPTIMIZE"] <= done["MERGE"] / 2
    assert most <= FEW
    (again,) = pipeline.merge(None, target).values()
    assert isinstance(again, MergeReport)
    assert again.windows_folded == 0, "the watermark is that of the last merge"
    assert read_values(pipeline, path) == sorted(pipeline.database.query("select id, v from t"))


def read_values(pipeline: Pipeline, path: str) -> list[tuple[Any, ...]]:
    """Return the current rows of an SCD table."""
    rows = pipeline.spark.read.format("delta").load(path)
    if "_is_current" in rows.columns:
        rows = rows.where("_is_current")
    return sorted(tuple(row) for row in rows.select("id", "v").collect())


@pytest.mark.sampled
@pytest.mark.postgres
@pytest.mark.spark
def test_a_compaction_that_fails_does_not_fail_the_merge(
    pipeline: Pipeline, as_large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner of the table may commit at the same time."""

    def refuse(path: str) -> str:
        raise RuntimeError(path)

    pipeline.start("create table t (id int primary key, v text)", "insert into t values (0, 'a')")
    with monkeypatch.context() as patched:
        patched.setattr(compaction, "delta_table", refuse)
        for number in range(1, FEW + 2):
            pipeline.database.execute(f"insert into t values ({number}, 'b')")
            pipeline.sync()
        assert files_of_a_partition(pipeline.path()) > FEW
        pipeline.assert_equal()
    pipeline.database.execute("insert into t values (100, 'c')")
    pipeline.sync()
    assert files_of_a_partition(pipeline.path()) == 1
    pipeline.assert_equal()


@pytest.mark.spark
def test_a_refused_compaction_is_not_repeated_by_each_merge(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt reads and writes all small files."""
    path, most, attempts = lake.path("t"), compaction.MOST_SMALL_FILES, []
    real = compaction.optimize

    def counted(*arguments: Any) -> tuple[int, int]:
        attempts.append(count)
        return real(*arguments)

    monkeypatch.setattr(compaction, "optimize", counted)
    # There is no table yet, so Spark refuses the OPTIMIZE.
    for count in range(most - 1, most + 40):
        compaction.compact_small_files(spark, path, files([1] * count))
    assert attempts == [most, most + 16, most + 32]
    for number in range(3):
        write_deltalake(path, pa.table({"id": [number]}), mode="append")
    count = most + 48
    compaction.compact_small_files(spark, path, files([1] * count))
    assert len(DeltaTable(path).file_uris()) == 1
    # After the success, the usual limit applies. One file cannot be compacted.
    for count in (most, most + 1):
        compaction.compact_small_files(spark, path, files([1] * count))
    assert attempts[3:] == [most + 48, most]


def files(sizes: list[int], current: list[bool] | None = None) -> pa.Table:
    columns: dict[str, Any] = {"path": [str(n) for n in range(len(sizes))], "size_bytes": sizes}
    if current is not None:
        columns["partition._is_current"] = current
    return pa.table(columns)


def test_small_files_of_one_partition_count() -> None:
    most = compaction.MOST_SMALL_FILES
    assert not has_many_small_files(files([100] * (most - 1)))
    assert has_many_small_files(files([100] * most))
    assert not has_many_small_files(files([SMALL_FILE_BYTES] * most))
    sizes = [100] * (2 * most - 2)
    halves = [True, False] * (most - 1)
    assert not has_many_small_files(files(sizes, halves))
    assert has_many_small_files(files([*sizes, 100], [*halves, True]))
    assert not has_many_small_files(
        pa.table({"path": pa.array([], pa.string()), "size_bytes": pa.array([], pa.int64())})
    )


def test_the_maintenance_optimizes_what_an_optimize_would_change(tmp_path: Path) -> None:
    rows = pa.table({"id": [1, 2], "p": ["a", "b"]})
    for name, partitioned_by in (("plain", None), ("split", ["p"])):
        path = str(tmp_path / name)
        write_deltalake(path, rows, partition_by=partitioned_by)
        assert not needs_optimize(Lake(path), path, DeltaTable(path)), name
        write_deltalake(path, rows.slice(1), mode="append")
        assert needs_optimize(Lake(path), path, DeltaTable(path)), name


@pytest.mark.sampled
@pytest.mark.spark
def test_the_maintenance_optimizes_deleted_rows_and_clustered_tables(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name, clause in (("plain", ""), ("clustered", "CLUSTER BY (id)")):
        path = str(tmp_path / name)
        spark.sql(
            f"CREATE TABLE delta.`{path}` (id BIGINT) USING delta {clause} "
            "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
        )
        spark.range(100).repartition(1).write.format("delta").mode("append").save(path)
        assert needs_optimize(Lake(path), path, DeltaTable(path)) == (name == "clustered")
        spark.sql(f"DELETE FROM delta.`{path}` WHERE id < 50").collect()
        assert needs_optimize(Lake(path), path, DeltaTable(path)), name


# Set by the package, not set with a default, not set without a default, and unknown to Spark.
SETTINGS = (
    "spark.sql.files.maxRecordsPerFile",
    "spark.databricks.delta.optimize.minFileSize",
    "spark.databricks.delta.write.txnAppId",
    "spark.pgcdc.unknown",
)


@pytest.mark.spark
def test_a_statement_with_its_own_settings_restores_the_previous_values(
    spark: SparkSession,
) -> None:
    with own_sessions(spark, 1) as (session,):
        before = {name: session.conf.get(name, None) for name in SETTINGS}
        assert before[SETTINGS[0]] == "1000000"
        assert before[SETTINGS[2]] is None and before[SETTINGS[3]] is None
        with pytest.raises(KeyError), session_settings(session, dict.fromkeys(SETTINGS, "7")):
            assert {session.conf.get(name, None) for name in SETTINGS} == {"7"}
            raise KeyError
        assert {name: session.conf.get(name, None) for name in SETTINGS} == before
