"""Logical messages become a table of their own through Dagster, without Spark."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run
from deltalake import DeltaTable

from pgcdc_assets.cli.status import print_messages
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import LsnWindow, Position
from pgcdc_assets.orchestration.assets.messages import LaterMessages
from pgcdc_assets.orchestration.jobs.sync_messages import find_message_requests
from pgcdc_assets.orchestration.partitions import covered_keys
from pgcdc_assets.orchestration.runs import long_runs
from pgcdc_assets.orchestration.sensors.messages import WaitingMessages
from pgcdc_assets.orchestration.state import captured_through
from pgcdc_assets.settings.policies import MessagePolicy
from pgcdc_assets.tables.messages import MessageTable
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.orchestration.long_runs import land_aside

pytestmark = pytest.mark.postgres

KEY = dg.AssetKey([NAME, "messages"])


def with_messages(orchestrated: Orchestrated, **windows: Any) -> Orchestrated:
    """Return the capture with the table of logical messages."""
    capture = replace(
        orchestrated.capture,
        messages=MessagePolicy(),
        windows=replace(orchestrated.capture.windows, **windows),
    )
    return Orchestrated(orchestrated.database, orchestrated.lake, orchestrated.instance, capture)


def emit(orchestrated: Orchestrated, content: str, *, transactional: bool = True) -> None:
    orchestrated.commit(
        f"select pg_logical_emit_message({transactional}, 'audit', '{content}')",
    )


def texts(orchestrated: Orchestrated) -> list[tuple[str, bool]]:
    table = DeltaTable(orchestrated.lake.path(NAME, "messages")).to_pyarrow_table()
    rows = sorted(table.to_pylist(), key=lambda row: (row["commit_lsn"], row["ordinal"]))
    return [(row["text"], row["transactional"]) for row in rows]


def requests_of_sync(orchestrated: Orchestrated) -> list[dg.RunRequest]:
    location = orchestrated.location
    loaded = location.captures[NAME]
    return find_message_requests(orchestrated.instance, location.repository, loaded)


@pytest.mark.sampled
def test_the_sensor_requests_an_append_when_messages_are_landed(
    orchestrated: Orchestrated,
) -> None:
    made = with_messages(orchestrated)
    made.copy()
    made.commit("insert into a values (99, 'no message')")
    made.land()
    assert made.tick("messages").run_requests == []

    emit(made, "one")
    emit(made, "two", transactional=False)
    made.land()
    emit(made, "three")
    made.land()
    (request,) = made.tick("messages").run_requests
    result = made.execute(request, "messages")

    assert result.success
    assert texts(made) == [("one", True), ("two", False), ("three", True)]
    assert made.instance.get_materialized_partitions(KEY) == set(made.windows())
    assert made.tick("messages").run_requests == []
    spec = made.location.repository.asset_graph.get(KEY)
    assert spec.parent_keys == {made.raw}
    assert spec.metadata["dagster/table_name"] == f"{NAME}.messages"


@pytest.mark.sampled
def test_the_table_that_is_switched_on_later_has_the_earlier_messages(
    orchestrated: Orchestrated, capsys: pytest.CaptureFixture[str]
) -> None:
    orchestrated.copy()
    emit(orchestrated, "before")
    orchestrated.land()
    keys = orchestrated.location.repository.asset_graph.get_all_asset_keys()
    assert KEY not in keys

    made = with_messages(orchestrated)
    epoch = made.zone.epochs.latest()
    assert epoch is not None
    captured = captured_through(made.zone, epoch)
    print_messages(MessageTable(made.zone), captured)
    assert "none yet, and more wait for their append" in capsys.readouterr().out
    # `pgcdc sync` asks for one append at its end.
    (request,) = requests_of_sync(made)
    assert made.execute(request, "messages").success
    assert texts(made) == [("before", True)]
    print_messages(MessageTable(made.zone), captured)
    assert f"through {captured.lsn} of epoch 1\n" in capsys.readouterr().out
    assert requests_of_sync(made) == []
    assert requests_of_sync(orchestrated) == []


@pytest.mark.sampled
def test_heartbeats_request_nothing_and_a_deleted_table_is_filled_again(
    orchestrated: Orchestrated,
) -> None:
    made = with_messages(orchestrated)
    made.copy()
    waiting = WaitingMessages(made.capture, KEY)
    for _ in range(2):
        made.commit("select pg_logical_emit_message(true, 'pgcdc', '')")
        made.land()
        assert isinstance(waiting.find_request(made.instance, made.zone), dg.SkipReason)
    emit(made, "one")
    made.land()
    request = waiting.find_request(made.instance, made.zone)
    assert isinstance(request, dg.RunRequest)
    assert made.execute(request, "messages").success
    assert isinstance(waiting.find_request(made.instance, made.zone), dg.SkipReason)

    shutil.rmtree(made.lake.path(NAME, "messages"))
    request = waiting.find_request(made.instance, made.zone)
    assert isinstance(request, dg.RunRequest)
    assert made.execute(request, "messages").success
    assert texts(made) == [("one", True)]


@pytest.mark.sampled
def test_a_partition_of_the_past_is_materialised_again_without_a_change(
    orchestrated: Orchestrated,
) -> None:
    made = with_messages(orchestrated)
    made.copy()
    emit(made, "one")
    made.land()
    (request,) = made.tick("messages").run_requests
    assert made.execute(request, "messages").success
    again = dg.RunRequest(tags=request.tags)
    assert made.execute(again, "messages").success
    assert texts(made) == [("one", True)]


@pytest.mark.sampled
def test_a_run_of_the_past_that_a_person_executes_again_requests_no_window_again(
    orchestrated: Orchestrated,
) -> None:
    """Dagster copies the tags of the sensor, whose runs append the newest windows."""
    made = with_messages(orchestrated)
    made.copy()
    runs = []
    for text in ("one", "two"):
        emit(made, text)
        made.land()
        (request,) = made.tick("messages").run_requests
        runs.append(made.execute(request, "messages"))
    job = made.location.repository.get_job(f"{NAME}_messages")
    run = made.create_run("messages", runs[0].dagster_run.tags, repeats=runs[0].run_id)
    assert execute_run(InMemoryJob(job), run, made.instance).success
    assert not made.tick("messages").run_requests
    assert texts(made) == [("one", True), ("two", True)]


@pytest.mark.sampled
def test_a_run_of_the_sensor_continues_with_later_messages(orchestrated: Orchestrated) -> None:
    made = with_messages(orchestrated, run_seconds=30, max_age_seconds=0.2)
    made.copy()
    emit(made, "one")
    made.land()
    (request,) = made.tick("messages").run_requests
    emit(made, "two")
    made.land()
    made.commit("insert into a values (99, 'no message')")
    made.land()
    result = made.execute(request, "messages")
    assert result.success
    assert texts(made) == [("one", True), ("two", True)]
    events = result.get_asset_materialization_events()
    assert [event.partition for event in events] == made.windows()[: len(events)]
    assert len(events) >= 2


@pytest.mark.sampled
def test_windows_without_messages_between_appends_of_one_run_are_materialised(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_messages(orchestrated, run_seconds=30, max_age_seconds=0.2)
    monkeypatch.setattr(long_runs, "IDLE_SECONDS", 2.0)
    made.copy()
    emit(made, "one")
    made.land()
    (request,) = made.tick("messages").run_requests
    find = LaterMessages.find
    landed_at_looks = [
        partial(made.commit, "insert into a values (99, 'no message')"),
        partial(emit, made, "two"),
    ]

    def land_and_find(later: LaterMessages) -> Position | None:
        if landed_at_looks:
            landed_at_looks.pop(0)()
            land_aside(made)
        return find(later)

    monkeypatch.setattr(LaterMessages, "find", land_and_find)
    assert made.execute(request, "messages").success
    assert texts(made) == [("one", True), ("two", True)]
    assert len(made.windows()) == 3
    assert made.instance.get_materialized_partitions(KEY) == set(made.windows())


@pytest.mark.sampled
@pytest.mark.parametrize("is_waiting", [False, True])
def test_windows_whose_run_was_killed_after_the_append_are_materialised_by_the_next_run(
    orchestrated: Orchestrated, is_waiting: bool
) -> None:
    made = with_messages(orchestrated)
    made.copy()
    for number in range(3):
        emit(made, str(number))
        made.land()
        if number == 0:
            (request,) = made.tick("messages").run_requests
            assert made.execute(request, "messages").success
    # A process that is killed here has recorded nothing.
    newest = LsnWindow.parse(made.windows()[-1])
    assert MessageTable(made.zone).append(newest.end_position).row_count == 2
    if is_waiting:
        emit(made, "3")
        made.land()

    (request,) = made.tick("messages").run_requests
    assert made.execute(request, "messages").success
    assert made.instance.get_materialized_partitions(KEY) == set(made.windows())
    assert made.tick("messages").run_requests == []


@pytest.mark.sampled
def test_a_failed_append_is_retried_after_a_pause_and_by_a_sync_at_once(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_messages(orchestrated, retry_seconds=600)
    made.copy()
    emit(made, "one")
    made.land()
    (request,) = made.tick("messages").run_requests

    def fail(table: MessageTable, through: Position) -> None:
        raise TransientError(reason="The lake is away.")

    with monkeypatch.context() as patched:
        patched.setattr(MessageTable, "append", fail)
        assert not made.execute(request, "messages").success
    assert "is retried later" in made.tick("messages").skip_message
    assert made.tick("messages", one_shot=True).run_requests


@pytest.mark.sampled
def test_windows_of_another_order_are_requested_by_the_newest_window_alone(
    orchestrated: Orchestrated,
) -> None:
    """A range of dynamic partitions follows the order in which the keys were added."""
    made = with_messages(orchestrated)
    made.copy()
    for number in range(2):
        emit(made, str(number))
        made.land()
    keys = made.windows()
    name = made.capture.windows_name
    for key in keys:
        made.instance.delete_dynamic_partition(name, key)
    made.instance.add_dynamic_partitions(name, keys[::-1])
    request = WaitingMessages(made.capture, KEY).find_request(made.instance, made.zone)
    assert isinstance(request, dg.RunRequest)
    assert covered_keys(request.tags, keys[::-1]) == [keys[-1]]
