"""Different orders of polls, changes, rows, snapshots and kills."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import psycopg2
import pytest

from pgcdc_assets.capture import landing, source_look
from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.schema_watch import SchemaWatch, poll_catalog
from pgcdc_assets.capture.snapshots.export import export_later
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import CaptureLimits
from pgcdc_assets.errors import TransientError
from pgcdc_assets.postgres.catalog.table_definitions import read_catalog_digest, read_definitions
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.raw.relations.definitions import DefinitionStore
from pgcdc_assets.raw.relations.schema_events import open_events
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.encoded import encoded_database

pytestmark = pytest.mark.postgres

_T = TableName("public", "t")
_TABLE = "create table t (id int primary key, a int); insert into t values (1, 1)"
_LEFT_AND_RETURNED = (
    "alter publication pub drop table t; insert into t values (9, 9);"
    "alter publication pub add table t"
)


def _begin(capturing: Capturing) -> None:
    """Take the first snapshot of a publication FOR TABLE."""
    capturing.database.execute(f"{_TABLE}; create publication pub for table t")
    _snapshot(capturing)


def _snapshot(capturing: Capturing, *tables: TableName) -> None:
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub", list(tables) or None)


def _open(capturing: Capturing) -> list[str]:
    zone = capturing.zone
    found = open_events(zone.schema_events.read(), zone.snapshots.complete_snapshots())
    return shown([event for events in found.values() for event in events])


def test_a_poll_finds_a_change_right_after_the_first_snapshot(
    capturing: Capturing,
) -> None:
    _begin(capturing)
    capturing.database.execute(_LEFT_AND_RETURNED)
    assert shown(poll(capturing)) == _open(capturing) == ["t publication_changed!"]
    _snapshot(capturing, _T)
    assert _open(capturing) == []
    assert poll(capturing) == []


def test_a_snapshot_has_all_earlier_changes(capturing: Capturing) -> None:
    _begin(capturing)
    capturing.database.execute(_LEFT_AND_RETURNED)
    capturing.database.execute("alter table t alter a type int using a + 1")
    _snapshot(capturing, _T)
    events = capturing.zone.schema_events.read()
    assert shown(events) == ["t publication_changed!", "t table_rewritten!"]
    assert _open(capturing) == []
    capturing.database.execute("insert into t values (3, 3)")
    capturing.capture()
    assert poll(capturing) == []
    assert capturing.zone.schema_events.read() == events


def test_a_recorded_event_without_a_snapshot_hides_no_later_need_of_one(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll dies before it stores its look, and the same partition is then filled outside."""
    attach = "alter table root attach partition leaf for values from (10) to (20)"
    capturing.begin(
        "create table root (id int primary key) partition by range (id);"
        "create table leaf (id int primary key)"
    )
    capturing.database.execute(
        "drop publication pub; create publication pub for table root "
        "with (publish_via_partition_root = true)"
    )
    assert poll(capturing) == []
    capturing.database.execute(attach)
    with monkeypatch.context() as patched, pytest.raises(TransientError):
        patched.setattr(DefinitionStore, "replace", _fail)
        poll(capturing)
    assert shown(capturing.zone.schema_events.read()) == ["root partition_attached"]
    for statement in ("alter table root detach partition leaf", "insert into leaf values (11)"):
        capturing.database.execute(statement)
    capturing.database.execute(attach)
    assert shown(poll(capturing)) == ["root partition_attached!"]
    assert poll(capturing) == []


