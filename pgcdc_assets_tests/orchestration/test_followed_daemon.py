"""A running Dagster captures a new table of the publication without a person."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest

from pgcdc_assets.demo.dagster_dev import start_dagster, stop_dagster
from pgcdc_assets.local import free_port
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.relations.schema_events import CATALOG
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.orchestration.conftest import NAME
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.orchestration.daemon import ROOT, SECONDS
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

# The merge sensor is off, so that no run starts a JVM.
MODULE = """
from dagster_shared.record import replace
from pgcdc_assets import CdcCapture, TableSelection, WindowPolicy, build_cdc_definitions
from pgcdc_assets import LakeResource, PostgresResource

built = [build_cdc_definitions(
    CdcCapture(
        {name!r},
        "pub",
        (),
        slot={slot!r},
        windows=WindowPolicy(max_age_seconds=3600, min_bytes=2**40, max_bytes=2**41),
        {poll}
        selection=TableSelection(),
    ),
    postgres=PostgresResource(capture={name!r}, conninfo={conninfo!r}),
    lake=LakeResource(uri={lake!r}),
)]
kept = [sensor for sensor in built[0].sensors if not sensor.name.endswith("_merges")]
defs = replace(built[0], sensors=kept)
"""


def write_module(database: Database, lake: Lake, folder: Path, poll: str = "") -> Path:
    values = {"slot": f"s_{database.name}", "conninfo": database.conninfo, "lake": lake.uri}
    module = folder / "location.py"
    module.write_text(MODULE.format(name=NAME, poll=poll, **values))
    return module


@contextmanager
def running(module: Path, folder: Path) -> Iterator[None]:
    """Run Dagster with its daemon inside the block."""
    log = folder / "dagster.log"
    with log.open("wb") as out:
        environment = {"DAGSTER_HOME": str(folder / "dagster"), "PYTHONPATH": str(ROOT)}
        arguments = ["-f", str(module), "-h", "127.0.0.1", "-p", str(free_port())]
        process = start_dagster(arguments, folder, environment, out)
        try:
            yield
        except BaseException as error:
            error.add_note(log.read_text(errors="replace")[-6000:])
            raise
        finally:
            stop_dagster(process)


@pytest.mark.soak
def test_the_sensor_reloads_the_code_location(
    database: Database, lake: Lake, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    database.execute("create table a (id int primary key)")
    database.execute("create publication pub for all tables")
    module = write_module(database, lake, tmp_path, "catalog_poll_seconds=1,")
    snapshot = dg.AssetKey([NAME, "snapshot"])

    def is_copied(key: str) -> bool:
        return key in instance.get_materialized_partitions(snapshot)

    with running(module, tmp_path):
        # The first definitions have no table. The sensor stores the list, and reloads them.
        wait_until(lambda: is_copied("public.a"), "table a", limit_seconds=SECONDS)
        database.execute("create table b (id int primary key)")
        wait_until(lambda: is_copied("public.b"), "table b", limit_seconds=SECONDS)
    # The process of a run uses the list of the load that requested the run.
    runs = instance.get_runs(dg.RunsFilter(tags={CAPTURE_TAG: NAME}))
    assert {run.has_repository_load_data for run in runs} == {True}


@pytest.mark.soak
def test_a_change_without_a_row_is_noticed_within_a_minute(
    database: Database, lake: Lake, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    """F3, F7: with the default interval of the poll, by the daemon, which also takes a snapshot."""
    database.execute("create table a (id int primary key); insert into a values (1)")
    database.execute("create publication pub for all tables")
    zone = RawZone(lake, NAME)

    def snapshots() -> int:
        return len(zone.snapshots.complete_snapshots())

    def noticed() -> bool:
        return any(event.needs_snapshot for event in zone.schema_events.read())

    with running(write_module(database, lake, tmp_path), tmp_path):
        wait_until(lambda: snapshots() == 1, "the first snapshot", limit_seconds=SECONDS)
        database.execute("alter table a add n float not null default random()")
        altered_at = time.monotonic()
        wait_until(noticed, "the schema event", limit_seconds=60)
        assert time.monotonic() - altered_at < 60
        wait_until(lambda: snapshots() == 2, "the re-snapshot", limit_seconds=SECONDS)
    (event,) = [event for event in zone.schema_events.read() if event.needs_snapshot]
    assert event.found_by == CATALOG
    assert event.columns == ("n",)
