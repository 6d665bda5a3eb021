"""A long life, compressed: 20,000 windows of twenty tables, with the maintenance on.

Half of the tables are merged into a history (SCD2) too.

A source commits 20 transactions a second (`soak_writer.py`). `dagster dev` runs the lag sensor, the
merge sensor and the schedule of the maintenance, captures and merges are runs of Dagster, and the
merges use the Spark server of `pgcdc spark start`. Windows are opened after 0.1 s, and everything
that is deleted at an age is deleted after minutes (`soak_definitions.py`).

A sample is taken every minute. Each result is the median of the samples in the last tenth of the
time, divided by that in the second tenth: 1 for a flat curve. The first tenth is the warm-up.
A soak is one repetition, whatever its number of samples.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import dagster as dg
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from benchmarks.freshness_source import DATABASE, PUBLICATION, source, table_names
from benchmarks.live_pipeline import count_equal_rows, environment_of, running_dagster
from benchmarks.results import Result
from benchmarks.scale import memory_folder, roomy_folder, scaled
from benchmarks.soak_definitions import CAPTURE, INTERVAL, TABLES
from benchmarks.soak_samples import (
    Sample,
    count_files,
    find_merge_seconds,
    find_window_seconds,
    growth,
    growth_result,
    measure_database,
    merge_maxima,
    read_memory,
)
from benchmarks.soak_writer import SoakWriter
from benchmarks.source import log
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.project.home import CONFIG
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.spark.session import own_sessions, spark_session
from pgcdc_assets.tables.properties import FILE_RETENTION, LOG_RETENTION
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify import check_all

WINDOWS = scaled(20_000, least=100)
SAMPLE_SECONDS = scaled(60, least=5)

_POLL_SECONDS = 2.0
_SECONDS_TO_BEGIN = 600.0
_SECONDS_TO_CATCH_UP = 900.0
# Without a new window for so long, the pipeline has stopped.
_SECONDS_WITHOUT_A_WINDOW = 300.0
_NAMES = table_names(TABLES)


def run() -> Iterator[Result]:
    """Land and merge the windows, then compare all tables with their source."""
    with roomy_folder("soak", 12) as folder:
        samples = _measure(folder)
    at_end = _describe_end(samples[-1])
    for name, values in _series(samples).items():
        result = growth_result(f"soak_{name}_growth", values)
        log(f"{result.name}: {result.settings['early']} to {result.settings['late']}")
        yield replace(result, settings={**result.settings, **at_end})


def _series(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Return the curves of the results."""
    roles = set.intersection(*(set(sample.memory) for sample in samples))
    curves = {role: [sample.memory[role] for sample in samples] for role in sorted(roles)}
    rates = {}
    for role, curve in curves.items():
        early, late = growth(curve)
        rates[role] = late / early
        log(f"memory of the {role}: {early:,.0f} MB to {late:,.0f} MB")
    worst = max(rates, key=lambda role: rates[role])
    log(f"the memory of the {worst} grew most")
    memory = {f"memory_of_{role.replace(' ', '_')}": curve for role, curve in curves.items()}
    return {
        "window_seconds": [s.window_seconds for s in samples if s.window_seconds is not None],
        "merge_seconds": [s.merge_seconds for s in samples if s.merge_seconds is not None],
        "raw_files": [float(s.files["raw"].count) for s in samples],
        "scd_files": [float(s.files["scd"].count) for s in samples],
        "history_files": [float(s.files["history"].count) for s in samples],
        "log_files": [float(s.files["log"].count) for s in samples],
        "memory": curves[worst],
        **memory,
        "dagster_database": [s.database["database"] / 1e6 for s in samples],
    }


def _describe_end(sample: Sample) -> dict[str, str]:
    """Return the values at the end as settings of the results."""
    memory = (f"{role} {held:,.0f} MB" for role, held in sorted(sample.memory.items()))
    return {
        "windows": f"{sample.windows:,}",
        "files_at_end": ", ".join(f"{name} {files}" for name, files in sample.files.items()),
        "dagster_at_end": ", ".join(
            f"{name} {size / 1e6:,.1f} MB" for name, size in sample.database.items()
        ),
        "keys_at_end": f"{sample.keys:,}",
        "runs_at_end": str(sample.runs),
        "memory_at_end": ", ".join(memory),
    }


def _measure(folder: Path) -> list[Sample]:
    """Return the samples, after all tables were found equal to their source."""
    with (
        _dagster_home() as home,
        source(folder, TABLES) as postgres,
        SparkServer(folder / "state").running(log) as spark,
    ):
        # The merges take the processor time that the capture leaves.
        os.setpriority(os.PRIO_PGRP, spark.pid, 5)
        conninfo = postgres.conninfo(DATABASE)
        environment = environment_of(conninfo, folder, home, spark.remote)
        zone = RawZone(Lake(environment["PGCDC_LAKE"]), CAPTURE.name)
        with (
            running_dagster("benchmarks.soak_definitions", folder, environment) as (pid, check),
            dg.DagsterInstance.from_config(str(home)) as instance,
        ):
            soak = _Soak(zone, home, instance, [pid, spark.pid, _postmaster(postgres.data_dir)])
            soak.begin(check)
            with SoakWriter(conninfo, _NAMES) as writer:

                def check_all() -> None:
                    check()
                    writer.check()

                soak.follow(check_all)
            writer.check()
            log(f"{writer.changes:,} changes were written")
            soak.catch_up(writer.end, check)
        rows = count_equal_rows(conninfo, zone, PUBLICATION, _NAMES)
        log(f"{len(_NAMES)} tables with {rows:,} rows equal their source")
        _check_histories(spark.remote, zone)
    return soak.samples


