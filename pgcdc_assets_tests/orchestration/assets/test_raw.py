"""The metadata of runs that land changes and snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest
from psycopg2 import sql

from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.project.code_location import CodeLocation, find_captures
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress, sync_progress
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.wal.positions import read_barrier
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.database import Database, drop_database
from pgcdc_assets_tests.support.proxy import TcpProxy

pytestmark = pytest.mark.postgres


@pytest.fixture
def ascii_location(orchestrated: Orchestrated) -> Iterator[Orchestrated]:
    """Capture the same tables in a database with encoding SQL_ASCII."""
    database = Database(orchestrated.database.server, f"{orchestrated.database.name}_a")
    orchestrated.database.execute(
        sql.SQL(
            "create database {} encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'"
        ).format(sql.Identifier(database.name))
    )
    try:
        database.execute("create table a (id int primary key, v text)")
        database.execute("create table b (id int primary key, n numeric(10, 2))")
        database.execute("create publication pub for table a, b")
        capture = replace(orchestrated.capture, slot=f"s_{database.name}")
        yield Orchestrated(database, orchestrated.lake, orchestrated.instance, capture)
    finally:
        drop_database(database)


@pytest.mark.sampled
def test_values_that_are_not_utf8_are_counted_by_table_and_the_run_succeeds(
    ascii_location: Orchestrated,
) -> None:
    bad = "convert_from('\\xe9'::bytea, 'SQL_ASCII')"
    ascii_location.commit(f"insert into a values (1, {bad}), (2, 'ok')")
    ascii_location.copy()
    ascii_location.commit(f"insert into a values (3, {bad}), (4, {bad}); insert into b values (1)")
    ascii_location.land()

    (window,) = ascii_location.windows()
    landed = _metadata(ascii_location, "raw", window)
    assert {r.data["warning"]: r.data["count"] for r in landed["warnings"].records} == {
        "public.a: values that are not UTF-8, landed as hex": "2"
    }
    copied = {
        table: _metadata(ascii_location, "snapshot", f"public.{table}")["values_not_utf8"].value
        for table in "ab"
    }
    assert copied == {"a": 1, "b": 0}


@pytest.mark.sampled
def test_a_run_of_a_sync_lands_all_windows_through_the_barrier_over_one_stream(
    orchestrated: Orchestrated, proxy: TcpProxy
) -> None:
    """A16: writers continue during the run."""
    windows = replace(orchestrated.capture.windows, max_bytes=100_000)
    capture = replace(orchestrated.capture, windows=windows)
    database = orchestrated.database
    location = Orchestrated(database, orchestrated.lake, orchestrated.instance, capture)
    location.copy()
    location.commit("insert into a select i, repeat('x', 100) from generate_series(11, 3000) i")
    for number in range(20):
        location.commit(f"insert into b select {number} * 100 + i, 1 from generate_series(1, 99) i")
    with query_connection(database.settings(), "test") as conn:
        barrier = read_barrier(conn)
    location.commit("insert into b values (-1, 1)")
    definitions = build_cdc_definitions(
        capture,
        postgres=PostgresResource(capture=NAME, conninfo=proxy.conninfo(database.conninfo)),
        lake=LakeResource(uri=location.lake.uri),
    )
    (request,) = location.tick("lag", one_shot=True).run_requests
    location.location = CodeLocation(definitions, find_captures(definitions))
    token = sync_progress.set(SyncProgress(NAME, barrier=barrier))
    try:
        assert location.execute(request, "capture").success
    finally:
        sync_progress.reset(token)

    landed = [summary.window for summary in location.zone.changes.windows(1)]
    assert len(landed) >= 4
    assert [window.key for window in landed] == location.windows()
    assert all(window.size_bytes <= 100_000 for window in landed)
    assert landed[-1].end == barrier
    assert set(location.windows()) == set(
        location.instance.get_materialized_partitions(location.raw)
    )
    assert proxy.connection_count == 2
    counts = [summary.counts for summary in location.zone.changes.windows(1)]
    assert sum(count.get("public.b", {}).get("I", 0) for count in counts) == 20 * 99


@pytest.mark.sampled
def test_a_run_records_its_progress_beside_the_lag(orchestrated: Orchestrated) -> None:
    stream = replace(orchestrated.capture.stream, report_seconds=0.01)
    location = Orchestrated(
        orchestrated.database,
        orchestrated.lake,
        orchestrated.instance,
        replace(orchestrated.capture, stream=stream),
    )
    location.copy()
    location.commit("insert into a select i, repeat('x', 100) from generate_series(11, 3000) i")
    run_id = location.land().run_id
    records = location.instance.fetch_observations(location.raw, limit=100).records
    found = [r.asset_observation.metadata for r in records if r.asset_observation is not None]
    progress = [each for each in found if "rows_per_second" in each]
    assert progress
    assert {"seconds_waiting", "queued_batches", "bytes_received"} <= progress[0].keys()
    logged = [record.user_message for record in location.instance.all_logs(run_id)]
    assert any(text.startswith("Source: server version") for text in logged)
    (window,) = location.windows()
    assert _metadata(location, "raw", window)["seconds_committing"].value > 0

    # The sensor observes the lag at its own interval.
    assert len([each for each in found if "wal_status" in each]) == 1


def _metadata(location: Orchestrated, asset: str, partition: str) -> dict[str, Any]:
    records = location.instance.fetch_materializations(
        dg.AssetRecordsFilter(dg.AssetKey([NAME, asset]), asset_partitions=[partition]), limit=1
    ).records
    assert records[0].asset_materialization is not None
    return dict(records[0].asset_materialization.metadata)
