"""The meter of a capture: what was landed, and where the time went.

A capture is in one phase at any time, so the seconds of all phases are the time since the start of
the meter. One thread changes the phase, and any thread may read the meter.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field


class Phase(enum.StrEnum):
    """The phases of a capture."""

    # Between two windows, and before the first.
    IDLE = "idle"
    # The lease, the checks and the start of the stream.
    CONNECTING = "connecting"
    # For messages of the server.
    WAITING = "waiting"
    DECODING = "decoding"
    # Files of the window.
    WRITING = "writing"
    # From the last file to the durable commit, with the look at the catalog.
    COMMITTING = "committing"


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a meter at one time.

    Attributes:
        at: the time by the monotonic clock.
        rows: decoded rows of all windows.
        byte_count: bytes of the stream's messages that were decoded.
        windows: landed windows.
        seconds: seconds in each phase.
    """

    at: float
    rows: int
    byte_count: int
    windows: int
    seconds: Mapping[Phase, float]

    def since(self, earlier: Reading) -> Reading:
        """Return the differences to an earlier reading. `at` is the length of the interval."""
        return Reading(
            self.at - earlier.at,
            self.rows - earlier.rows,
            self.byte_count - earlier.byte_count,
            self.windows - earlier.windows,
            {phase: self.seconds[phase] - earlier.seconds[phase] for phase in Phase},
        )


@dataclass
class Meter:
    """The figures of a capture in progress."""

    _rows: int = 0
    _bytes: int = 0
    _windows: int = 0
    _phase: Phase = Phase.IDLE
    _since: float = field(default_factory=time.monotonic)
    _seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, phase: Phase) -> None:
        """Begin a phase, which ends the phase in progress."""
        with self._lock:
            now = time.monotonic()
            self._seconds[self._phase] += now - self._since
            self._phase, self._since = phase, now

    def add(self, rows: int = 0, byte_count: int = 0, windows: int = 0) -> None:
        """Count what was decoded and landed."""
        with self._lock:
            self._rows += rows
            self._bytes += byte_count
            self._windows += windows

    def read(self) -> Reading:
        """Return the figures until now, with the part of the phase in progress."""
        with self._lock:
            now = time.monotonic()
            seconds = dict(self._seconds)
            seconds[self._phase] += now - self._since
            return Reading(now, self._rows, self._bytes, self._windows, seconds)
