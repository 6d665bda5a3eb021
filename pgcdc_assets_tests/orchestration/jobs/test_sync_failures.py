"""`sync_capture` with a failing table or continuous writers: the capture completes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import merge
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.cli import main
from pgcdc_assets.errors import (
    MergeConflict,
    PgcdcError,
    RawZoneError,
    TableMoved,
    TransientError,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import MergeFailure
from pgcdc_assets.orchestration.assets import idle_tables
from pgcdc_assets.orchestration.jobs.sync import sync_capture
from pgcdc_assets.orchestration.jobs.sync_report import SyncLimits
from pgcdc_assets.orchestration.partitions import build_range_tags
from pgcdc_assets.orchestration.project import code_location as loading
from pgcdc_assets.orchestration.project import home as instance
from pgcdc_assets.orchestration.resources import SparkResource
from pgcdc_assets.orchestration.runs import failures
from pgcdc_assets.orchestration.runs.merge_failures import find_merge_failures
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.postgres.wal.positions import read_barrier
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.orchestration.conftest import LIMITS, NAME, Orchestrated
from pgcdc_assets_tests.support.orchestration.long_runs import land_aside

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


def barrier_of(orchestrated: Orchestrated) -> Lsn:
    with orchestrated.database.connect() as connection:
        return read_barrier(connection)


def captured_through(orchestrated: Orchestrated) -> Lsn:
    through = orchestrated.zone.changes.captured_through(1)
    assert through is not None
    return through


def failed_runs(orchestrated: Orchestrated, part: str) -> int:
    statuses = [dg.DagsterRunStatus.FAILURE]
    filters = dg.RunsFilter(job_name=f"{NAME}_{part}", statuses=statuses)
    return orchestrated.instance.get_runs_count(filters)


def stopped_in(orchestrated: Orchestrated) -> dict[str, str]:
    state = read_state(orchestrated.zone, orchestrated.capture)
    return find_merge_failures(orchestrated.instance, NAME, state.tables)


@contextmanager
def broken(orchestrated: Orchestrated, table: str) -> Iterator[None]:
    """Make an SCD table unreadable inside the block."""
    log = Path(orchestrated.lake.path(NAME, "scd1", "public", table, "_delta_log"))
    commit = min(log.glob("*.json"))
    whole = commit.read_bytes()
    commit.write_bytes(b"not a commit")
    try:
        yield
    finally:
        commit.write_bytes(whole)


@pytest.fixture
def with_unpublished(orchestrated: Orchestrated) -> Orchestrated:
    """Return a capture that also declares a table which its publication lacks."""
    orchestrated.database.execute("create table c (id int primary key)")
    a, b = orchestrated.capture.tables
    return replace(
        orchestrated,
        capture=replace(orchestrated.capture, tables=(a, CdcTable("public", "c"), b)),
    )


@pytest.fixture
def small_windows(orchestrated: Orchestrated) -> Orchestrated:
    windows = replace(orchestrated.capture.windows, max_bytes=100_000)
    return replace(orchestrated, capture=replace(orchestrated.capture, windows=windows))


def write_much(orchestrated: Orchestrated) -> None:
    """Write WAL for several small windows."""
    for turn in range(4):
        orchestrated.commit(
            f"insert into a select {turn} * 1000 + n, repeat('x', 100) "
            "from generate_series(101, 800) n"
        )
        orchestrated.commit(f"insert into b values ({turn}, 1)")


@pytest.mark.sampled
def test_a_broken_table_delays_neither_the_capture_nor_other_tables(
    small_windows: Orchestrated, spark: SparkSession
) -> None:
    """H8: one call captures any number of windows through the barrier."""
    small_windows.sync()
    before = len(small_windows.windows())
    write_much(small_windows)
    barrier = barrier_of(small_windows)
    with broken(small_windows, "b"):
        with pytest.raises(PgcdcError, match=r"Not merged: public\.b"):
            small_windows.sync()
        (reason,) = stopped_in(small_windows).values()
        assert "public.b" in reason or "scd1/public/b" in reason
        assert len(small_windows.windows()) - before >= 3
        assert captured_through(small_windows) >= barrier
        assert small_windows.equals_source("a")
        assert failed_runs(small_windows, "merge") == 1, "the merge is not retried for each window"
    small_windows.sync()
    assert small_windows.equals_source("b")
    small_windows.commit("insert into b values (77, 1)")
    land_aside(small_windows)
    assert stopped_in(small_windows) == {}, "a failure before the newest merge is not shown"


@pytest.mark.sampled
def test_the_error_explains_each_stopped_table(
    orchestrated: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asking = replace(orchestrated.capture, on_schema_change="ask")
    orchestrated = replace(orchestrated, capture=asking)
    orchestrated.sync()
    orchestrated.commit("alter table a alter column v type int using 1; update a set v = 2")
    orchestrated.commit(
        "alter table b alter column n type int using 1; insert into b values (1, 1)"
    )
    with pytest.raises(PgcdcError) as caught:
        orchestrated.sync()
    sentences = [
        rf"Table public\.{table}, column {column}: [^.]*from {types}[^.]*\. Take a new snapshot "
        rf"with: pgcdc resnapshot t public\.{table}"
        for table, column, types in (
            ("a", "v", "text to integer"),
            ("b", "n", r"numeric\(10,2\) to integer"),
        )
    ]
    assert all(re.search(sentence, str(caught.value)) for sentence in sentences)

    monkeypatch.setattr("pgcdc_assets.cli.status.load_location", lambda _: orchestrated.location)
    monkeypatch.setattr(
        "pgcdc_assets.cli.status.open_instance", lambda: nullcontext(orchestrated.instance)
    )
    orchestrated.commit("insert into b select n, 0 from generate_series(10, 20000) n")
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(f": {sentence}", out) for sentence in sentences)
    assert len(re.findall(r"public\.[ab] .* STOPPED$", out, re.MULTILINE)) == 2
    assert re.search(r"lag [\d.]+ [kM]B, retains [\d.]+ [kM]B of WAL", out)
    assert re.search(r"[\d.]+ MB of WAL and at most \d+ s behind the server", out)


@pytest.mark.sampled
def test_a_failed_merge_of_a_wide_publication_names_no_idle_table(
    orchestrated: Orchestrated, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run for many tables does not materialise its idle tables."""
    monkeypatch.setattr(idle_tables, "MOST_TABLES", 1)
    monkeypatch.setattr(failures, "SECONDS_BETWEEN", 0.0)
    orchestrated.sync()
    orchestrated.commit("insert into b values (1, 1)")
    begun: list[dg.DagsterRun] = []

    def resnapshot_beside(line: str) -> None:
        if line.startswith(f"{NAME}_merge: "):
            tags = build_range_tags("public.b", "public.b")
            begun.append(orchestrated.start_run("snapshot", tags))
        elif line.endswith("Continuing with the rest."):
            orchestrated.instance.report_run_canceled(begun[-1])

    with pytest.raises(PgcdcError, match=r"^Not merged: scd1\.public\.b\. Table"):
        orchestrated.sync(resnapshot_beside)


