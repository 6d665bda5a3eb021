"""Schema events reach each declared table that follows their relation, under whatever name (F8)."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.raw.relations.schema_events import SchemaChange, open_events
from pgcdc_assets.raw.snapshots import SnapshotLanding
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.proxy import TcpProxy

pytestmark = pytest.mark.postgres

_T, _U = TableName("public", "t"), TableName("public", "u")


def _begin(capturing: Capturing) -> None:
    capturing.database.execute(
        "create table t (id int primary key, a int, v text); insert into t values (1, 1, 'fine');"
        "create publication pub for table t"
    )
    _snapshot(capturing, _T)


def _snapshot(capturing: Capturing, table: TableName) -> None:
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub", [table])


def _waiting_for(capturing: Capturing, table: TableName) -> list[SchemaChange]:
    """Return the changes for which a declared table waits for a snapshot."""
    zone = capturing.zone
    found = open_events(zone.schema_events.read(), zone.snapshots.complete_snapshots())
    return [event.change for event in found.get(table, [])]


def test_a_table_that_is_declared_under_its_new_name_gets_the_events_of_a_capture(
    capturing: Capturing,
) -> None:
    """The capture does not know the settings, and has first seen the relation as `t`."""
    _begin(capturing)
    capturing.database.execute("alter table t rename to u")
    capturing.capture()
    _snapshot(capturing, _U)
    capturing.database.execute("alter table u alter a type int using a + 1")
    capturing.capture()
    assert _waiting_for(capturing, _U) == [SchemaChange.TABLE_REWRITTEN]
    assert poll(capturing, _U) == []
    _snapshot(capturing, _U)
    assert _waiting_for(capturing, _U) == []


def test_a_renamed_table_gets_its_events_in_a_new_epoch(capturing: Capturing) -> None:
    """The new epoch has seen the relation as `u` only, and follows it for the declared `t`."""
    _begin(capturing)
    capturing.database.execute("alter table t rename to u")
    capturing.database.execute(f"select pg_drop_replication_slot('{capturing.slot}')")
    renew_epoch(capturing.settings, capturing.zone, capturing.slot, "pub")
    _snapshot(capturing, _T)
    capturing.database.execute("alter table u alter a type int using a + 1")
    assert shown(poll(capturing, _T)) == ["t table_rewritten!"]
    assert _waiting_for(capturing, _T) == [SchemaChange.TABLE_REWRITTEN]
    capturing.database.execute("create table t (id int); alter publication pub add table t")
    assert shown(poll(capturing, _T)) == ["t table_recreated!"]
    assert poll(capturing, _T) == []


def test_a_renamed_table_waits_before_its_parked_row(capturing: Capturing, proxy: TcpProxy) -> None:
    _begin(capturing)
    capturing.database.execute("alter table t rename to u")
    capturing.database.execute("insert into u values (2, 2, 'poison')")
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    proxy.damage(b"t\0\0\0\x06poison", b"b\0\0\0\x06poison")
    assert through.capture().counts["public.u"] == {"P": 1}
    assert _waiting_for(capturing, _T) == [SchemaChange.ROW_PARKED]


def test_two_declared_tables_of_one_relation_both_get_its_events(capturing: Capturing) -> None:
    """After the drop of `u`, `t` took its name. Both follow the relation (decision 35)."""
    _begin(capturing)
    execute = capturing.database.execute
    execute("create table u (id int primary key); alter publication pub add table u")
    _snapshot(capturing, _U)
    execute("drop table u; alter table t rename to u")
    poll(capturing, _T, _U)
    _snapshot(capturing, _U)
    execute("alter table u alter a type int using a + 1")
    assert shown(poll(capturing, _T, _U)) == ["t table_rewritten!", "u table_rewritten!"]
    for table in (_T, _U):
        assert SchemaChange.TABLE_REWRITTEN in _waiting_for(capturing, table)
        _snapshot(capturing, table)
        assert _waiting_for(capturing, table) == []


class _Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("is_killed", [False, True], ids=["complete", "killed"])
def test_a_change_before_the_commit_of_the_first_snapshot_under_a_new_name_is_its_event(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """The copy has released the table, and no snapshot names it yet.

    If the process is killed after the commit, the next poll records the event.
    """
    _begin(capturing)
    capturing.database.execute("alter table t rename to u")
    capturing.capture()
    commit = SnapshotLanding.commit

    def commit_late(landing: SnapshotLanding, *arguments: Any) -> int:
        capturing.database.execute("alter table u alter a type int using a + 1")
        capturing.capture()
        row_count = commit(landing, *arguments)
        if is_killed:
            raise _Killed
        return row_count

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotLanding, "commit", commit_late)
        if is_killed:
            with pytest.raises(_Killed):
                _snapshot(capturing, _U)
            assert _waiting_for(capturing, _U) == []
            assert shown(poll(capturing, _T, _U)) == ["u table_rewritten!"]
        else:
            _snapshot(capturing, _U)
    assert _waiting_for(capturing, _U) == [SchemaChange.TABLE_REWRITTEN]
    assert poll(capturing, _T, _U) == []
    _snapshot(capturing, _U)
    assert _waiting_for(capturing, _U) == []
