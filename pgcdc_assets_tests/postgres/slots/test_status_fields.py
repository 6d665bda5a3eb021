"""What the status of a slot says, without a server: readers, distances and suitability."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.slots.status import SlotWalStatus, check_slot_usable, slot_taken_error
from pgcdc_assets_tests.postgres.slots.test_health import SOUND

_CRASHED: dict[str, Any] = {"may_have_crashed": True, "decoded_transactions": 0}


def test_each_word_of_the_server_is_read() -> None:
    words = ["reserved", "extended", "unreserved", "lost", "unknown"]
    assert [SlotWalStatus.of(word).value for word in words] == words
    assert [SlotWalStatus.of(text) for text in (None, "", "new")] == [SlotWalStatus.UNKNOWN] * 3


@pytest.mark.parametrize(
    ("changes", "was_read"),
    [
        ({}, False),
        ({"decoded_transactions": 0}, False),
        ({"decoded_transactions": 1}, True),
        ({"is_counted_since_creation": False}, True),
        # After a crash, the distance of the positions decides.
        ({**_CRASHED, "restart_lsn": Lsn(1000), "confirmed_flush_lsn": Lsn(2024)}, False),
        ({**_CRASHED, "restart_lsn": Lsn(1000), "confirmed_flush_lsn": Lsn(2025)}, True),
        ({**_CRASHED, "restart_lsn": None}, True),
        ({**_CRASHED, "confirmed_flush_lsn": None}, True),
        # A standby does not write statistics of its own.
        ({**_CRASHED, "restart_lsn": None, "in_recovery": True}, False),
        ({"restart_lsn": Lsn(1), "confirmed_flush_lsn": Lsn(9999)}, False),
    ],
)
def test_a_reader_is_known_by_the_count_or_after_a_crash_by_the_distance(
    changes: dict[str, Any], was_read: bool
) -> None:
    assert replace(SOUND, **changes).was_read is was_read


def test_distances_are_bytes_and_never_negative() -> None:
    assert (SOUND.lag_bytes, SOUND.retained_bytes) == (1000, 1100)
    # A standby's copy of a slot may be ahead of the replayed WAL.
    ahead = replace(SOUND, current_lsn=Lsn(950))
    assert (ahead.lag_bytes, ahead.retained_bytes) == (0, 50)
    unknown = replace(SOUND, confirmed_flush_lsn=None, restart_lsn=None)
    assert (unknown.lag_bytes, unknown.retained_bytes) == (None, None)


def test_a_slot_is_active_with_a_walsender_and_lost_with_a_cause() -> None:
    assert (SOUND.is_active, SOUND.is_lost) == (False, False)
    assert replace(SOUND, active_pid=7).is_active
    assert replace(SOUND, wal_status=SlotWalStatus.LOST).is_lost
    assert replace(SOUND, invalidation_reason="idle_timeout").is_lost
    assert not replace(SOUND, wal_status=SlotWalStatus.UNRESERVED).is_lost


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"slot_type": "physical", "plugin": None, "database": None}, "is a physical slot"),
        ({"plugin": "test_decoding"}, "belongs to the output plugin test_decoding"),
        ({"database": "other"}, "belongs to database other"),
        ({"temporary": True}, "is the temporary slot of another session"),
        ({"is_synced": True, "in_recovery": True}, "is this standby's copy"),
    ],
)
def test_a_slot_for_another_purpose_is_refused_with_its_property(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^Replication slot pgcdc_shop {reason}"):
        check_slot_usable(replace(SOUND, **changes), "shop")


@pytest.mark.parametrize("changes", [{}, {"is_synced": True}, {"in_recovery": True}])
def test_a_permanent_slot_of_the_database_is_usable(changes: dict[str, Any]) -> None:
    check_slot_usable(replace(SOUND, **changes), "shop")


def test_the_error_for_a_taken_slot_has_its_positions_and_reader() -> None:
    error = slot_taken_error(SOUND, "/lake/shop", "pgcdc sync --adopt-slot", "lake /other")
    found = (error.slot, error.confirmed_flush_lsn, error.restart_lsn, error.lake, error.remedy)
    assert found == ("pgcdc_shop", 1000, 900, "/lake/shop", "pgcdc sync --adopt-slot")
    assert error.reader == "lake /other"
