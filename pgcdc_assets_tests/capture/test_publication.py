"""A publication that did not exist when the WAL was written (B9)."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.errors import ConfigurationError, DefiniteError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.preflight.run import run_preflight
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets.postgres.wal.positions import read_current_lsn
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres


def _window(database: Database, zone: RawZone) -> LsnWindow:
    """Return the window from the newest captured change to the end of the WAL."""
    database.execute("set synchronous_commit = on; select pg_logical_emit_message(true, '', '')")
    epoch = zone.epochs.latest()
    assert epoch is not None
    start = zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
    with query_connection(database.settings(), "test") as conn:
        return LsnWindow.of(epoch.epoch, start, read_current_lsn(conn))


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("is_encrypted", "leave", "come_back"),
    [
        (False, "drop publication pub", "create publication pub for table t"),
        (True, "drop publication pub", "create publication pub for table t"),
        (
            False,
            "alter publication pub rename to other",
            "alter publication other rename to pub",
        ),
    ],
)
def test_changes_written_without_the_publication_are_never_skipped(
    database: Database,
    zone: RawZone,
    is_encrypted: bool,
    leave: str,
    come_back: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B9: Postgres 18 skips these changes with a warning."""
    if is_encrypted:
        # The encryption determines the transport.
        from pgcdc_assets.postgres.stream import start
        from pgcdc_assets.postgres.stream.libpq_transport import LibpqWire

        monkeypatch.setattr(start, "SocketWire", LibpqWire)
    slot, settings = f"s_{database.name}", database.settings()
    database.execute("create table t (id int primary key); create publication pub for table t")
    snapshot_tables(settings, zone, slot, "pub")
    database.execute("insert into t values (1)")
    window = _window(database, zone)
    assert capture_window(settings, zone, slot, "pub", window).counts["public.t"] == {"I": 1}

    database.execute(leave)
    database.execute("insert into t values (2)")
    if "rename" in leave:
        with pytest.raises(ConfigurationError, match='rename to "pub"'):
            capture_window(settings, zone, slot, "pub", _window(database, zone))
    database.execute(come_back)
    database.execute("insert into t values (3)")
    for _ in range(2):
        with pytest.raises(DefiniteError, match=r'publication "?pub"? .* --name test') as caught:
            capture_window(settings, zone, slot, "pub", _window(database, zone))
        assert caught.value.exit_status == 4
    assert zone.changes.captured_through(1) == window.end

    # The remedy in the error works without a manual drop.
    assert renew_epoch(settings, zone, slot, "pub").epoch == 2
    [report] = snapshot_tables(settings, zone, slot, "pub")
    assert report.row_count == 3
    database.execute("insert into t values (4)")
    window = _window(database, zone)
    assert capture_window(settings, zone, slot, "pub", window).counts["public.t"] == {"I": 1}


@pytest.mark.every_pg
def test_a_recreated_publication_without_changes_needs_no_new_epoch(
    database: Database, zone: RawZone
) -> None:
    """B9: a new epoch would take unnecessary snapshots of all tables."""
    slot, settings = f"s_{database.name}", database.settings()
    database.execute("create table t (id int primary key); create publication pub for table t")
    snapshot_tables(settings, zone, slot, "pub")
    database.execute("drop publication pub; create publication pub for table t")
    database.execute("insert into t values (1)")
    with pytest.raises(ConfigurationError, match=r"can continue .* pgcdc sync"):
        renew_epoch(settings, zone, slot, "pub")
    report = capture_window(settings, zone, slot, "pub", _window(database, zone))
    assert report.counts["public.t"] == {"I": 1}


def test_the_error_about_a_missing_publication_has_its_create_statement(
    database: Database, zone: RawZone
) -> None:
    """All errors contain the names of the tables in SQL, for any name."""
    slot, settings = f"s_{database.name}", database.settings()
    database.execute('create table t (id int primary key); create table "Order ""Lines" (id int)')
    wanted = 'create publication "pub" for table "public"."Order ""Lines", "public"."t"'
    tables = [TableName("public", "t"), TableName("public", 'Order "Lines')]
    with pytest.raises(ConfigurationError) as caught:
        snapshot_tables(settings, zone, slot, "pub", tables)
    assert wanted in str(caught.value)
    [missing] = [f for f in run_preflight(settings, "pub", slot, tables) if f.severity == "error"]
    assert wanted in missing.message
    database.execute(wanted)
    snapshot_tables(settings, zone, slot, "pub", tables)
    database.execute("drop publication pub")
    for call in (
        lambda: capture_window(settings, zone, slot, "pub", _window(database, zone)),
        lambda: renew_epoch(settings, zone, slot, "pub"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        assert wanted in str(caught.value)
        assert "begin a new epoch with pgcdc renew --name test" in str(caught.value)
    [unknown] = [f for f in run_preflight(settings, "pub", slot) if f.severity == "error"]
    assert 'create publication "pub" for table SCHEMA.TABLE.' in unknown.message


@pytest.mark.every_pg
def test_a_slot_older_than_its_publication_is_refused_at_its_first_change(
    database: Database, zone: RawZone
) -> None:
    """B9: an administrator created slot and publication in the wrong order."""
    slot, settings = f"s_{database.name}", database.settings()
    database.execute("create table t (id int primary key)")
    with create_slot(settings, slot):
        pass
    database.execute("insert into t values (1)")
    database.execute("create publication pub for table t")
    snapshot_tables(settings, zone, slot, "pub")
    with pytest.raises(DefiniteError, match=r"created after the slot.*renew --name test"):
        capture_window(settings, zone, slot, "pub", _window(database, zone))
    assert renew_epoch(settings, zone, slot, "pub").epoch == 2
