"""SIGINT for the processes that tests start.

A shell starts a background job with SIGINT ignored, and child processes inherit this. A test that
interrupts a command would then wait until its time limit.
"""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Restore Python's handler of SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
