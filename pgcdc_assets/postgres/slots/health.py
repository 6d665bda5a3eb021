"""The health of a slot, derived from its status and the captured LSN.

Capture, snapshot, renewal, sensor, pre-flight, checks and `pgcdc status` all derive the health of a
slot by this module, and show or raise the same sentence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pgcdc_assets.errors import (
    UNKNOWN_CAPTURE,
    PgcdcError,
    RawZoneError,
    SlotAdvanced,
    SlotLost,
    SlotMissing,
    TransientError,
    renewal_command,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.slots.status import SlotStatus, SlotWalStatus

# The word for a slot that does not exist, beside the server's own words for `wal_status`.
MISSING = "missing"


class SlotProblem(enum.Enum):
    """The reason why a slot cannot continue the capture."""

    MISSING = enum.auto()
    LOST = enum.auto()
    # The slot is confirmed beyond what was captured.
    ADVANCED = enum.auto()
    # The WAL of a primary ends before what was captured: the server is another one.
    SERVER_BEHIND = enum.auto()
    # A standby has not replayed what was captured yet, as after a restart.
    REPLAYING = enum.auto()


@dataclass(frozen=True, slots=True)
class SlotHealth:
    """The health of a slot.

    Attributes:
        status: None if there is no such slot.
        captured_through: the LSN where the raw zone ends; None if nothing is captured, or if the
            question is about the slot alone.
        problem: None if the slot can continue.
    """

    status: SlotStatus | None
    captured_through: Lsn | None
    problem: SlotProblem | None

    @property
    def wal_status(self) -> str:
        """The server's word, `unknown` if it has none, or `missing`."""
        return MISSING if self.status is None else self.status.wal_status.value

    @property
    def is_gone(self) -> bool:
        """Whether the slot is missing or lost, so that only a new epoch helps."""
        return self.problem in (SlotProblem.MISSING, SlotProblem.LOST)

    @property
    def can_continue(self) -> bool:
        """Whether a stream of the slot begins where the raw zone ends, now or after a replay."""
        return (
            self.problem in (None, SlotProblem.REPLAYING)
            and self.status is not None
            and self.status.confirmed_flush_lsn is not None
        )

    @property
    def is_at_risk(self) -> bool:
        """Whether the server may remove WAL that the slot needs at its next checkpoint."""
        return self.status is not None and self.status.wal_status is SlotWalStatus.UNRESERVED

    @property
    def is_sound(self) -> bool:
        """Whether nothing is to be done: no problem, and WAL that the server keeps."""
        return (
            self.problem is None
            and self.status is not None
            and self.status.wal_status in (SlotWalStatus.RESERVED, SlotWalStatus.EXTENDED)
        )

    @property
    def risk(self) -> str:
        """The sentence about a slot at risk, without the remedy."""
        assert self.status is not None
        return (
            f"Replication slot {self.status.slot} is unreserved: it keeps "
            f"{self.status.retained_bytes} bytes of WAL, more than max_slot_wal_keep_size, and the "
            "server may remove WAL that the slot needs at its next checkpoint."
        )

    @property
    def risk_remedy(self) -> str:
        """The remedy of a slot at risk."""
        return "Run the capture now, or raise max_slot_wal_keep_size."

    def error(self, slot: str, raw_zone: str, capture: str = UNKNOWN_CAPTURE) -> PgcdcError | None:
        """Return the error of the problem; None if there is no problem.

        Args:
            slot: the slot's name, also of a missing slot.
            raw_zone: the address of the raw zone that was captured from the slot.
            capture: the capture's name, for the remedy.
        """
        if self.problem is None:
            return None
        status, through = self.status, self.captured_through
        if status is None:
            return SlotMissing(
                capture=capture, slot=slot, raw_zone=raw_zone, captured_through=through
            )
        if self.problem is SlotProblem.LOST:
            return SlotLost(
                capture=capture,
                slot=slot,
                wal_status=status.wal_status.value,
                restart_lsn=status.restart_lsn,
                invalidation_reason=status.invalidation_reason,
            )
        assert through is not None
        if self.problem is SlotProblem.ADVANCED:
            confirmed = status.confirmed_flush_lsn
            assert confirmed is not None
            return SlotAdvanced(
                capture=capture,
                slot=slot,
                confirmed_flush_lsn=confirmed,
                expected=through,
                gap_bytes=confirmed - through,
            )
        if self.problem is SlotProblem.REPLAYING:
            return TransientError(
                reason=f"The standby has replayed WAL through {status.current_lsn}, but {raw_zone} "
                f"is captured through {through}. Run it again when the standby has caught up."
            )
        return RawZoneError(
            raw_zone=raw_zone,
            reason=f"captured through {through}, but the server's WAL ends at "
            f"{status.current_lsn}: the server was restored from a backup, or replaced by a "
            "standby that had not received all WAL. Begin a new epoch with "
            f"{renewal_command(capture)}.",
        )


def slot_health(status: SlotStatus | None, captured_through: Lsn | None = None) -> SlotHealth:
    """Judge a slot.

    Args:
        status: None if there is no such slot.
        captured_through: the LSN where the raw zone ends; None judges the slot alone.
    """
    return SlotHealth(status, captured_through, _find_problem(status, captured_through))


def _find_problem(status: SlotStatus | None, captured_through: Lsn | None) -> SlotProblem | None:
    if status is None:
        return SlotProblem.MISSING
    if status.is_lost:
        return SlotProblem.LOST
    if captured_through is None:
        return None
    if status.current_lsn < captured_through:
        return SlotProblem.REPLAYING if status.in_recovery else SlotProblem.SERVER_BEHIND
    confirmed = status.confirmed_flush_lsn
    if confirmed is not None and confirmed > captured_through:
        return SlotProblem.ADVANCED
    return None
