"""Progress of a command: one line that is updated on a terminal, separate lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.text import Text

from pgcdc_assets.activity import Activity, watched_by
from pgcdc_assets.cli.library_log import terminal
from pgcdc_assets.cli.output import discard


class _Console(Console):
    """A console whose reader may go away, or whose disk may be full: the work continues.

    Rich would end the process, inside of the work that announces an activity.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, highlight=False, soft_wrap=True)
        self._stream = stream

    def on_broken_pipe(self) -> None:
        """Send further output nowhere."""
        self.quiet = True
        discard(self._stream)


class ProgressDisplay:
    """Prints the running activities, and each activity at its end.

    Args:
        stream: the output.
        every_seconds: interval of the lines about running activities if there is no terminal.
    """

    def __init__(self, stream: TextIO, every_seconds: float = 10.0) -> None:
        self._console = _Console(stream)
        self._every_seconds = every_seconds
        self._present: list[Activity] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._said_at = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line with the time."""
        with self._lock:
            self._said_at = time.monotonic()
        try:
            self._console.print(Text(f"{time.strftime('%H:%M:%S')} {line}"))
        except OSError:
            self._console.on_broken_pipe()

    def began(self, activity: Activity) -> None:
        """Print an activity until its end."""
        with self._lock:
            self._present.append(activity)

    def ended(self, activity: Activity) -> None:
        """Print the figures of an activity."""
        with self._lock:
            self._present.remove(activity)
        self.say(f"  {activity}" if activity.is_done else f"  {activity} (failed)")

    def noticed(self, text: str) -> None:
        """Print a problem that ends no activity."""
        self.say(f"  {text}")

    @contextmanager
    def shown(self) -> Iterator[ProgressDisplay]:
        """Print the activities of this process inside the block."""
        target = self._move if self._console.is_terminal else self._tell
        thread = threading.Thread(target=target, name="progress", daemon=True)
        with watched_by(self):
            thread.start()
            try:
                yield self
            finally:
                self._closed.set()
                thread.join()

    def _move(self) -> None:
        """Update the last line of the terminal."""
        with self._console.status("") as status:
            while not self._closed.wait(0.2):
                line = self._line()
                status.update(Text(line[: self._console.width - 4]))

    def _tell(self) -> None:
        while not self._closed.wait(min(1.0, self._every_seconds)):
            with self._lock:
                is_quiet = time.monotonic() - self._said_at >= self._every_seconds
            if is_quiet:
                self.say(f"  ... {self._line()}")

    def _line(self) -> str:
        with self._lock:
            return "; ".join(str(each) for each in self._present) or "working"


@contextmanager
def progress() -> Iterator[ProgressDisplay]:
    """Print progress inside the block, on another stream than the command's result."""
    with ProgressDisplay(terminal()).shown() as display:
        yield display
