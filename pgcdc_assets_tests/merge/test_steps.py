"""Merges of tables with a large backlog: several commits in one run, each within the limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables, run
from pgcdc_assets.raw.delta.sizes import RowGroups
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import StepLimit
from pgcdc_assets.spark.session import own_sessions
from pgcdc_assets.spark.tuning import tune
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import read_watermark, table_path
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.merge.one_table import log_of, merge
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark, merge_together

pytestmark = pytest.mark.spark

WINDOWS = 50
PER_STEP = 25
BOTH = CdcTable("shop", "items", (1, 2))
MEGABYTE = 1024 * 1024

_MERGE = """
import sys
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.merge import merge_tables
from pgcdc_assets.settings.policies import StepLimit
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone

lake, name, window, changes = sys.argv[1:]
spark = spark_session("steps", conf={"spark.master": "local[2]", "spark.ui.enabled": "false"})
target = CdcTable(*name.split("."), scd=(2,))
zone, limit = RawZone(Lake(lake), "test"), StepLimit(changes=int(changes))
(report,) = merge_tables(spark, zone, [target], LsnWindow.parse(window), limit=limit)
print(report.steps, report.row_count)
"""


@pytest.fixture
def far_behind(zone: RawZone) -> Landing:
    """Land a snapshot of a table, and fifty later windows with two changes each."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["0", "copied"]])
    for number in range(WINDOWS):
        landing.land([insert(str(number + 1), "new")], [update("0", f"update {number}")])
    return landing


def _merge(spark: SparkSession, landing: Landing) -> dict[int, MergeReport | MergeFailure]:
    limit = StepLimit(changes=2 * PER_STEP)
    found = merge_tables(spark, landing.zone, [BOTH], landing.windows[-1], limit=limit)
    return {getattr(report, "scd", 0): report for report in found}


def _rows(spark: SparkSession, path: str) -> list[tuple[Any, ...]]:
    frame = spark.read.format("delta").load(path)
    return sorted((tuple(row) for row in frame.drop("_rescued").collect()), key=repr)


def _steps(path: str, app_id: str) -> list[int]:
    """Return the watermarks of the table's commits, oldest first."""
    marks = []
    for entry in sorted(Path(path, "_delta_log").glob("*.json")):
        for line in entry.read_text().splitlines():
            transaction = json.loads(line).get("txn", {})
            if transaction.get("appId") == app_id:
                marks.append(transaction["version"])
    return marks


