"""Snapshots and windows of a slot on a standby (B17)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.snapshots.pool import SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import ConfigurationError, SlotLost
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import HeartbeatPolicy, SlotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.prepared import two_phase_limits
from pgcdc_assets_tests.support.standby import Source
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.every_pg(since=16)]


@pytest.fixture
def capturing(source: Source, zone: RawZone) -> Iterator[Capturing]:
    """Return a capture of the standby, whose publication has table `t`."""
    if int(source.primary.value("show server_version_num")) < 160000:
        pytest.skip("a standby decodes from Postgres 16 on")
    source.primary.execute(
        "create table t (id int primary key); create publication pub for table t"
    )
    source.wait_for_replay()
    slot = f"s_{source.standby.name}"
    yield Capturing(source.standby, zone, slot, source.standby.conninfo)
    source.standby.drop_slots()


def _snapshot(source: Source, capturing: Capturing) -> SnapshotReport:
    """Take a snapshot; the primary writes the record that the creation of the slot waits for."""
    settings = replace(source.standby.settings(), primary=source.primary.settings())
    tables = [TableName("public", "t")]
    [report] = snapshot_tables(settings, capturing.zone, capturing.slot, "pub", tables)
    return report


def _window(source: Source, capturing: Capturing) -> LsnWindow:
    """Return the next window, through all that the primary has committed."""
    return LsnWindow.of(1, capturing.captured_through(), source.wait_for_replay())


def _ids(capturing: Capturing) -> list[int]:
    return [int(values[0]) for values in capturing.texts("t")]


@pytest.mark.sampled
def test_a_standby_is_the_source_of_snapshots_and_windows(
    source: Source, capturing: Capturing
) -> None:
    """B17: a slot of the standby needs a record of running transactions from the primary."""
    primary = source.primary

    def capture(limits: CaptureLimits | None = None) -> None:
        capturing.capture(_window(source, capturing), limits)

    with source.standby_setting("hot_standby_feedback", "on"):
        primary.execute("insert into t values (1)")
        source.wait_for_replay()
        first, second = (_snapshot(source, capturing) for _ in range(2))
        assert (first.row_count, second.row_count) == (1, 1)
        assert first.snapshot_lsn < second.snapshot_lsn
        primary.execute("insert into t values (2)")
        capture()
        assert _ids(capturing) == [2]

        # A transaction without changes, prepared before the slot gets two_phase: the server sends
        # only its COMMIT PREPARED, and the standby does not show it.
        locks, rows = (f"{word}_{primary.name}" for word in ("locks", "rows"))
        primary.prepare(locks, "select * from t for share")
        capture()
        primary.prepare(rows, "insert into t values (3)")
        capture(two_phase_limits())
        for gid in (locks, rows):
            primary.end_prepared(gid)
        capture(two_phase_limits())
        assert _ids(capturing) == [2, 3]


@pytest.mark.sampled
def test_the_slot_of_a_standby_advances_while_the_publication_is_idle(
    source: Source, capturing: Capturing
) -> None:
    """B17 and A11: the primary writes only what the publication does not have."""
    with source.standby_setting("hot_standby_feedback", "on"):
        _snapshot(source, capturing)
        with capturing.session() as session:

            def land() -> Lsn:
                # The primary writes such a record every 15 seconds, if anything else was written.
                source.primary.value("select pg_log_standby_snapshot()::text")
                source.wait_for_replay()
                end = session.read_current_lsn()
                report = session.land(LsnWindow.of(1, capturing.captured_through(), end))
                assert report.counts == {}
                return end

            first = land()

            def has_advanced() -> bool:
                end, status = land(), capturing.status()
                assert status.restart_lsn is not None
                assert status.confirmed_flush_lsn is not None
                return status.restart_lsn > first and status.confirmed_flush_lsn == end

            wait_until(has_advanced, "restart_lsn and confirmed_flush_lsn to advance")
            assert session.finish()
    assert capturing.rows() == []
    assert capturing.confirmed() == capturing.captured_through()


def test_a_conflict_with_recovery_that_ends_a_running_stream_names_the_lost_slot(
    source: Source, capturing: Capturing, caplog: pytest.LogCaptureFixture
) -> None:
    """B17: the session resumes after the conflict, and finds that the slot is lost.

    A new epoch continues, and no heartbeat is written to a standby.
    """
    _snapshot(source, capturing)
    with capturing.session(CaptureLimits(resume_seconds=30)) as session:
        source.primary.execute("insert into t values (1)")
        session.land(_window(source, capturing))
        through = capturing.captured_through()
        wait_until(lambda: capturing.confirmed() == through, "the confirmation")
        source.primary.execute("insert into t values (2)")
        source.wait_for_invalidation(lambda: capturing.status().is_lost)
        with pytest.raises(
            SlotLost, match=r"catalog rows .* on this standby .*pgcdc renew.*"
        ) as it:
            session.land(_window(source, capturing))
    assert "set hot_standby_feedback = on on the standby" in str(it.value)
    assert _ids(capturing) == [1]
    assert capturing.captured_through() == capturing.confirmed() == through

    settings = replace(source.standby.settings(), primary=source.primary.settings())
    policy = SlotPolicy(heartbeat=HeartbeatPolicy(table="public.t"))
    arguments = (settings, capturing.zone, capturing.slot, "pub")
    with pytest.raises(ConfigurationError, match="standby"):
        renew_epoch(*arguments, slot_policy=SlotPolicy(failover=True))
    assert capturing.status().is_lost, "the slot was dropped"
    with source.standby_setting("hot_standby_feedback", "on"):
        renewed = renew_epoch(*arguments, slot_policy=policy)
    assert (renewed.epoch, renewed.shared_through) == (2, None)
    assert "heartbeat" not in caplog.text
