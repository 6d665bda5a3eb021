"""Signals that arrive while Python runs a callback or a finaliser."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator

import pytest
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster._utils.interrupts import raise_interrupts_as

from pgcdc_assets.orchestration.runs.lost_interrupts import repeat_lost_interrupts


class _Held:
    """An object that can be referred to weakly."""


def _interrupt(_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    # Python handles the signal in here.
    for _ in range(1_000):
        pass


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[type[BaseException]]]:
    """Return the ignored errors that reach the hook of before."""
    found: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: found.append(ignored.exc_type))
    yield found


def test_a_signal_during_a_callback_still_interrupts(errors: list[type[BaseException]]) -> None:
    repeat_lost_interrupts()
    held = _Held()
    reference = weakref.ref(held, _interrupt)
    with (
        raise_interrupts_as(DagsterExecutionInterruptedError),
        pytest.raises(DagsterExecutionInterruptedError),
    ):
        del held
        assert reference() is None
        time.sleep(10)
        pytest.fail("The signal was lost.")
    assert errors == []


def test_other_ignored_errors_are_shown_once(errors: list[type[BaseException]]) -> None:
    repeat_lost_interrupts()
    repeat_lost_interrupts()

    def fail(_: object) -> None:
        raise ValueError

    held = _Held()
    reference = weakref.ref(held, fail)
    del held
    assert reference() is None
    assert errors == [ValueError]
