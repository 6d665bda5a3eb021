"""A slot of a standby is created with the help of the primary, or within a time limit (B17)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.errors import ConfigurationError, ConnectionLost, SlotLost, TransientError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.postgres.preflight.slot_primary import examine_slot_primary
from pgcdc_assets.postgres.slots import standby_creation as standby_slot_creation
from pgcdc_assets.postgres.slots.creation import create_slot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.standby import Source

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.every_pg(since=16)]


@pytest.fixture
def settings(source: Source) -> ConnectionSettings:
    """The standby, with its primary, and with a short time limit."""
    if int(source.primary.value("show server_version_num")) < 160000:
        pytest.skip("a standby decodes from Postgres 16 on")
    primary = replace(source.primary.settings(), variable="PRIMARY")
    return replace(source.standby.settings(), lock_timeout_ms=2000, primary=primary)


def _slot(source: Source) -> str:
    return f"s_{source.primary.name}"


def _slots(source: Source) -> list[str]:
    return [name for (name,) in source.standby.query("select slot_name from pg_replication_slots")]


@pytest.mark.sampled
def test_an_idle_primary_helps_the_creation(source: Source, settings: ConnectionSettings) -> None:
    """B17: an idle primary writes no record of its running transactions by itself."""
    with create_slot(replace(settings, lock_timeout_ms=60_000), _slot(source)) as made:
        assert made.snapshot_name
    assert _slot(source) in _slots(source)
    source.standby.execute("select pg_drop_replication_slot(%s)", (_slot(source),))


@pytest.mark.sampled
@pytest.mark.parametrize("has_primary", [True, False])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_an_open_transaction_of_the_primary_ends_the_creation_in_time(
    source: Source,
    settings: ConnectionSettings,
    has_primary: bool,
    is_prepared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B7 and B17: neither lock_timeout nor statement_timeout bounds the wait on a standby."""
    monkeypatch.setattr(standby_slot_creation, "_SHORTEST_LIMIT_SECONDS", 2.5)
    source.primary.execute("create table t (id int)")
    gid = f"g_{source.primary.name}"
    if not has_primary:
        settings = replace(settings, primary=None)
    with source.primary.connect() as conn, conn.cursor() as cursor:
        cursor.execute("begin; insert into t values (1)")
        pid = conn.info.backend_pid
        if is_prepared:
            cursor.execute("prepare transaction %s", (gid,))
        source.wait_for_replay()
        with pytest.raises(TransientError) as caught, create_slot(settings, _slot(source)):
            pass
        cursor.execute("rollback prepared %s" if is_prepared else "rollback", (gid,))
    text = str(caught.value)
    if has_primary:
        blocker = f"prepared transaction '{gid}'" if is_prepared else f"of process {pid} on the"
        assert "within 2 s on the standby" in text and blocker in text
    else:
        assert "within 2.5 s on the standby" in text
        assert "select pg_catalog.pg_log_standby_snapshot(); or set primary_dsn_env" in text
    assert _slot(source) not in _slots(source)


def test_a_primary_that_cannot_help_is_named(source: Source, settings: ConnectionSettings) -> None:
    """B17: the creation ends at once, with the setting and the remedy."""
    assert settings.primary is not None
    role, long = f"r_{source.primary.name}", replace(settings, lock_timeout_ms=60_000)
    denied = settings.primary.conninfo.replace("user=postgres", f"user={role}")
    refused = replace(long, primary=replace(settings.primary, conninfo=denied))
    gone = replace(long, primary=replace(settings.primary, conninfo="host=127.0.0.1 port=1"))
    source.primary.execute(f"create role {role} login replication")
    # An open transaction: otherwise the creation might complete without help.
    with source.primary.connect() as conn, conn.cursor() as cursor:
        cursor.execute("begin; create table t (id int)")
        try:
            _check_refusal(source, refused, ConfigurationError, "pg_log_standby_snapshot")
            _check_refusal(source, gone, ConnectionLost, "The connection string is in PRIMARY")
        finally:
            cursor.execute("rollback")
            cursor.execute(f"drop role {role}")


def _check_refusal(
    source: Source, settings: ConnectionSettings, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words), create_slot(settings, _slot(source)):
        pass
    [finding] = _find(source, settings)
    assert (finding.severity, words in str(finding)) == ("error", True)
    assert _slot(source) not in _slots(source)


def _find(source: Source, settings: ConnectionSettings) -> list[Finding]:
    with query_connection(settings, "test") as conn:
        return list(examine_slot_primary(conn, settings, _slot(source)))


def _codes(source: Source, settings: ConnectionSettings) -> list[str]:
    return [finding.severity for finding in _find(source, settings)]


def test_the_preflight_examines_the_primary(source: Source, settings: ConnectionSettings) -> None:
    """B17."""
    assert settings.primary is not None
    assert _codes(source, settings) == ["ok"]
    [unset] = _find(source, replace(settings, primary=None))
    assert (unset.severity, "primary_dsn_env" in unset.remedy) == ("warning", True)
    [standby] = _find(source, replace(settings, primary=source.standby.settings()))
    assert (standby.severity, "is a standby" in standby.message) == ("error", True)
    [useless] = _find(source, replace(settings.primary, primary=settings.primary))
    assert (useless.severity, "not a standby" in useless.message) == ("warning", True)


def test_a_slot_that_a_conflict_has_invalidated_names_the_conflict(
    source: Source, settings: ConnectionSettings, zone: RawZone
) -> None:
    """B17: the primary has removed catalog rows that the slot needs."""
    capturing = Capturing(source.standby, zone, _slot(source), settings.conninfo)
    source.primary.execute("create table t (id int); create publication pub for table t")
    source.wait_for_replay()
    with create_slot(replace(settings, lock_timeout_ms=60_000), _slot(source)) as made:
        start = made.consistent_point
    capturing.record_epoch(start)
    source.wait_for_invalidation(lambda: capturing.status().is_lost)
    end = source.wait_for_replay()
    with pytest.raises(SlotLost, match=r"catalog rows .* on this standby .*hot_standby_feedback"):
        capture_window(settings, zone, _slot(source), "pub", LsnWindow.of(1, start, end))
    source.standby.execute("select pg_drop_replication_slot(%s)", (_slot(source),))
