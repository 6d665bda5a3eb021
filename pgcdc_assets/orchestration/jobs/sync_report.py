"""What a one-shot run is allowed, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SyncLimits:
    """When a one-shot run gives up.

    Attributes:
        wait_seconds: for runs of others (the daemon's, another sync's) that are in the way.
        idle_seconds: maximum wait for progress if no other run blocks it.
        poll_seconds: between two looks while waiting.
    """

    wait_seconds: float = 600.0
    idle_seconds: float = 30.0
    poll_seconds: float = 1.0


@dataclass
class SyncReport:
    """What a one-shot run did, and where its time went.

    Attributes:
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

    @property
    def total_seconds(self) -> float:
        """Sum of the parts."""
        return sum(self.seconds.values())