@pytest.mark.parametrize("which", ["first", "later"])
def test_a_partition_that_passes_during_a_snapshot_needs_another_snapshot(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The exported snapshot has the partition, which no look before the export has seen."""
    capturing.begin(
        "create table root (id int primary key) partition by range (id);"
        "create table kept partition of root for values from (0) to (10);"
        "create table single (id int primary key); insert into single values (15)"
    )
    execute = capturing.database.execute
    execute(
        "drop publication pub; create publication pub for table root "
        "with (publish_via_partition_root = true)"
    )
    exports: list[str] = []

    def export(*arguments: Any) -> Any:
        exports.append("first" if not exports else "later")
        if exports[-1] == which:
            execute("alter table root attach partition single for values from (10) to (20)")
        found = export_later(*arguments)
        if exports[-1] != which:
            # The copy finds other columns, and begins again.
            execute("alter table root add n int; alter table single add n int")
        return found

    with monkeypatch.context() as patched:
        patched.setattr("pgcdc_assets.capture.snapshots.export.export_later", export)
        _snapshot(capturing)
    assert exports[-1] == which
    execute("alter table root detach partition single")
    assert shown(poll(capturing)) == ["root partition_detached!"]


def _fail(*args: object) -> bool:
    raise TransientError(reason="the lake is not available")


def test_rows_below_a_snapshot_are_compared_with_the_version_before_them(
    capturing: Capturing,
) -> None:
    """The snapshot without a key is registered before the rows that still had the key."""
    _begin(capturing)
    capturing.database.execute("update t set a = 2")
    capturing.database.execute("alter table t drop constraint t_pkey")
    assert shown(poll(capturing)) == ["t key_changed!"]
    _snapshot(capturing, _T)
    capturing.capture()
    events = capturing.zone.schema_events.read()
    assert shown(events) == ["t key_changed!"]
    assert _open(capturing) == []


def test_a_recreated_and_renamed_table_gets_a_snapshot(capturing: Capturing) -> None:
    """The poll that finds another table with the declared name records its OID."""
    execute = capturing.database.execute
    execute("create table t (id int primary key)")
    execute("create publication pub for all tables")
    _snapshot(capturing, _T)
    execute("drop table t; create table t (id int primary key, n int)")
    assert shown(poll(capturing)) == ["t table_dropped", "t table_recreated!"]
    execute("create schema s; alter table t rename to moved; alter table moved set schema s")
    oid = capturing.database.value("select 's.moved'::regclass::oid::bigint")
    _snapshot(capturing, _T)
    assert capturing.zone.source_relations(1).newest_ids([_T]) == {_T: oid}
    assert _open(capturing) == []


def test_a_poll_between_two_windows_of_a_session_gives_the_columns_of_a_table_that_is_gone(
    capturing: Capturing,
) -> None:
    """F6: the catalog does not have the table any more when its row arrives."""
    capturing.begin(_TABLE)
    execute = capturing.database.execute
    with capturing.session() as session:
        execute("insert into t values (2, 2)")
        session.land(capturing.window())
        execute("create table u (gone int, id int primary key); alter table u drop gone")
        zone = RawZone(capturing.zone.lake, capturing.zone.name)
        assert poll(replace(capturing, zone=zone)) == []
        for statement in ("insert into u values (1)", "drop table u"):
            execute(statement)
        session.land(capturing.window())
        assert session.finish()
    newest = capturing.zone.relations.versions(1)[-1].relation
    assert (newest.table, [column.attnum for column in newest.columns]) == ("u", [2])


def test_a_new_epoch_begins_without_events(capturing: Capturing) -> None:
    _begin(capturing)
    capturing.database.execute(f"select pg_drop_replication_slot('{capturing.slot}')")
    capturing.database.execute("alter table t alter a type bigint; drop publication pub;"
                               "create publication pub for table t")  # fmt: skip
    renew_epoch(capturing.settings, capturing.zone, capturing.slot, "pub")
    assert poll(capturing) == []
    _snapshot(capturing)
    assert capturing.zone.schema_events.read() == []
    capturing.database.execute("alter table t drop a")
    assert [(e.epoch, e.change) for e in poll(capturing)] == [(2, "column_dropped")]


def test_a_poll_that_began_before_a_renewal_leaves_the_look_of_the_new_epoch(
    capturing: Capturing,
) -> None:
    _begin(capturing)
    late = SchemaWatch(capturing.zone, "pub", 1, [_T])
    capturing.database.execute(f"select pg_drop_replication_slot('{capturing.slot}')")
    renew_epoch(capturing.settings, capturing.zone, capturing.slot, "pub")
    _snapshot(capturing)
    with query_connection(capturing.settings, "poll") as conn:
        assert late.record(conn) == []
    capturing.database.execute("alter table t alter a type int using a + 1")
    assert shown(poll(capturing)) == ["t table_rewritten!"]


def test_looks_at_a_publication_without_tables_are_stored_once(capturing: Capturing) -> None:
    """Each capture of a window looks, so each would add a version to the table of the looks."""
    capturing.begin()
    assert poll(capturing) == []
    assert capturing.zone.definitions.table.load() is None
    capturing.database.execute("create table t (id int primary key)")
    assert poll(capturing) == []
    capturing.database.execute("drop table t")
    assert shown(poll(capturing)) == ["t table_dropped"]
    stored = capturing.zone.definitions.table.load()
    assert stored is not None
    assert poll(capturing) == poll(capturing) == []
    again = capturing.zone.definitions.table.load()
    assert again is not None and again.version() == stored.version()


def test_the_first_poll_for_a_lake_of_an_earlier_release_has_no_events(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a table that was created again has an event: the lake has rows of another table."""
    capturing.begin(_TABLE, "create table u (id int primary key)")
    capturing.database.execute("insert into t values (2, 2); insert into u values (1)")
    monkeypatch.setattr(landing, "_LOOK_SECONDS", 60)
    # The time limit leaves the capture no time for a poll.
    capturing.capture(limits=CaptureLimits(total_seconds=30))
    assert capturing.zone.definitions.read(1).tables == {}
    capturing.database.execute("alter table t drop a; drop table u; create table u (id int)")
    assert shown(poll(capturing)) == ["u table_recreated!"]
    capturing.database.execute("alter table t add b int")
    assert shown(poll(capturing)) == ["t column_added b"]


@pytest.mark.sampled
def test_a_killed_capture_leaves_no_relation_version_without_its_event(
    capturing: Capturing,
) -> None:
    capturing.begin(_TABLE)
    capturing.database.execute("insert into t values (2, 2)")
    capturing.capture()
    capturing.database.execute("alter table t drop a; insert into t values (3)")
    window = capturing.window()
    for failpoint in ("after_schema_events", "after_relations_commit"):
        assert capturing.capture_process(window, failpoint=failpoint).returncode == -9
        zone = RawZone(capturing.zone.lake, capturing.zone.name)
        assert shown(zone.schema_events.read()) == ["t column_dropped a"]
    capturing.capture(window)
    assert shown(capturing.zone.schema_events.read()) == ["t column_dropped a"]
    assert [row["new"] for row in capturing.rows()][-1] == ["3"]


def test_concurrent_polls_record_each_change_and_affect_no_window(capturing: Capturing) -> None:
    capturing.begin(_TABLE)
    capturing.capture()
    capturing.database.execute("alter table t drop a; insert into t values (3)")
    barrier = Barrier(3)

    def look(zone: RawZone) -> None:
        with query_connection(capturing.settings, "poll") as conn:
            barrier.wait(30)
            poll_catalog(conn, zone, [_T], "pub")

    zones = [RawZone(capturing.zone.lake, capturing.zone.name) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        polls = [pool.submit(look, zone) for zone in zones]
        barrier.wait(30)
        capturing.capture()
        for one in polls:
            one.result(60)
    events = capturing.zone.schema_events.read()
    assert {(e.change, e.columns) for e in events} == {("column_dropped", ("a",))}
    assert poll(capturing) == []
    assert [row["new"] for row in capturing.rows()][-1] == ["3"]


def test_a_poll_during_a_change_is_repeated(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing.begin(_TABLE)
    assert poll(capturing) == []
    capturing.database.execute("alter table t rename a to b")
    changes = ["alter table t drop b"]

    def slow(*arguments: object) -> object:
        found = read_definitions(*arguments)  # type: ignore[arg-type]
        for change in changes:
            capturing.database.execute(change)
        changes.clear()
        return found

    monkeypatch.setattr(source_look, "read_definitions", slow)
    assert shown(poll(capturing)) == ["t column_dropped a"]
    assert poll(capturing) == []


def test_locks_of_tables_do_not_delay_a_poll(capturing: Capturing) -> None:
    capturing.begin(
        "create table root (id int primary key) partition by range (id);"
        "create table leaf partition of root for values from (0) to (9);" + _TABLE
    )
    assert poll(capturing) == []
    capturing.database.execute("alter table t add b int; alter table root add b int")
    with capturing.database.connect(autocommit=False) as conn, conn.cursor() as cursor:
        cursor.execute("lock table t, root, leaf in access exclusive mode")
        with query_connection(capturing.settings, "poll", statement_timeout_ms=3000) as other:
            found = poll_catalog(other, capturing.zone, [_T], "pub")
    assert shown(found) == ["leaf column_added b", "t column_added b"]


def test_a_failed_poll_is_a_warning_of_the_capture(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing.begin(_TABLE)
    capturing.database.execute("insert into t values (2, 2)")
    capturing.capture()
    capturing.database.execute("drop table t; create table t (id int); insert into t values (1)")

    def cancelled(*arguments: object) -> str:
        raise psycopg2.errors.QueryCanceled("canceling statement due to statement timeout")

    monkeypatch.setattr(source_look, "read_catalog_digest", cancelled)
    report = capturing.capture()
    assert [w for w in report.warnings if "catalog was not compared" in w]
    assert shown(capturing.zone.schema_events.read()) == ["t table_recreated!"]


def test_an_unchanged_catalog_is_one_query(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing.begin(_TABLE)
    assert poll(capturing) == []
    monkeypatch.setattr(source_look, "read_definitions", None)
    assert poll(capturing) == []
    loaded = capturing.zone.definitions.table.load()
    assert loaded is not None
    assert loaded.version() == 1


@pytest.mark.parametrize(("encoding", "code"), [("SQL_ASCII", 255), ("WIN1252", 129)])
def test_a_name_label_or_comment_that_is_not_utf_8_affects_no_other_table(
    capturing: Capturing, encoding: str, code: int
) -> None:
    """SQL_ASCII accepts any bytes; the byte 81 of WIN1252 has no form in UTF-8."""
    byte = f"' || chr({code}) || '"
    with encoded_database(capturing.database, encoding) as other:
        other.execute(_TABLE)
        other.execute("create table u (id int); create type label as enum ('a');"
                      "create table w (l label); create publication pub for all tables;"
                      "comment on column t.a is 'in cents'")  # fmt: skip
        for ddl in (
            f'create table "x{byte}" (id int)',
            f"comment on table u is ''x{byte}''",
            f"alter type label add value ''x{byte}''",
        ):
            other.execute(f"do $$ begin execute '{ddl}'; end $$")
        with query_connection(other.settings(), "poll") as conn:
            tables = read_definitions(conn, "pub", []).values()
            comments = {t.relation.table: t.comments for t in tables}
            assert comments == {"t": {2: "in cents"}, "u": {}, "w": {}}
            assert not any(t.type_texts for t in tables)
            assert read_catalog_digest(conn, "pub", []).startswith("16:")
