"""The state that `pgcdc sync` shares with the sensors that it evaluates.

The sensors decide under the daemon and under `pgcdc sync`. A one-shot run only adds a barrier: the
WAL position at its start, through which all changes have to be captured and merged. The state is in
a ContextVar, so that sensors under the daemon have none. The sensors record their progress in it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from pgcdc_assets.lsn import Lsn


@dataclass
class SyncProgress:
    """The state that one capture's sensors and its one-shot run share.

    Attributes:
        barrier: an LSN after all commits before the start; set by the first lag tick.
        captured_through: end of the newest landed window.
        merged_through: the lowest position through which a table is merged; None while a table is
            not merged at all.
        waiting: the reason why the sensor requested no run.
        is_blocked: a run of another process blocks the progress.
        is_polled: the catalog was looked at since the start.
        is_healing: a table waits for an automatic re-snapshot.
    """

    name: str
    barrier: Lsn | None = None
    captured_through: Lsn | None = None
    merged_through: Lsn | None = None
    waiting: str = ""
    is_blocked: bool = False
    is_polled: bool = False
    is_healing: bool = False

    @property
    def is_captured(self) -> bool:
        """Whether all changes before the barrier are in the raw zone."""
        return (
            self.barrier is not None
            and self.captured_through is not None
            and self.captured_through >= self.barrier
        )

    @property
    def is_merged(self) -> bool:
        """Whether all changes before the barrier are merged into every table."""
        return (
            self.is_captured
            and not self.is_healing
            and self.merged_through is not None
            and self.barrier is not None
            and self.merged_through >= self.barrier
        )


sync_progress: ContextVar[SyncProgress | None] = ContextVar("pgcdc_sync_progress", default=None)
