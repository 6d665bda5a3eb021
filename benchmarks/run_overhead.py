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
from pathlib import Path

import dagster as dg
import psycopg2

from benchmarks.freshness_source import DATABASE, PUBLICATION, TABLE, source
from benchmarks.live_pipeline import count_equal_rows, running_dagster
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
        environment = {
            "PGCDC_DSN": conninfo,
            "PGCDC_LAKE": str(folder / "lake"),
            "PGCDC_SPARK_REMOTE": spark.remote,
            "DAGSTER_HOME": str(home),
        }
        parts: defaultdict[str, list[float]] = defaultdict(list)
        with (
            running_dagster("benchmarks.run_overhead_definitions", folder, environment) as (
                _,
                check,
            ),
            dg.DagsterInstance.from_config(str(home)) as instance,
        ):
            _await_merge(instance, 0, check)
            for number in range(_WARM_UP + RUNS):
                time.sleep(_SECONDS_BETWEEN)
                before = len(_merges(instance))
                _change(conninfo)
                found = _split(instance, _await_merge(instance, before, check))
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


def _merges(instance: dg.DagsterInstance) -> list[dg.RunRecord]:
    """Return the successful runs of the merge job, the newest first."""
    wanted = dg.RunsFilter(
        job_name=Names.of(CAPTURE).merge_job, statuses=[dg.DagsterRunStatus.SUCCESS]
    )
    return list(instance.get_run_records(wanted))


def _await_merge(
    instance: dg.DagsterInstance, before: int, check: Callable[[], None]
) -> dg.RunRecord:
    """Wait for one more successful merge than before, and return its record."""
    end = time.monotonic() + _LIMIT_OF_A_MERGE
    while len(found := _merges(instance)) <= before:
        check()
        if time.monotonic() > end:
            raise SystemExit(f"no merge ended within {_LIMIT_OF_A_MERGE:g} s")
        time.sleep(_POLL_SECONDS)
    return found[0]


def _split(instance: dg.DagsterInstance, record: dg.RunRecord) -> dict[str, float]:
    """Return the seconds of the parts of a run."""
    if record.start_time is None or record.end_time is None:
        raise SystemExit("the run has no times")
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    (event,) = instance.all_logs(record.dagster_run.run_id, of_type=kind)
    materialization = event.asset_materialization
    if materialization is None:
        raise SystemExit("the run has materialised nothing")
    merge = float(str(materialization.metadata["seconds"].value))
    requested = record.create_timestamp.timestamp()
    return {
        "until_start": record.start_time - requested,
        "after_start": record.end_time - record.start_time - merge,
        "merge": merge,
        "overhead": record.end_time - requested - merge,
    }
