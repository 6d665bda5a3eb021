"""The state that `pgcdc sync` shares with the sensors that it evaluates.

The same sensors decide in the daemon and in `pgcdc sync`. A one-shot run adds a barrier: the WAL
position at its start, through which all changes must be captured and merged. The state is in a
ContextVar, which is empty in the daemon. The sensors record their progress in the state.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.orchestration.state import TableState
from pgcdc_assets.tables.schema_gate import SchemaGate


@dataclass
class SyncProgress:
    """The state that one capture's sensors and its one-shot run share.

    Attributes:
        barrier: an LSN after all commits before the start; set by the first lag tick.
        events_through: position of the newest schema event at the start, or of the barrier. Tables
            with later events wait for a later run, so the run ends even if DDL never stops.
        captured_through: end of the newest landed window.
        is_merged: all changes before the barrier are merged into every table.
        waiting: the reason why the sensor requested no run.
        is_blocked: a run of another process blocks the progress.
        is_polled: the catalog was polled since the start.
    """

    name: str
    barrier: Lsn | None = None
    events_through: Position | None = None
    captured_through: Lsn | None = None
    is_merged: bool = False
    waiting: str = ""
    is_blocked: bool = False
    is_polled: bool = False

    @property
    def is_captured(self) -> bool:
        """Whether all changes before the barrier are in the raw zone."""
        return (
            self.barrier is not None
            and self.captured_through is not None
            and self.captured_through >= self.barrier
        )

    def heals(self, gate: SchemaGate) -> bool:
        """Return whether the run takes the snapshot that a table waits for."""
        if self.events_through is None:
            return gate.heals
        return gate.heals and gate.events[0].position <= self.events_through

    def has_merged(self, table: TableState, epoch: int) -> bool:
        """Return whether a table has the newest snapshot, and all changes before the barrier.

        A table that waits before a later schema event has all changes that the run can merge. So
        has a table that left the publication.
        """
        if self.barrier is not None and table.has_left and not table.needs_merge:
            return True
        if self.barrier is None or table.snapshot_at is None or table.watermark is None:
            return False
        barrier, gate = Position(epoch, self.barrier), table.gate
        if gate is not None and self.heals(gate):
            return False
        if gate is not None and gate.heals:
            barrier = min(barrier, gate.hold)
        if table.merged_through is None or table.merged_through < barrier:
            return False
        return all(
            at is None or at <= table.watermark or at > barrier
            for at in (table.snapshot_at, table.partial_at)
        )


sync_progress: ContextVar[SyncProgress | None] = ContextVar("pgcdc_sync_progress", default=None)