@pytest.mark.sampled
def test_a_failed_snapshot_delays_neither_the_capture_nor_other_tables(
    with_unpublished: Orchestrated, spark: SparkSession
) -> None:
    """B14: at the first call and at each later call."""
    for turn in range(2):
        with_unpublished.commit(f"insert into b values ({turn}, 1)")
        barrier = barrier_of(with_unpublished)
        with pytest.raises(PgcdcError, match=r"Not copied: public\.c") as caught:
            with_unpublished.sync()
        assert caught.value.exit_status == 2
        assert captured_through(with_unpublished) >= barrier
        assert with_unpublished.equals_source("a")
        assert with_unpublished.equals_source("b")
        assert failed_runs(with_unpublished, "snapshot") == turn + 1

    with_unpublished.commit("insert into b values (10, 1)")
    with broken(with_unpublished, "b"), pytest.raises(PgcdcError) as caught:
        with_unpublished.sync()
    assert "Not copied: public.c" in str(caught.value)
    assert "Not merged: public.b" in str(caught.value)

    with_unpublished.database.execute("alter publication pub add table c")
    with_unpublished.sync()
    assert with_unpublished.equals_source("b")
    assert with_unpublished.equals_source("c")


@pytest.mark.soak
def test_without_a_spark_session_the_capture_continues(
    small_windows: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SparkResource, lake: Lake) -> SparkSession:
        raise TransientError(reason="no Spark today")

    monkeypatch.setattr(SparkResource, "session", refuse)
    small_windows.copy()
    write_much(small_windows)
    barrier = barrier_of(small_windows)
    with pytest.raises(TransientError, match="no Spark today"):
        small_windows.sync()
    assert captured_through(small_windows) >= barrier


@pytest.mark.sampled
def test_a_failed_capture_ends_the_call_and_keeps_earlier_failures(
    with_unpublished: Orchestrated, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PgcdcError, match="Not copied"):
        with_unpublished.sync()

    def fail(*arguments: object) -> None:
        raise RawZoneError(raw_zone=NAME, reason="planted")

    monkeypatch.setattr(CaptureSession, "land", fail)
    with_unpublished.commit("insert into b values (1, 1)")
    with pytest.raises(PgcdcError, match=r"planted.*Not copied: public\.c") as caught:
        with_unpublished.sync()
    assert caught.value.exit_status == RawZoneError.exit_status
    assert failed_runs(with_unpublished, "capture") == 1


