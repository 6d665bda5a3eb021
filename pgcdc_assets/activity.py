"""What this process works at, with figures, for a program that shows progress.

The rooms that do the work announce it here and know nothing of terminals. Without a watcher, as
under Dagster's daemon, an announcement costs an object.
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
    """One piece of work.

    Attributes:
        name: such as `snapshot of shop.orders`.
        unit: what is counted; empty where nothing is.
    """

    name: str
    unit: str = ""
    count: int = 0
    is_done: bool = False
    _began: float = field(default_factory=time.monotonic)
    _seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """How long the work has taken."""
        return self._seconds if self.is_done else time.monotonic() - self._began

    def end(self) -> None:
        """Stop the clock."""
        self._seconds, self.is_done = time.monotonic() - self._began, True

    def __str__(self) -> str:
        figures = f"{self.count:,} {self.unit}, " if self.unit else ""
        return f"{self.name}: {figures}{self.seconds:.1f} s"


class Watcher(Protocol):
    """Who shows progress; called from any thread."""

    def began(self, activity: Activity) -> None:
        """Show that work begins."""

    def ended(self, activity: Activity) -> None:
        """Show that work has ended, well (`is_done`) or not."""


_watchers: list[Watcher] = []
_lock = threading.Lock()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Report the work of all threads to the watcher inside the block."""
    with _lock:
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)


@contextmanager
def activity(name: str, unit: str = "") -> Iterator[Activity]:
    """Announce the work of the block; the block counts what it has done in `count`."""
    with _lock:
        watchers = list(_watchers)
    work = Activity(name, unit)
    for watcher in watchers:
        watcher.began(work)
    try:
        yield work
        work.end()
    finally:
        for watcher in watchers:
            watcher.ended(work)
