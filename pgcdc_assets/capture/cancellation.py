"""Calls that end soon at an interrupt, at a cancellation and at a time limit.

Python handles a signal between two instructions of the main thread. It cannot end a system call or
a call into a library, such as a query, or a write to a file server that does not answer. Such work
therefore runs in a thread of its own, and the caller waits for the thread. If the wait ends first,
the thread is abandoned: the work checks `Work.check` before each irreversible step, and releases
its connections itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from pgcdc_assets.errors import CaptureCancelled

_Result = TypeVar("_Result")

_POLL_SECONDS = 0.1
# Together with the poll, an abandoned call returns to its caller well within two seconds.
_GRACE_SECONDS = 1.0


class CancellationToken:
    """The request to end a capture. Any thread may call the methods.

    Give the token to `CaptureSession` or `capture_window`. After `cancel`, the call in progress
    raises CaptureCancelled within two seconds, and so does every later call. A window in progress
    is landed completely or not at all.
    """

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Request the end. A further call has no effect."""
        self._event.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether the end was requested."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise CaptureCancelled if the end was requested."""
        if self._event.is_set():
            raise CaptureCancelled


class Overdue(Exception):
    """The call did not return within its time limit."""


class Work:
    """The calls of one owner, such as a session, each in a thread of its own.

    Args:
        token: the request of the embedder to end.
        wake: function that ends a wait of the abandoned thread, such as the wait for a batch.
        release: function that is called once, after the end of an abandoned call.
        beat: function that is called in the caller's thread ten times a second during a call, and
            once after the call.

    Attributes:
        is_left: a call was abandoned. No further call is possible.
    """

    def __init__(
        self,
        token: CancellationToken,
        wake: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._token = token
        self._wake = wake
        self._release = release
        self._beat = beat
        self._left = threading.Event()
        self._unreleased = threading.Lock()

    @property
    def is_left(self) -> bool:
        return self._left.is_set()

    def check(self) -> None:
        """Raise CaptureCancelled in an abandoned thread."""
        if self._left.is_set():
            raise CaptureCancelled

    def pause(self, seconds: float) -> None:
        """Wait in the thread of a call; raise CaptureCancelled once the call is abandoned."""
        if self._left.wait(seconds):
            raise CaptureCancelled

    def call(self, function: Callable[[], _Result], seconds: float | None = None) -> _Result:
        """Run `function` in a thread, and return its result or raise its error.

        Args:
            function: the work.
            seconds: the time limit; None: no limit.

        Raises:
            CaptureCancelled: the token was cancelled.
            Overdue: the call did not return within the limit.
        """
        self._token.check()
        self.check()
        deadline = None if seconds is None else time.monotonic() + seconds
        done = threading.Event()
        results: list[_Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)
            finally:
                try:
                    if self._left.is_set():
                        self._release_once()
                finally:
                    done.set()

        # A daemon thread: the process can exit without the thread.
        thread = threading.Thread(target=run, name="capture", daemon=True)
        try:
            thread.start()
            while not done.wait(_POLL_SECONDS):
                self._token.check()
                self._beat()
                if deadline is not None and time.monotonic() > deadline:
                    raise Overdue
        except BaseException:
            self._left.set()
            self._wake()
            if done.wait(_GRACE_SECONDS):
                self._release_once()
            raise
        self._beat()
        if errors:
            raise errors[0]
        return results[0]

    def _release_once(self) -> None:
        if self._unreleased.acquire(blocking=False):
            self._release()
