"""Output of the demonstration: a line for each step, and progress every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pgcdc_assets.activity import Activity

_BEGIN = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGIN:6.1f} s] {text}", flush=True)


class Lines:
    """Prints each activity in a line at its end.

    Args:
        say: function that prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def began(self, activity: Activity) -> None:
        """Print nothing, because `print_progress` prints the progress."""

    def ended(self, activity: Activity) -> None:
        """Print the figures of an activity."""
        self._say(f"  {activity}")

    def noticed(self, text: str) -> None:
        """Print a problem that ends no activity."""
        self._say(f"  {text}")


@contextmanager
def print_progress(describe: Callable[[], str], every_seconds: float = 5.0) -> Iterator[None]:
    """Print the progress every few seconds while the block runs.

    Args:
        describe: function that returns the progress, called in a separate thread. Its errors do not
            end the block.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every_seconds):
            try:
                news = describe()
            except Exception as error:
                news = f"no news ({type(error).__name__})"
            if not done.is_set():
                say(f"    ... {news}")

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as columns: the first column is left-aligned, the others are right-aligned."""
    cells = [list(header)] + [
        [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(len(row[place]) for row in cells) for place in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