@pytest.mark.sampled
@pytest.mark.parametrize("is_broken", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_sync_ends_if_other_processes_capture_beyond_its_barrier(
    orchestrated: Orchestrated, spark: SparkSession, is_broken: bool
) -> None:
    """A16: during each merge another window lands, as with a running daemon."""
    orchestrated.sync()
    orchestrated.commit("insert into a values (1000, 'before'); insert into b values (1, 1)")
    merges = 0

    def land_before_merges(line: str) -> None:
        nonlocal merges
        if not line.startswith(f"{NAME}_merge: "):
            return
        merges += 1
        if merges <= 5:
            orchestrated.commit(f"insert into a values ({merges + 1000}, 'after')")
            land_aside(orchestrated)

    if is_broken:
        with broken(orchestrated, "b"), pytest.raises(PgcdcError, match=r"public\.b"):
            orchestrated.sync(land_before_merges)
    else:
        assert orchestrated.sync(land_before_merges).merge_count == 1
    assert merges == 1
    orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")


@pytest.mark.sampled
def test_only_the_flag_takes_over_the_slot_of_another_lake(
    orchestrated: Orchestrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same settings with an empty lake, without Spark."""

    def refuse(self: SparkResource, lake: Lake) -> SparkSession:
        raise TransientError(reason="no Spark today")

    monkeypatch.setattr(SparkResource, "session", refuse)
    orchestrated.copy()
    elsewhere = replace(orchestrated, lake=Lake(str(tmp_path / "elsewhere")))
    location = elsewhere.location

    def sync_elsewhere(*, adopt_slot: bool) -> None:
        loaded, instance = location.captures[NAME], elsewhere.instance
        sync_capture(instance, location, loaded, limits=LIMITS, adopt_slot=adopt_slot)

    with pytest.raises(PgcdcError, match=r"was read before.*--adopt-slot") as caught:
        sync_elsewhere(adopt_slot=False)
    assert caught.value.exit_status == 4
    assert elsewhere.zone.epochs.latest() is None
    with pytest.raises(PgcdcError, match="no Spark today"):
        sync_elsewhere(adopt_slot=True)
    assert elsewhere.zone.epochs.latest() is not None
    assert main(["sync", "--adopt-slot"]) == 2


@pytest.mark.sampled
def test_a_sync_that_waits_too_long_names_the_merge_of_another_process(
    orchestrated: Orchestrated,
) -> None:
    """All changes are captured, and another `pgcdc sync` or the daemon runs a merge."""
    orchestrated.copy()
    orchestrated.commit("insert into b values (1, 1)")
    orchestrated.land()
    orchestrated.start_run("merge", {})
    limits = SyncLimits(wait_seconds=0.5, poll_seconds=0.1)
    with pytest.raises(TransientError, match=r"within 0.5 s: a merge is running\. Run"):
        orchestrated.sync(limits=limits)


@pytest.mark.soak
def test_verify_compares_other_tables_if_a_table_cannot_be_merged(
    orchestrated: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    orchestrated.sync()
    orchestrated.commit("insert into a values (1000, 'x'); insert into b values (1, 1)")
    monkeypatch.setattr(loading, "load_location", lambda module: orchestrated.location)
    monkeypatch.setattr(instance, "open_instance", lambda: nullcontext(orchestrated.instance))

    real = merge.merge_tables

    def refuse_b(*arguments: Any, root: str | None = None, **options: Any) -> Iterator[Any]:
        # A comparison folds a copy of the table in a temporary folder.
        for report in real(*arguments, root=root, **options):
            if root is None and report.table == "b":
                error = MergeConflict(table="public.b", reason="planted.")
                yield MergeFailure("public", "b", error)
            else:
                yield report

    monkeypatch.setattr(merge, "merge_tables", refuse_b)
    assert main(["verify"]) == MergeConflict.exit_status
    printed = capsys.readouterr()
    assert "Not merged: public.b" in printed.err
    assert "public.a" in printed.out
    assert "public.b" in printed.out


@pytest.mark.soak
def test_a_sync_follows_a_renamed_table_until_another_table_has_its_name(
    orchestrated: Orchestrated,
) -> None:
    orchestrated.sync()
    orchestrated.commit("alter table a rename to z")
    orchestrated.commit("insert into z values (1000, 'x'); insert into b values (1, 1)")
    orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")
    orchestrated.commit("create table a (id int primary key)")
    orchestrated.commit("insert into z values (1001, 'y')")
    with pytest.raises(TableMoved, match=r"public\.a is named public\.z now, and another table"):
        orchestrated.sync()
    state = read_state(orchestrated.zone, orchestrated.capture)
    assert [table.waiting_changes for table in state.tables] == [0, 0]
