"""Limits and report of a one-shot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SyncLimits:
    """Time limits of a one-shot run.

    Attributes:
        wait_seconds: maximum wait for other runs (of the daemon or another sync) that block it.
        idle_seconds: maximum wait for progress if no other run blocks it.
        poll_seconds: polling interval.
    """

    wait_seconds: float = 600.0
    idle_seconds: float = 30.0
    poll_seconds: float = 1.0


@dataclass
class SyncReport:
    """The result of a one-shot run, and its times.

    Attributes:
        change_count: changes of tables. Logical messages are none, such as the one by which a new
            slot shows other lakes that it has a reader.
        seconds: wall time by part: `sensors`, `snapshot`, `capture`, `session` (starting Spark),
            `merge`.
    """

    name: str
    barrier: str = ""
    window_count: int = 0
    change_count: int = 0
    merge_count: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    run_ids: list[str] = field(default_factory=list)

    def followed_by(self, later: SyncReport) -> SyncReport:
        """Return the report of this run and a run that continued it."""
        parts = self.seconds.keys() | later.seconds.keys()
        return SyncReport(
            self.name,
            later.barrier,
            self.window_count + later.window_count,
            self.change_count + later.change_count,
            self.merge_count + later.merge_count,
            {part: self.seconds.get(part, 0.0) + later.seconds.get(part, 0.0) for part in parts},
            [*self.run_ids, *later.run_ids],
        )

    def add_window(self, metadata: Mapping[str, Any]) -> None:
        """Add a captured window, by the metadata of its materialization."""
        self.window_count += 1
        rows, messages = metadata["dagster/partition_row_count"], metadata["messages"]
        self.change_count += int(rows.value - messages.value)

    @property
    def total_seconds(self) -> float:
        """Total of the parts in seconds."""
        return sum(self.seconds.values())
