"""What a run of Dagster adds to its merge, with a warm Spark server.

`dagster dev` runs the two sensors, and the daemon launches each run from its queue as a process. A
run ends after its windows. Ten rows of a table of 100,000 change at a time, and the next change
waits for the end of the merge. The overhead is the time from the request of a merge's run to the
run's end, without the seconds of the merge itself, which the run records.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import psycopg2

from benchmarks.freshness_source import DATABASE, PUBLICATION, TABLE, source
from benchmarks.live_pipeline import count_equal_rows, environment_of, running_dagster
from benchmarks.results import Result
from benchmarks.run_overhead_definitions import CAPTURE
from benchmarks.scale import roomy_folder, scaled
from benchmarks.source import log
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.project.home import CONFIG
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.server import SparkServer

RUNS = scaled(8, least=1)
LIMIT_SECONDS = 3.0
_WARM_UP = 2
_CHANGES = 10
_LIMIT_OF_A_MERGE = 600.0
_POLL_SECONDS = 0.5
# The run of the capture ends after the landing, at which the merge is requested.
_SECONDS_BETWEEN = 5.0

_UPDATE = f"update {TABLE} set amount = amount + 1 where id <= %s"


def run() -> Iterator[Result]:
    """Measure runs that follow each other."""
    with roomy_folder("run-overhead", 3) as folder:
        parts = _measure(folder)
    yield Result.against_limit("dagster_run_overhead", parts["overhead"], LIMIT_SECONDS, "s")
    for part in ("until_start", "after_start", "merge"):
        yield Result.reported(f"dagster_run_{part}", parts[part], "s")


def _measure(folder: Path) -> dict[str, list[float]]:
    home = folder / "dagster"
    home.mkdir()
    shutil.copyfile(CONFIG, home / "dagster.yaml")
    with source(folder) as postgres, SparkServer(folder / "state").running(log) as spark:
        conninfo = postgres.conninfo(DATABASE)
        environment = environment_of(conninfo, folder, home, spark.remote)
        parts: defaultdict[str, list[float]] = defaultdict(list)
        with (
            running_dagster("benchmarks.run_overhead_definitions", folder, environment) as (
                _,
                check,
            ),
            dg.DagsterInstance.from_config(str(home)) as instance,
        ):
            merges = _ChangedMerges(instance, check)
            merges.find_next()
            for number in range(_WARM_UP + RUNS):
                time.sleep(_SECONDS_BETWEEN)
                _change(conninfo)
                found = merges.find_next()
                log(", ".join(f"{part} {seconds:.2f} s" for part, seconds in found.items()))
                if number >= _WARM_UP:
                    for part, seconds in found.items():
                        parts[part].append(seconds)
        zone = RawZone(Lake(environment["PGCDC_LAKE"]), CAPTURE.name)
        rows = count_equal_rows(conninfo, zone, PUBLICATION, [TABLE])
        log(f"{rows:,} rows equal their source")
    return parts


def _change(conninfo: str) -> None:
    with closing(psycopg2.connect(conninfo)) as conn, conn, conn.cursor() as cursor:
        cursor.execute(_UPDATE, (_CHANGES,))


@dataclass
class _ChangedMerges:
    """The merges that changed the table, one after the other.

    Attributes:
        check: raises an error if Dagster has ended.
    """

    instance: dg.DagsterInstance
    check: Callable[[], None]
    _seen: set[str] = field(default_factory=set)

    def find_next(self) -> dict[str, float]:
        """Wait for the end of the next merge, and return the seconds of its parts."""
        end = time.monotonic() + _LIMIT_OF_A_MERGE
        while True:
            for record in self._new():
                merge = self._merge_seconds(record)
                if merge is not None:
                    return _split(record, merge)
            self.check()
            if time.monotonic() > end:
                raise SystemExit(f"no merge ended within {_LIMIT_OF_A_MERGE:g} s")
            time.sleep(_POLL_SECONDS)

    def _new(self) -> list[dg.RunRecord]:
        """Return the successful runs since the last call, the oldest first."""
        wanted = dg.RunsFilter(
            job_name=Names.of(CAPTURE).merge_job, statuses=[dg.DagsterRunStatus.SUCCESS]
        )
        found = [
            record
            for record in reversed(self.instance.get_run_records(wanted))
            if record.dagster_run.run_id not in self._seen
        ]
        self._seen.update(record.dagster_run.run_id for record in found)
        return found

    def _merge_seconds(self, record: dg.RunRecord) -> float | None:
        """Return the seconds of a run's merge; None if it changed no row."""
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION
        for event in self.instance.all_logs(record.dagster_run.run_id, of_type=kind):
            materialization = event.asset_materialization
            # The newest window has the figures of the merge.
            if materialization is not None and "seconds" in materialization.metadata:
                figures = materialization.metadata
                is_first = "snapshot_lsn" in figures
                if is_first or float(str(figures["changes_read"].value)):
                    return float(str(figures["seconds"].value))
        return None


def _split(record: dg.RunRecord, merge: float) -> dict[str, float]:
    """Return the seconds of the parts of a run."""
    if record.start_time is None or record.end_time is None:
        raise SystemExit("the run has no times")
    requested = record.create_timestamp.timestamp()
    return {
        "until_start": record.start_time - requested,
        "after_start": record.end_time - record.start_time - merge,
        "merge": merge,
        "overhead": record.end_time - requested - merge,
    }
