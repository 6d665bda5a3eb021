"""Cases of the window planner, without clock, connection and Dagster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.orchestration.sensors.next_window import (
    Capture,
    CaptureProgress,
    Discard,
    Wait,
    may_wait_for_changes,
    plan_window,
)
from pgcdc_assets.settings.policies import WindowPolicy

POLICY = WindowPolicy(
    max_bytes=1000, min_bytes=100, max_age_seconds=10, retry_seconds=5, max_retry_seconds=60
)


def window(start: int, end: int) -> LsnWindow:
    return LsnWindow.of(1, start, end)


def progress(through: int, flush: int, **facts: object) -> CaptureProgress:
    return CaptureProgress(1, Lsn(through), Lsn(flush), **facts)  # type: ignore[arg-type]


NEW_WINDOWS = {
    "enough bytes wait": (progress(500, 600, seconds_since_landing=0.0), window(500, 600)),
    "few bytes wait, and the last landing is old enough": (
        progress(500, 501, seconds_since_landing=10.0),
        window(500, 501),
    ),
    "nothing was ever landed": (progress(500, 501), window(500, 501)),
    "more waits than a window holds": (progress(500, 9000), window(500, 1500)),
}


@pytest.mark.parametrize(("given", "expected"), NEW_WINDOWS.values(), ids=NEW_WINDOWS.keys())
def test_a_window_starts_at_the_end_of_the_previous_window(
    given: CaptureProgress, expected: LsnWindow
) -> None:
    assert plan_window(given, POLICY) == Capture(expected, is_new=True)


@pytest.mark.parametrize(
    ("given", "may_wait"),
    [
        (progress(500, 700, seconds_since_landing=29.0), True),
        (progress(500, 700, seconds_since_landing=30.0), False),
        # The window has its maximum size.
        (progress(500, 1500, seconds_since_landing=29.0), False),
        # An open window has a partition key, and nothing was landed.
        (progress(500, 600, open_windows=(window(500, 600),)), False),
        (progress(500, 501), False),
        (progress(500, 500, seconds_since_landing=29.0), False),
    ],
)
def test_a_new_window_may_wait_for_a_change_up_to_its_size_and_age(
    given: CaptureProgress, may_wait: bool
) -> None:
    policy = replace(POLICY, max_empty_seconds=30)
    assert may_wait_for_changes(plan_window(given, policy), given, policy) is may_wait
    at_once = replace(POLICY, max_empty_seconds=0)
    assert not may_wait_for_changes(plan_window(given, at_once), given, at_once)


WAITING = {
    "few bytes wait, and the last landing is recent": (
        progress(500, 599, seconds_since_landing=9.9),
        "99 bytes wait",
    ),
    "nothing waits": (progress(500, 500), "the end of the WAL"),
    "the server's WAL ends below what is landed": (progress(500, 400), "the end of the WAL"),
    "a capture is running": (progress(500, 9000, is_capturing=True), "is running"),
    "a failed window pauses": (
        progress(
            500, 9000, open_windows=(window(500, 600),), attempts=2, seconds_since_attempt=9.0
        ),
        "failed 2 times: next attempt in 1 s",
    ),
}


@pytest.mark.parametrize(("given", "reason"), WAITING.values(), ids=WAITING.keys())
def test_the_planner_waits_and_gives_the_reason(given: CaptureProgress, reason: str) -> None:
    plan = plan_window(given, POLICY)
    assert isinstance(plan, Wait)
    assert reason in plan.reason


def test_an_opened_window_is_retried_before_another_is_opened() -> None:
    open_windows = (window(500, 600), window(600, 700))
    given = progress(500, 9000, open_windows=open_windows, attempts=3, seconds_since_attempt=20.0)
    assert plan_window(given, POLICY) == Capture(window(500, 600), attempt=3)


def test_a_window_that_overlaps_a_landed_window_is_discarded() -> None:
    """Two concurrent openers: [400, 500) was landed, so [400, 600) can never be landed."""
    given = progress(500, 9000, open_windows=(window(400, 600),))
    assert plan_window(given, POLICY) == Discard(window(400, 600))


def test_a_window_whose_key_was_deleted_is_captured_before_the_next() -> None:
    given = progress(500, 9000, open_windows=(window(700, 800),))
    assert plan_window(given, POLICY) == Capture(window(500, 700), is_new=True)
    # A key that a person has typed may be far away.
    given = progress(500, 9000, open_windows=(window(8000, 8100),))
    assert plan_window(given, POLICY) == Capture(window(500, 1500), is_new=True)


def test_the_pause_after_failures_doubles_up_to_its_limit() -> None:
    assert [POLICY.backoff(n) for n in (0, 1, 2, 3, 4, 5, 100)] == [0, 5, 10, 20, 40, 60, 60]


def test_a_one_shot_run_opens_windows_up_to_its_barrier_without_waiting() -> None:
    """A16: continuous writers do not extend the run."""
    recent = progress(500, 510, seconds_since_landing=0.0)
    assert plan_window(recent, POLICY, Lsn(505)) == Capture(window(500, 505), is_new=True)
    assert plan_window(recent, POLICY, Lsn(600)) == Capture(window(500, 510), is_new=True)
    assert isinstance(plan_window(progress(510, 99_000), POLICY, Lsn(505)), Wait)
