"""The health of a slot, by its status and the end of the raw zone (B2, B11, B12, B16)."""

from __future__ import annotations

import datetime as dt
import pickle
import re
from dataclasses import replace

import pytest

from pgcdc_assets.errors import (
    UNKNOWN_CAPTURE,
    PgcdcError,
    RawZoneError,
    SlotAdvanced,
    SlotLost,
    SlotMissing,
    TransientError,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.slots.health import SlotHealth, slot_health
from pgcdc_assets.postgres.slots.status import SlotStatus, SlotWalStatus

THROUGH = Lsn(1000)
SOUND = SlotStatus(
    slot="pgcdc_shop",
    plugin="pgoutput",
    slot_type="logical",
    database="shop",
    temporary=False,
    active_pid=None,
    active_application_name=None,
    restart_lsn=Lsn(900),
    confirmed_flush_lsn=THROUGH,
    wal_status=SlotWalStatus.RESERVED,
    safe_wal_size=None,
    invalidation_reason=None,
    inactive_since=None,
    catalog_xmin_age=1,
    current_lsn=Lsn(2000),
    in_recovery=False,
    server_time=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    lag_seconds=None,
    two_phase=False,
    is_synced=False,
    has_failover=False,
    decoded_transactions=None,
    is_counted_since_creation=True,
    may_have_crashed=False,
)


def _error(health: SlotHealth) -> PgcdcError:
    error = health.error("pgcdc_shop", "/lake/shop/raw", "shop")
    assert error is not None
    return error


def test_a_slot_at_the_end_of_the_raw_zone_is_sound() -> None:
    for status in (SOUND, replace(SOUND, wal_status=SlotWalStatus.EXTENDED)):
        health = slot_health(status, THROUGH)
        assert (health.is_sound, health.can_continue, health.is_at_risk) == (True, True, False)
        assert health.error("pgcdc_shop", "/lake") is None


def test_a_slot_behind_the_raw_zone_can_continue() -> None:
    # A crash between the landing and its confirmation has this result.
    assert slot_health(replace(SOUND, confirmed_flush_lsn=Lsn(950)), THROUGH).can_continue


def test_an_unreserved_slot_can_continue_and_is_at_risk() -> None:
    health = slot_health(replace(SOUND, wal_status=SlotWalStatus.UNRESERVED), THROUGH)
    assert (health.is_sound, health.can_continue, health.is_at_risk) == (False, True, True)
    assert "pgcdc_shop is unreserved: it keeps 1100 bytes" in health.risk


def test_an_unknown_wal_status_is_not_sound() -> None:
    health = slot_health(replace(SOUND, wal_status=SlotWalStatus.of("of a later version")))
    assert (health.wal_status, health.is_sound, health.can_continue) == ("unknown", False, True)
    assert SlotWalStatus.of(None) is SlotWalStatus.UNKNOWN


def test_a_slot_that_is_missing_or_lost_is_gone() -> None:
    missing = slot_health(None, THROUGH)
    assert (missing.wal_status, missing.is_gone, missing.can_continue) == ("missing", True, False)
    error = _error(missing)
    assert isinstance(error, SlotMissing)
    found = (error.slot, error.raw_zone, error.captured_through)
    assert found == ("pgcdc_shop", "/lake/shop/raw", THROUGH)
    assert not slot_health(replace(SOUND, confirmed_flush_lsn=None), THROUGH).can_continue
    for changed in (
        {"wal_status": SlotWalStatus.LOST},
        {"wal_status": SlotWalStatus.UNRESERVED, "invalidation_reason": "rows_removed"},
    ):
        lost = slot_health(replace(SOUND, **changed), THROUGH)
        assert (lost.is_gone, lost.can_continue, lost.is_sound) == (True, False, False)
        error = _error(lost)
        assert isinstance(error, SlotLost)
        assert lost.status is not None
        cause = (lost.status.wal_status.value, 900, lost.status.invalidation_reason)
        assert (error.wal_status, error.restart_lsn, error.invalidation_reason) == cause
        assert error.slot == "pgcdc_shop"


def test_a_slot_that_was_confirmed_beyond_the_raw_zone_cannot_continue() -> None:
    health = slot_health(replace(SOUND, confirmed_flush_lsn=Lsn(1001)), THROUGH)
    assert (health.can_continue, health.is_gone) == (False, False)
    error = _error(health)
    assert isinstance(error, SlotAdvanced)
    assert "confirmed the 1 bytes" in str(error)
    found = (error.slot, error.confirmed_flush_lsn, error.expected, error.gap_bytes)
    assert found == ("pgcdc_shop", 1001, THROUGH, 1)
    assert slot_health(replace(SOUND, confirmed_flush_lsn=Lsn(1001))).is_sound


@pytest.mark.parametrize("capture", [UNKNOWN_CAPTURE, "shop", "two words"])
def test_the_remedy_of_an_unusable_slot_names_the_capture(capture: str) -> None:
    """A stream raises the error without the name, which the capture's run adds."""
    command = {
        UNKNOWN_CAPTURE: "pgcdc renew --name NAME",
        "shop": "pgcdc renew --name shop",
        "two words": "pgcdc renew --name 'two words'",
    }[capture]
    for health in (
        slot_health(None, THROUGH),
        slot_health(replace(SOUND, wal_status=SlotWalStatus.LOST), THROUGH),
        slot_health(replace(SOUND, confirmed_flush_lsn=Lsn(1001)), THROUGH),
    ):
        error = health.error("pgcdc_shop", "/lake", capture)
        unnamed = health.error("pgcdc_shop", "/lake")
        assert error is not None
        assert unnamed is not None
        assert re.search(rf"{re.escape(command)}[., ]", str(error))
        for each in (unnamed.in_capture(capture), pickle.loads(pickle.dumps(error))):
            assert str(each) == str(error)


def test_a_restarted_standby_is_transient_and_a_reset_primary_is_not() -> None:
    status = replace(SOUND, current_lsn=Lsn(999), confirmed_flush_lsn=Lsn(990))
    standby = slot_health(replace(status, in_recovery=True), THROUGH)
    assert (standby.can_continue, standby.is_sound, standby.is_gone) == (True, False, False)
    with pytest.raises(TransientError, match="standby has replayed WAL through"):
        raise _error(standby)
    primary = slot_health(status, THROUGH)
    assert (primary.can_continue, primary.is_sound, primary.is_gone) == (False, False, False)
    with pytest.raises(RawZoneError, match="pgcdc renew --name shop") as caught:
        raise _error(primary)
    assert caught.value.raw_zone == "/lake/shop/raw"
    assert slot_health(replace(status, current_lsn=THROUGH), THROUGH).problem is None


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (None, "raise max_slot_wal_keep_size"),
        ("wal_removed", "raise max_slot_wal_keep_size"),
        ("rows_removed", "hot_standby_feedback"),
        ("wal_level_insufficient", "keep wal_level at logical"),
        ("idle_timeout", "idle_replication_slot_timeout"),
        ("of a later release", "raise max_slot_wal_keep_size"),
    ],
)
def test_the_remedy_depends_on_the_cause_of_a_lost_slot(reason: str | None, sentence: str) -> None:
    lost = replace(SOUND, wal_status=SlotWalStatus.LOST, invalidation_reason=reason)
    assert sentence in str(_error(slot_health(lost)))
