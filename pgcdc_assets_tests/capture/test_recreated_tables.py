"""Each table that takes over a declared name causes an event, which a snapshot heals."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.raw.relations.schema_events import STREAM, SchemaChange, SchemaEvent, open_events
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.capture.test_schema_watch import poll
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = pytest.mark.postgres

_T = TableName("public", "t")
_AGAIN = "drop table t; create table t (id int primary key); alter publication pub add table t"


def _snapshot(capturing: Capturing) -> None:
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub", [_T])


def _begin(capturing: Capturing) -> None:
    capturing.database.execute(
        "create table t (id int primary key); create table o (id int primary key);"
        "create publication pub for table t, o"
    )
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")


def _recreations(events: list[SchemaEvent]) -> list[tuple[TableName, int, str]]:
    return [
        (event.table, event.relation_id, event.found_by)
        for event in events
        if event.change is SchemaChange.TABLE_RECREATED
    ]


def _is_open(capturing: Capturing) -> bool:
    zone = capturing.zone
    return bool(open_events(zone.schema_events.read(), zone.snapshots.complete_snapshots()))


def _oid(capturing: Capturing) -> int:
    return int(capturing.database.value("select 't'::regclass::oid::bigint"))


def test_two_recreations_in_one_backlog_are_two_events_and_one_snapshot_heals_both(
    capturing: Capturing,
) -> None:
    _begin(capturing)
    oids = []
    for _ in range(2):
        capturing.database.execute(_AGAIN)
        capturing.database.execute("insert into t values (1)")
        oids.append(_oid(capturing))
    capturing.capture()
    events = capturing.zone.schema_events.read()
    assert _recreations(events) == [(_T, oid, "stream") for oid in oids]
    assert _is_open(capturing)
    _snapshot(capturing)
    assert not _is_open(capturing)
    assert _recreations(poll(capturing)) == []


def test_a_recreation_in_catalog_and_stream_is_one_event(capturing: Capturing) -> None:
    _begin(capturing)
    capturing.database.execute(_AGAIN)
    capturing.database.execute("insert into t values (1)")
    assert _recreations(poll(capturing, _T)) == [(_T, _oid(capturing), "catalog")]
    capturing.capture()
    assert len(_recreations(capturing.zone.schema_events.read())) == 1
    assert _is_open(capturing)

    # The catalog shows the newest table, and then the stream shows the previous table.
    capturing.database.execute(_AGAIN)
    capturing.database.execute("insert into t values (2)")
    capturing.database.execute(_AGAIN)
    assert _recreations(poll(capturing, _T)) == [(_T, _oid(capturing), "catalog")]
    _snapshot(capturing)
    assert not _is_open(capturing)
    capturing.capture()
    assert not _is_open(capturing)
    assert _recreations(poll(capturing, _T)) == []


def test_each_exchange_of_names_is_an_event(
    capturing: Capturing,
) -> None:
    """No row is written, so the stream does not show the exchange."""
    _begin(capturing)
    for _ in range(4):
        capturing.database.execute(
            "alter table t rename to tmp; alter table o rename to t; alter table tmp rename to o"
        )
        found = _recreations(poll(capturing, _T))
        assert (_T, _oid(capturing), "catalog") in found
        assert _is_open(capturing)
        assert poll(capturing, _T) == []
        snapshot_tables(
            capturing.settings,
            capturing.zone,
            capturing.slot,
            "pub",
            [_T, TableName("public", "o")],
        )
        assert not _is_open(capturing)


@pytest.mark.parametrize("leaves", [False, True], ids=["dropped", "unpublished and dropped"])
def test_a_backlog_of_a_renamed_table_has_its_events_after_a_poll_found_the_table_dropped(
    capturing: Capturing, leaves: bool
) -> None:
    """A history folds the rows before the first event, and shows no gap without an event."""
    _begin(capturing)
    database, oid = capturing.database, _oid(capturing)
    database.execute("alter table t rename to moved")
    database.execute("alter table moved add a text; insert into moved values (1, 'a')")
    poll(capturing, _T)
    capturing.capture()
    database.execute("alter table moved add b text default md5(random()::text)")
    database.execute("insert into moved values (2, 'a', 'b')")
    database.execute("alter table moved drop a; insert into moved values (3, 'b')")
    if leaves:
        database.execute("alter publication pub drop table moved")
        poll(capturing, _T)
    database.execute("drop table moved")
    poll(capturing, _T)
    capturing.capture()
    found = {
        (event.change, event.columns, event.table)
        for event in capturing.zone.schema_events.read()
        if event.relation_id == oid and event.found_by == STREAM
    }
    added, dropped = SchemaChange.COLUMN_ADDED, SchemaChange.COLUMN_DROPPED
    assert found >= {(added, ("b",), _T), (dropped, ("a",), _T)}
