"""Activities of this process with counts, for programs that show progress.

Modules announce their activities here, and so do not depend on terminals. Without a watcher, as in
Dagster's daemon, an announcement costs one object.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(eq=False)
class Activity:
    """One activity.

    Attributes:
        name: description such as `snapshot of shop.orders`.
        unit: unit of `count` in the plural; empty without a count.
        count: number of units done.
        is_done: the activity has ended without an error.
    """

    name: str
    unit: str = ""
    count: int = 0
    is_done: bool = False
    _began: float = field(default_factory=time.monotonic)
    _seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start, or the duration of an ended activity."""
        return self._seconds if self.is_done else time.monotonic() - self._began

    def end(self) -> None:
        """Stop the clock."""
        self._seconds, self.is_done = time.monotonic() - self._began, True

    def __str__(self) -> str:
        unit = self.unit.removesuffix("s") if self.count == 1 else self.unit
        figures = f"{self.count:,} {unit}, " if unit else ""
        return f"{self.name}: {figures}{self.seconds:.1f} s"


class Watcher(Protocol):
    """Receiver of activities. Any thread may call the methods."""

    def began(self, activity: Activity) -> None:
        """Show the start of an activity."""

    def ended(self, activity: Activity) -> None:
        """Show the end of an activity, successful (`is_done`) or not."""

    def noticed(self, text: str) -> None:
        """Show a problem that ends no activity, such as what a server waits for."""


_watchers: list[Watcher] = []
_lock = threading.Lock()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Report the activities of all threads to the watcher inside the block."""
    with _lock:
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)


def notice(text: str) -> None:
    """Announce a problem that ends no activity."""
    for watcher in _present_watchers():
        watcher.noticed(text)


def _present_watchers() -> list[Watcher]:
    with _lock:
        return list(_watchers)


@contextmanager
def activity(name: str, unit: str = "") -> Iterator[Activity]:
    """Announce the activity of the block. The block updates `count`."""
    watchers = _present_watchers()
    work = Activity(name, unit)
    for watcher in watchers:
        watcher.began(work)
    try:
        yield work
        work.end()
    finally:
        for watcher in watchers:
            watcher.ended(work)
