"""SIGINT for the processes that tests start.

A shell starts a job in the background with SIGINT ignored, and child processes inherit this. Tests
that interrupt a command would then wait in vain.
"""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Restore Python's handler of SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
