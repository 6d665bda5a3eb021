"""Interrupts that arrive where Python ignores errors.

Dagster's handler of a signal raises an error. Python ignores each error of a finaliser and of a
weak reference's callback (`sys.unraisablehook`), so a signal that arrives there would be lost, and
the run would continue.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dagster._core.errors import DagsterExecutionInterruptedError

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_INTERRUPTS = (KeyboardInterrupt, DagsterExecutionInterruptedError)
# The finaliser has ended by then.
_REPEAT_SECONDS = 0.05


class _RepeatingHook:
    """Hook for ignored errors that sends a signal again whose error was ignored."""

    def __init__(self, before: Callable[[UnraisableHookArgs], Any]) -> None:
        self._before = before

    def __call__(self, ignored: UnraisableHookArgs) -> None:
        if not issubclass(ignored.exc_type, _INTERRUPTS):
            self._before(ignored)
            return
        timer = threading.Timer(_REPEAT_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()


def repeat_lost_interrupts() -> None:
    """Send signals again that arrive where Python ignores errors. Repeated calls change nothing."""
    if not isinstance(sys.unraisablehook, _RepeatingHook):
        sys.unraisablehook = _RepeatingHook(sys.unraisablehook)
