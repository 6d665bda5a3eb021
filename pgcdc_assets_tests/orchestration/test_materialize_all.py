"""Materialising everything at once under a real daemon, as the UI's "Materialize all" does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.execution.backfill import BULK_ACTION_TERMINAL_STATUSES, BulkActionStatus

from pgcdc_assets.orchestration.data_versions import find_shown_through
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.orchestration.daemon import SECONDS, Daemon, running_daemon
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.soak]

ASSETS = [[NAME, "raw"], [NAME, "snapshot"], *([NAME, "scd1", "public", t] for t in "ab")]

# The runs use the slot one after the other, each in its own process. This may take a minute.
STALLED_SECONDS = 150

# The UI's request for assets with different partitions.
LAUNCH = """
mutation Launch($parameters: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $parameters) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
  }
}
"""


def launch(daemon: Daemon) -> str:
    """Launch the backfill of all partitions of all assets; return its identifier."""
    selection = [{"path": path} for path in ASSETS]
    parameters = {"assetSelection": selection, "allPartitions": True}
    answer = daemon.ask(LAUNCH, {"parameters": parameters})["launchPartitionBackfill"]
    assert answer["__typename"] == "LaunchBackfillSuccess", answer
    return str(answer["backfillId"])


@contextmanager
def writing(orchestrated: Orchestrated) -> Iterator[None]:
    """Insert a row into table `b` each second until the end of the block."""
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.wait(1.0):
            number += 1
            orchestrated.commit(f"insert into b values ({number}, {number})")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_all_assets_are_materialised_while_sensors_run(
    orchestrated: Orchestrated, tmp_path: Path
) -> None:
    instance, zone = orchestrated.instance, orchestrated.zone
    a, b = (dg.AssetKey(path) for path in ASSETS[-2:])
    code = "defs = dg.Definitions.merge(*cdc)\n"

    def landed() -> int:
        return zone.changes.captured_through(1) or 0

    def status() -> BulkActionStatus:
        found = instance.get_backfill(identifier)
        assert found is not None
        return found.status

    with running_daemon(orchestrated, tmp_path, code) as daemon, writing(orchestrated):
        wait_until(lambda: find_shown_through(instance, a), "a first merge", limit_seconds=SECONDS)
        identifier = launch(daemon)
        began = last_news = time.monotonic()
        longest, last_landed = 0.0, landed()
        while status() not in BULK_ACTION_TERMINAL_STATUSES:
            assert time.monotonic() - began < 500, instance.get_backfill(identifier)
            if landed() != last_landed:
                last_landed, last_news = landed(), time.monotonic()
            longest = max(longest, time.monotonic() - last_news)
            time.sleep(0.5)
        assert status() == BulkActionStatus.COMPLETED_SUCCESS
        assert longest < STALLED_SECONDS
        # The sensors continue, and all locks of the backfill are released.
        wait_until(lambda: landed() > last_landed, "a window", limit_seconds=SECONDS)
        before = find_shown_through(instance, b)
        wait_until(
            lambda: find_shown_through(instance, b) != before, "a merge", limit_seconds=SECONDS
        )
    assert instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE])) == []
