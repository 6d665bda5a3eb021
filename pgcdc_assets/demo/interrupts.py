"""SIGINT and SIGTERM of a demonstration, which stops its servers before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_at_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at the first SIGINT or SIGTERM.

    Later signals are ignored, because they would interrupt the end of the child processes. A shell
    starts a background job with SIGINT ignored; this process handles it. After the block, the
    signals have their handlers of before.
    """
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the block. Python handles signals in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: set[int] = set()
    before = {
        number: signal.signal(number, lambda number, _: received.add(number)) for number in _SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