class _Soak:
    """The samples of one soak.

    Attributes:
        samples: the samples so far.
    """

    def __init__(
        self, zone: RawZone, home: Path, instance: dg.DagsterInstance, roots: Sequence[int]
    ) -> None:
        self.samples: list[Sample] = []
        self._zone, self._home, self._instance, self._roots = zone, home, instance, roots
        self._windows, self._end = 0, Lsn(0)
        self._memory: dict[str, float] = {}

    def begin(self, check: Callable[[], None]) -> None:
        """Wait until all tables exist, then set their retention of files and log entries."""
        paths = [
            table_path(self._zone.lake, self._zone.name, table.schema, table.table, scd)
            for table in CAPTURE.tables
            for scd in table.scd
        ]
        _wait_for(
            lambda: all(map(DeltaTable.is_deltatable, paths)), check, _SECONDS_TO_BEGIN, "snapshots"
        )
        for path in paths:
            _set_retention(path)
        self._count()
        self._windows = 0

    def follow(self, check: Callable[[], None]) -> None:
        """Sample until all windows are landed."""
        began = sampled = news = time.monotonic()
        while self._windows < WINDOWS:
            check()
            before = self._windows
            self._count()
            now = time.monotonic()
            if self._windows > before:
                news = now
            elif now - news > _SECONDS_WITHOUT_A_WINDOW:
                raise SystemExit(f"no window was landed for {_SECONDS_WITHOUT_A_WINDOW:g} s")
            merge_maxima(self._memory, read_memory(self._roots))
            if now - sampled >= SAMPLE_SECONDS:
                sampled = now
                self._sample(now - began)
            time.sleep(_POLL_SECONDS)
        self._sample(time.monotonic() - began)

    def catch_up(self, end: Lsn, check: Callable[[], None]) -> None:
        """Wait until everything before a position is merged."""

        def is_merged() -> bool:
            merged = read_state(self._zone, CAPTURE).merged_through
            return merged is not None and merged.lsn >= end

        _wait_for(is_merged, check, _SECONDS_TO_CATCH_UP, "the last merge")

    def _count(self) -> None:
        """Count the windows since the last call, which retention has not removed yet."""
        landed = self._zone.changes.windows(1, self._end)
        if landed:
            self._windows += len(landed)
            self._end = landed[-1].window.end

    def _sample(self, seconds: float) -> None:
        name = CAPTURE.name
        # The last sample may follow another one at once.
        merge_maxima(self._memory, read_memory(self._roots))
        sample = Sample(
            seconds,
            self._windows,
            find_window_seconds(self._instance, dg.AssetKey([name, "raw"])),
            find_merge_seconds(Path(table_path(self._zone.lake, name, "public", _NAMES[0], 1))),
            count_files(Path(self._zone.lake.uri) / name),
            measure_database(self._home),
            len(self._instance.get_dynamic_partitions(CAPTURE.windows_name)),
            self._instance.get_runs_count(),
            dict(self._memory),
        )
        self._memory.clear()
        self.samples.append(sample)
        log(str(sample))


@contextmanager
def _dagster_home() -> Iterator[Path]:
    """Create a home for Dagster, in memory if possible: half of a window is its writes to disk."""
    with memory_folder("soak") as folder:
        shutil.copyfile(CONFIG, folder / "dagster.yaml")
        yield folder


def _check_histories(remote: str, zone: RawZone) -> None:
    """Check all rows of the histories, whose current versions must equal SCD1."""
    with own_sessions(spark_session("pgcdc benchmark", remote=remote), 1) as (session,):
        for table in CAPTURE.tables:
            if 2 in table.scd:
                found = check_all(session, zone, table, 2)
                if not found.is_sound or found.not_judged:
                    raise SystemExit(f"the history of {table.table} is not sound: {found}")
                log(f"the history of {table.table} has {found.row_count:,} rows")


def _set_retention(path: str) -> None:
    """Set the retention of a table as its owner; repeat it if a merge commits at the same time."""
    properties = {FILE_RETENTION: INTERVAL, LOG_RETENTION: INTERVAL}
    for _ in range(10):
        with suppress(DeltaError):
            DeltaTable(path).alter.set_table_properties(properties)
            return
    raise SystemExit(f"the retention of {path} cannot be set")


def _wait_for(
    is_over: Callable[[], bool], check: Callable[[], None], limit_seconds: float, awaited: str
) -> None:
    end = time.monotonic() + limit_seconds
    while not is_over():
        check()
        if time.monotonic() > end:
            raise SystemExit(f"{awaited} did not come within {limit_seconds:g} s")
        time.sleep(_POLL_SECONDS)


def _postmaster(data_dir: Path) -> int:
    """Return the pid of a Postgres server."""
    return int((data_dir / "postmaster.pid").read_text().split()[0])
