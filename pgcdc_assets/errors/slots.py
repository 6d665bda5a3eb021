"""Errors about the replication slot."""

from __future__ import annotations

from typing import ClassVar

from pgcdc_assets.errors.base import (
    UNKNOWN_CAPTURE,
    DefiniteError,
    TransientError,
    renewal_command,
)
from pgcdc_assets.lsn import Lsn


class SlotBusy(TransientError):
    """Another process reads the slot, or holds the lease of the slot."""

    message = (
        "Replication slot {slot} is in use by {holder}. Wait until the process ends, or end it "
        "with: {statement}"
    )

    slot: str
    active_pid: int | None = None
    application_name: str | None = None

    @property
    def holder(self) -> str:
        """The process, as far as it is known."""
        if self.active_pid is None:
            return "another process"
        return f"process {self.active_pid} ({self.application_name or 'without a name'})"

    @property
    def statement(self) -> str:
        """The statement that ends the process."""
        if self.active_pid is not None:
            return f"select pg_terminate_backend({self.active_pid})"
        return (
            "select pg_terminate_backend(active_pid) from pg_replication_slots "
            f"where slot_name = '{self.slot}'"
        )


class SlotUnusable(DefiniteError):
    """The slot cannot continue: only a new epoch helps."""

    slot: str
    capture: str = UNKNOWN_CAPTURE

    @property
    def renewal(self) -> str:
        """The command that begins a new epoch."""
        return renewal_command(self.capture)


class SlotLost(SlotUnusable):
    """The server invalidated the slot.

    Attributes:
        restart_lsn: the slot's restart_lsn; None if unknown.
        invalidation_reason: column of pg_replication_slots; None: WAL was removed.
        reason: the server's sentence; the default is a sentence of the invalidation reason.
        prevention: what prevents the loss; the default is that of the invalidation reason.
    """

    message = (
        "Replication slot {slot} is lost (wal_status {wal_status}): {reason}. Begin a new epoch "
        "with {renewal}, and {prevention} to prevent it."
    )
    causes: ClassVar[dict[str, tuple[str, str]]] = {
        "wal_removed": (
            "the server removed WAL that the slot needs",
            "raise max_slot_wal_keep_size",
        ),
        "rows_removed": (
            "the primary removed catalog rows that decoding on this standby needs",
            "set hot_standby_feedback = on on the standby",
        ),
        "wal_level_insufficient": (
            "wal_level of the primary was lowered",
            "keep wal_level at logical",
        ),
        "idle_timeout": (
            "no capture read the slot for longer than idle_replication_slot_timeout",
            "set idle_replication_slot_timeout to 0",
        ),
    }

    wal_status: str | None
    restart_lsn: Lsn | None = None
    invalidation_reason: str | None = None
    prevention: str = ""

    def __post_init__(self) -> None:
        known = self.causes.get(self.invalidation_reason or "", self.causes["wal_removed"])
        self.reason = self.reason or known[0]
        self.prevention = self.prevention or known[1]
        super().__post_init__()


class SlotMissing(SlotUnusable):
    """The slot of the raw zone does not exist any more. `raw_zone` is the folder of its tables."""

    message = (
        "Replication slot {slot} does not exist, but raw zone {raw_zone} was captured from this "
        "slot through {captured_through}. It was dropped, or the server is a standby that was "
        "promoted without a copy of the slot. No slot has the later changes: begin a new epoch, "
        "with new snapshots of the tables, with {renewal}."
    )

    raw_zone: str
    captured_through: Lsn | None


class SlotAdvanced(SlotUnusable):
    """Another program advanced the slot beyond the end of the raw zone, or re-created the slot."""

    message = (
        "Replication slot {slot} is at {confirmed_flush_lsn}, beyond {expected} where the raw "
        "zone ends: another program confirmed the {gap_bytes} bytes of WAL in between, which "
        "cannot be read again. If another lake or program uses the slot, give this capture a slot "
        "of its own (`slot`), then begin a new epoch with {renewal}. Otherwise run {renewal} "
        "--adopt-slot."
    )

    confirmed_flush_lsn: Lsn
    expected: Lsn
    gap_bytes: int


class SlotTaken(DefiniteError):
    """Another lake or program has read the slot. `reader` names the lake, if it is known."""

    message = (
        "Replication slot {slot} was read before, through {confirmed_flush_lsn} (restart_lsn "
        "{restart_lsn}), and does not belong to {lake}: {reader} may need the changes of the slot. "
        "If so, set PGCDC_LAKE to that lake, or give this capture a slot of its own (`slot`). If "
        "nothing else uses the slot, adopt the slot with {remedy}."
    )

    slot: str
    confirmed_flush_lsn: Lsn | None
    restart_lsn: Lsn | None
    lake: str
    reader: str
    remedy: str
