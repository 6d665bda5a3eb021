"""The pauses between the attempts to resume a lost connection."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.limits import CaptureLimits, Outage
from pgcdc_assets.errors import ConnectionLost

ERROR = ConnectionLost(server="s", doing="d", reason="r")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose only element is the time."""
    now = [100.0]
    monkeypatch.setattr("pgcdc_assets.capture.limits.monotonic", lambda: now[0])
    return now


def test_pauses_double_and_end_at_the_limit(clock: list[float]) -> None:
    outage = Outage(CaptureLimits(resume_seconds=1000, resume_pause_seconds=2))
    pauses = []
    for _ in range(8):
        pauses.append(outage.next_pause(ERROR))
        clock[0] += pauses[-1]
    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    for pause, most in zip(pauses, longest, strict=True):
        assert most / 2 <= pause <= most
    assert len({pause / most for pause, most in zip(pauses, longest, strict=True)}) > 1


def test_only_the_time_without_a_connection_counts(clock: list[float]) -> None:
    outage = Outage(CaptureLimits(resume_seconds=10))
    for _ in range(3):
        outage.next_pause(ERROR)
        clock[0] += 3
        outage.end()
        clock[0] += 1000
    outage.next_pause(ERROR)
    clock[0] += 1
    with pytest.raises(ConnectionLost):
        outage.next_pause(ERROR)


def test_without_a_limit_the_loss_is_an_error_at_once() -> None:
    with pytest.raises(ConnectionLost):
        Outage(CaptureLimits()).next_pause(ERROR)
