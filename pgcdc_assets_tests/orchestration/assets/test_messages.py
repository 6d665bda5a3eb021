"""Logical messages become a table of their own through Dagster, without Spark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dagster as dg
import pytest
from deltalake import DeltaTable

from pgcdc_assets.orchestration.jobs.sync_messages import find_message_requests
from pgcdc_assets.policies import MessagePolicy
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

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


def test_the_table_that_is_switched_on_later_has_the_earlier_messages(
    orchestrated: Orchestrated,
) -> None:
    orchestrated.copy()
    emit(orchestrated, "before")
    orchestrated.land()
    keys = orchestrated.location.repository.asset_graph.get_all_asset_keys()
    assert KEY not in keys

    made = with_messages(orchestrated)
    # `pgcdc sync` asks for one append at its end.
    (request,) = find_message_requests(made.instance, made.location.captures[NAME])
    assert made.execute(request, "messages").success
    assert texts(made) == [("before", True)]
    assert find_message_requests(made.instance, made.location.captures[NAME]) == []
    assert find_message_requests(orchestrated.instance, orchestrated.location.captures[NAME]) == []


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