@pytest.mark.sampled
def test_a_backlog_of_fifty_windows_is_merged_in_commits_within_the_limit(
    spark: SparkSession, far_behind: Landing
) -> None:
    reports = _merge(spark, far_behind)
    ends = [int(far_behind.windows[n].end) for n in range(PER_STEP - 1, WINDOWS, PER_STEP)]
    for scd in (1, 2):
        report = reports[scd]
        assert isinstance(report, MergeReport), report
        assert (report.steps, report.windows_folded) == (WINDOWS // PER_STEP, WINDOWS)
        assert report.changes_read == 2 * WINDOWS
        marks = _steps(report.path, far_behind.zone.app_id(1))
        # The first step of small tables is one commit.
        assert marks == ends
        assert log_of(report.path) == []
    rows = _rows(spark, reports[1].path)  # type: ignore[union-attr]
    assert len(rows) == WINDOWS + 1
    assert rows[0][:2] == (0, f"update {WINDOWS - 1}")
    assert len(_rows(spark, reports[2].path)) == 2 * WINDOWS + 1  # type: ignore[union-attr]


@pytest.mark.sampled
def test_the_next_merge_continues_after_the_newest_step(
    spark: SparkSession, far_behind: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_by_spark(monkeypatch)
    done: list[int] = []
    real = run.merge_table

    def ending(*arguments: Any) -> MergeReport:
        if len(done) == 1:
            raise TransientError(reason="the process was killed")
        done.append(1)
        return real(*arguments)

    target = CdcTable("shop", "items", (2,))
    limit = StepLimit(changes=2 * PER_STEP)
    with monkeypatch.context() as patched:
        patched.setattr(run, "merge_table", ending)
        (failure,) = merge_tables(
            spark, far_behind.zone, [target], far_behind.windows[-1], limit=limit
        )
    assert isinstance(failure, MergeFailure)
    lake, name = far_behind.zone.lake, far_behind.zone.name
    reached = read_watermark(lake, name, "shop", "items", 2)
    assert reached == Position(1, Lsn(far_behind.windows[PER_STEP - 1].end))

    (report,) = merge_tables(spark, far_behind.zone, [target], far_behind.windows[-1], limit=limit)
    assert isinstance(report, MergeReport), report
    assert report.steps == WINDOWS // PER_STEP - 1
    rows = spark.read.format("delta").load(report.path)
    assert rows.count() == 2 * WINDOWS + 1
    assert rows.where("_is_current").count() == WINDOWS + 1


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("by_spark", [True, False], ids=["by spark", "together"])
def test_a_merge_that_is_killed_between_two_steps_has_committed_the_first(
    far_behind: Landing, monkeypatch: pytest.MonkeyPatch, by_spark: bool
) -> None:
    """The merge runs in a child process. The next process continues after the first step."""
    (merge_by_spark if by_spark else merge_together)(monkeypatch)
    target = CdcTable("shop", "items", (2,))
    path = table_path(far_behind.zone.lake, far_behind.zone.name, "shop", "items", 2)
    ends = [int(far_behind.windows[n].end) for n in range(PER_STEP - 1, WINDOWS, PER_STEP)]
    # Spark's first step has a commit for the snapshot.
    copied = [int(far_behind.windows[0].start)] if by_spark else []
    arguments = (target.qualified_name, far_behind.windows[-1].key, str(2 * PER_STEP))

    killed = _merge_in_process(far_behind, *arguments, failpoint="after_merge_step")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert _steps(path, far_behind.zone.app_id(1)) == [*copied, ends[0]]

    continued = _merge_in_process(far_behind, *arguments)
    assert continued.returncode == 0, continued.stderr[-2000:]
    assert continued.stdout.split() == [str(WINDOWS // PER_STEP - 1), str(2 * WINDOWS + 1)]
    assert _steps(path, far_behind.zone.app_id(1)) == [*copied, *ends]


def _merge_in_process(
    landing: Landing, *arguments: str, failpoint: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _MERGE, landing.zone.lake.uri, *arguments],
        env={**os.environ, "PGCDC_FAILPOINT": failpoint},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.soak
def test_rows_of_a_megabyte_are_merged_in_several_partitions(pipeline: Pipeline) -> None:
    """WAL compresses the rows to a hundredth, so the size is read from the raw zone."""
    pipeline.start(
        "create table t (id int primary key, v text)", "insert into t values (0, 'copied')"
    )
    pipeline.database.execute(
        "insert into t select n, repeat(md5(n::text), 32768) from generate_series(1, 200) n"
    )
    window = pipeline.capture()
    assert window.size_bytes < 20 * MEGABYTE
    target = CdcTable("public", "t", (2,))
    with own_sessions(pipeline.spark, 1) as sessions:
        (report,) = merge_tables(pipeline.spark, pipeline.zone, [target], window, sessions=sessions)
        assert isinstance(report, MergeReport), report
        assert int(sessions[0].conf.get("spark.sql.shuffle.partitions") or 0) >= 7
    newest = log_of(report.path)[0]
    assert newest["operationMetrics"]["numTargetRowsInserted"] == "200"
    assert int(newest["operationMetrics"]["numTargetFilesAdded"]) >= 4
    stored = pipeline.spark.read.format("delta").load(report.path)
    assert stored.where("length(v) = 1048576").count() == 200


@pytest.mark.sampled
def test_the_bytes_of_a_snapshot_determine_the_size_of_its_merge(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_by_spark(monkeypatch)
    sizes = []

    def recorded(session: SparkSession, changes: int, target_bytes: int, change_bytes: int) -> None:
        sizes.append(change_bytes)
        tune(session, changes, target_bytes, change_bytes)

    monkeypatch.setattr(run, "tune", recorded)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    rows = [[str(n), f"{n}" * 100_000] for n in range(20)]
    text = sum(len(row[1]) for row in rows)
    landing.begin(rows)
    landing.land([insert("20", "new")])
    target = CdcTable("shop", "items", (2,))
    merge(spark, landing, target)
    landing.land([insert("21", "new")])
    landing.copy(rows)
    landing.land([insert("22", "new")])
    report = merge(spark, landing, target)
    assert report.snapshot_lsn is not None
    assert max(sizes[:-1]) < text / 10
    assert 0.9 * 2 * text < sizes[-1] < 1.5 * 2 * text


def test_the_footers_of_the_raw_zone_contain_the_bytes_of_a_table(zone: RawZone) -> None:
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin()
    large = [insert(str(n), f"{n}" * 100_000) for n in range(20)]
    window = landing.land(large)
    groups = RowGroups(zone.changes.table).between(1, window.start, window.end)
    held = [group for group in groups if group.may_hold(TableName("shop", "items"))]
    text = sum(len(change.new[1] or "") for change in large if change.new is not None)
    assert 0.9 * text < sum(group.size_bytes for group in held) < 1.5 * text
    assert not any(group.may_hold(TableName("shop", "zebras")) for group in groups)
