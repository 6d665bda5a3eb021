"""A standby goes away, or is promoted, while copies read from it (C3)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg2 import OperationalError

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.errors import ConfigurationError, ConnectionLost
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets_tests.support.handover import copied_rows, replay, writers
from pgcdc_assets_tests.support.resumed_copies import (
    PAGE,
    STATEMENTS,
    TABLE,
    between_ranges,
    copy_t,
    is_exact,
    slot_of,
    source_rows,
)
from pgcdc_assets_tests.support.standby import Source
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.soak, pytest.mark.every_pg]


def _copy(source: Source, zone: RawZone) -> SnapshotReport | SnapshotFailure | None:
    standby = replace(source.standby.settings(), variable="SHOP_STANDBY")
    return copy_t(source.primary, zone, policy=SnapshotPolicy(2, 8 * PAGE), standby=standby)


def test_a_standby_that_stops_during_a_copy_fails_it_and_names_the_variable(
    source: Source, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranges that were read stay."""
    source.primary.execute(TABLE.format(rows=400))
    between_ranges(monkeypatch, source.standby.server.stop, 4)
    try:
        failed = _copy(source, zone)
    finally:
        source.standby.server.start()
    assert isinstance(failed, SnapshotFailure), failed
    assert isinstance(failed.error, ConnectionLost), failed.error
    assert "SHOP_STANDBY" in str(failed.error)
    landed = len(zone.ranges.all())
    assert landed >= 2
    source.primary.execute("delete from t where id % 5 = 1; update t set n = 1 where id % 9 = 2")
    report = _copy(source, zone)
    assert is_exact(source.primary, zone, report)
    assert isinstance(report, SnapshotReport)
    assert report.ranges_continued == landed


def test_a_copy_continues_while_its_standby_is_promoted(
    source: Source, zone: RawZone, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The snapshot is that of the history before the promotion; what comes later is not read."""
    primary, promoted = source.primary, source.standby
    primary.execute(TABLE.format(rows=400))

    def is_promoted() -> bool:
        try:
            return bool(promoted.value("select not pg_is_in_recovery()"))
        except OperationalError:
            return False

    def promote() -> None:
        promoted.value("select pg_promote(false)")
        wait_until(is_promoted, "the standby to be promoted")
        promoted.execute("update t set n = -7; delete from t where id % 3 = 0")
        promoted.execute("vacuum t")
        promoted.execute("insert into t select i, -7 from generate_series(5001, 5100) i")

    between_ranges(monkeypatch, promote, 4)
    with primary.connect(autocommit=False) as old, old.cursor() as cursor:
        # No row is removed that the copy sees: the promotion would wait for the conflict.
        cursor.execute("set transaction isolation level repeatable read")
        cursor.execute("select count(*) from t")
        with writers(primary, 2, seed, STATEMENTS, key_count=450):
            report = _copy(source, zone)
    assert isinstance(report, SnapshotReport), report
    rows = copied_rows(zone, "t", report.snapshot_lsn)
    assert len(rows) == report.row_count
    assert replay(primary, slot_of(primary), rows, report.snapshot_lsn) == source_rows(primary)
    with pytest.raises(ConfigurationError, match=r"is not a standby\. Name a standby of"):
        _copy(source, zone)
