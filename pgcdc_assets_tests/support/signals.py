"""SIGINT and SIGHUP for the processes that tests start.

A shell starts a background job with SIGINT ignored, and `nohup` a command with SIGHUP ignored.
Child processes inherit this. A test that interrupts a command would then wait until its time limit,
or see the command continue.
"""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Restore the handlers of a process in the foreground."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
