"""Several processes store a schema event once. It is open until a snapshot has the change."""

from __future__ import annotations

import datetime as dt
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta.table import CommitRefused, RawTable
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.relations.schema_events import (
    CATALOG,
    STREAM,
    SchemaChange,
    SchemaEvent,
    SchemaEventLog,
    _row,
    open_events,
)
from pgcdc_assets.raw.schema import SCHEMA_EVENTS
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName

ORDERS = TableName("shop", 'Order "Lines"')
USERS = TableName("shop", "users")
NOW = dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)


def _event(lsn: int = 100, **values: Any) -> SchemaEvent:
    event = SchemaEvent(
        epoch=1,
        lsn=Lsn(lsn),
        table=ORDERS,
        relation_id=16400,
        change=SchemaChange.TYPE_CHANGED,
        columns=("amount", "naïve 'column'"),
        detail="column amount was text and is int4.",
        needs_snapshot=True,
        found_by=STREAM,
    )
    return replace(event, **values)


def _snapshot(lsn: int, table: TableName = ORDERS, epoch: int = 1) -> Snapshot:
    return Snapshot(epoch, Lsn(lsn), *table, relation_version=1, row_count=3)


def test_a_lake_without_the_table_has_no_events_and_reading_creates_nothing(zone: RawZone) -> None:
    assert zone.schema_events.read() == []
    assert zone.schema_events.table.load() is None
    assert zone.schema_events.record([]) == []
    assert zone.schema_events.table.load() is None


def test_the_events_of_an_early_release_have_no_time_of_the_look(zone: RawZone) -> None:
    event, columns = _event(), [f for f in SCHEMA_EVENTS if f.name != "seen_at"]
    early = replace(
        zone.schema_events, table=replace(zone.schema_events.table, schema=pa.schema(columns))
    )
    row = {**_row(event), "recorded_at": NOW}
    del row["seen_at"]
    assert early.table.commit_rows(
        early.table.load_or_create(), [row], app_id="pgcdc:test:schema_events", app_version=1
    )
    assert [(e, e.seen_at) for e in zone.schema_events.read()] == [(event, None)]
    later = _event(lsn=200, found_by=CATALOG, seen_at=NOW)
    assert zone.schema_events.record([event, later]) == [later]
    assert [e.seen_at for e in zone.schema_events.read()] == [None, NOW]


def test_an_event_is_stored_once_with_all_its_facts(zone: RawZone) -> None:
    first = _event()
    others = [
        _event(change=SchemaChange.COLUMN_ADDED),
        _event(columns=()),
        _event(relation_id=16401),
        _event(lsn=90, table=USERS, needs_snapshot=False, found_by=CATALOG),
        _event(lsn=50, epoch=2),
    ]
    assert zone.schema_events.record([first, first]) == [first]
    assert zone.schema_events.record([first, replace(first, detail="other words.")]) == []
    assert zone.schema_events.record([*others, first]) == others
    stored = RawZone(zone.lake, zone.name).schema_events.read()
    expected = sorted([first, *others], key=lambda event: (event.position, event.identity))
    assert stored == expected
    assert stored[0].position == (1, 90)
    assert stored[-1].position == (2, 50)
    assert all(event.recorded_at is not None for event in stored)
    table = zone.schema_events.table.load()
    assert table is not None
    assert table.version() == 2


def test_an_event_is_open_until_a_snapshot_of_its_table_has_the_change() -> None:
    event = _event(100)
    for snapshots in (
        [],
        [_snapshot(99)],
        [_snapshot(500, USERS)],
        # The snapshot lacks the transaction that announced the change.
        [_snapshot(100)],
    ):
        assert open_events([event], snapshots) == {ORDERS: [event]}
    assert open_events([event], [_snapshot(101), _snapshot(50)]) == {}
    assert open_events([event], [_snapshot(1, epoch=2)]) == {}
    assert open_events([replace(event, epoch=2)], [_snapshot(500)]) != {}
    # The WAL ended at 100 after the catalog had the change.
    assert open_events([_event(100, found_by=CATALOG)], [_snapshot(100)]) == {}
    assert open_events([_event(needs_snapshot=False)], []) == {}


def test_open_events_are_grouped_by_table_oldest_first() -> None:
    events = [_event(300), _event(200), _event(150, table=USERS), _event(100)]
    assert open_events(iter(events), iter([_snapshot(101)])) == {
        ORDERS: [events[1], events[0]],
        USERS: [events[2]],
    }


_SPAWN = multiprocessing.get_context("spawn")
_barrier: Any = None


def _take_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _record(uri: str, process: int) -> int:
    zone = RawZone(Lake(uri), "test")
    count = 0
    for lsn in range(100, 112):
        _barrier.wait(60)
        own = _event(lsn, relation_id=process)
        count += len(zone.schema_events.record([_event(lsn), own]))
    return count


@pytest.mark.sampled
def test_two_concurrent_processes_store_each_event_once(zone: RawZone) -> None:
    with ProcessPoolExecutor(
        2, mp_context=_SPAWN, initializer=_take_barrier, initargs=(_SPAWN.Barrier(2),)
    ) as pool:
        counts = list(pool.map(_record, [zone.lake.uri] * 2, [1, 2]))
    events = zone.schema_events.read()
    assert len(events) == len({event.identity for event in events}) == 36
    assert sum(counts) == 36
    assert {event.relation_id for event in events} == {1, 2, 16400}


def test_refused_commits_end_with_an_error_and_leave_no_file(
    zone: RawZone,
) -> None:
    class _Refusing(RawTable):
        def commit(self, *_args: Any, **_options: Any) -> None:
            raise CommitRefused("another process committed")

    table = zone.schema_events.table
    refusing = _Refusing(table.lake, table.uri, table.schema, table.capture)
    with pytest.raises(TransientError, match="at each attempt"):
        SchemaEventLog(refusing, "test").record([_event()])
    assert zone.schema_events.read() == []
    assert list(Path(table.uri).glob("*.parquet")) == []
