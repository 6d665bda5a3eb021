"""Runs that continue, while another thread commits and lands windows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import dagster as dg
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecord

from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS
from pgcdc_assets.orchestration.runs.long_runs import SECONDS_TAG
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.wal.positions import read_current_lsn
from pgcdc_assets_tests.orchestration.conftest import Orchestrated


@contextmanager
def running_beside(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a thread beside the block, and raise its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not errors, errors


def land_aside(continuing: Orchestrated) -> None:
    """Land a window without Dagster, because two runs in one process block each other's log."""
    epoch = continuing.zone.epochs.latest()
    assert epoch is not None
    start = continuing.zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
    settings = continuing.database.settings()
    with query_connection(settings, "test") as conn:
        window = LsnWindow.of(epoch.epoch, start, read_current_lsn(conn))
    continuing.instance.add_dynamic_partitions(continuing.capture.windows_name, [window.key])
    capture_window(settings, continuing.zone, continuing.capture.slot, "pub", window)


def asked(continuing: Orchestrated, sensor: str) -> dg.RunRequest:
    (request,) = continuing.tick(sensor).run_requests
    assert float(request.tags[SECONDS_TAG]) == 60
    return request  # type: ignore[no-any-return]


def evaluated(result: dg.ExecuteInProcessResult, key: dg.AssetKey | None = None) -> list[str]:
    return [
        check.check_name
        for check in result.get_asset_check_evaluations()
        if key in (None, check.asset_key)
    ]


def checked(continuing: Orchestrated, key: dg.AssetKey) -> Sequence[AssetCheckExecutionRecord]:
    """Return the recorded evaluations of a table's invariants."""
    return continuing.instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(key, INVARIANTS), limit=100
    )


def materialized(result: dg.ExecuteInProcessResult, key: dg.AssetKey) -> list[str | None]:
    events = result.get_asset_materialization_events()
    return [event.partition for event in events if event.asset_key == key]
