"""The decision which window to capture next, from plain values.

The rules, in order:

1. There is one capture at a time.
2. An open window, which is not landed, comes before a new window. A missing range before the open
   window comes first. An open window that can never be landed is discarded.
3. A new window starts at the end of the last window. The window is opened when enough bytes wait,
   or when the last landing is old enough.

A lag above zero is not sufficient to open a window: if Dagster's storage is in the source cluster,
each run writes WAL, and would cause the next run.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.settings.policies import WindowPolicy


@dataclass(frozen=True)
class CaptureProgress:
    """The progress of a capture.

    Attributes:
        captured_through: end of the newest landed window, or the start of the epoch.
        flush_lsn: end of the server's durable WAL.
        open_windows: windows with a partition key that are not landed, oldest first.
        attempts: number of runs of the oldest open window.
        seconds_since_attempt: time since the end of the last of these runs; None without a run.
        seconds_since_landing: time since the last landing; None without a landing.
        is_capturing: a capture is queued or running.
    """

    epoch: int
    captured_through: Lsn
    flush_lsn: Lsn
    open_windows: tuple[LsnWindow, ...] = ()
    attempts: int = 0
    seconds_since_attempt: float | None = None
    seconds_since_landing: float | None = None
    is_capturing: bool = False


@dataclass(frozen=True)
class Capture:
    """Capture this window now.

    Attributes:
        attempt: number of earlier runs of the window.
        is_new: the partition key has to be added.
    """

    window: LsnWindow
    attempt: int = 0
    is_new: bool = False


@dataclass(frozen=True)
class Wait:
    """Capture nothing now."""

    reason: str


@dataclass(frozen=True)
class Discard:
    """Discard an open window that overlaps a landed window.

    If the daemon and `pgcdc sync` open a window at the same time, one of the windows remains.
    """

    window: LsnWindow


def plan_window(
    progress: CaptureProgress, policy: WindowPolicy, barrier: Lsn | None = None
) -> Capture | Wait | Discard:
    """Decide what to capture next.

    Args:
        barrier: the barrier of a one-shot run. All WAL before the barrier is captured without a
            wait for bytes or age. The last window ends at the barrier.
    """
    if progress.is_capturing:
        return Wait("a capture is running")
    if progress.open_windows:
        return _plan_open_window(progress, policy)
    waiting_bytes = progress.flush_lsn - progress.captured_through
    if waiting_bytes <= 0:
        return Wait(f"captured through {progress.captured_through}, the end of the WAL")
    if barrier is not None:
        if progress.captured_through >= barrier:
            return Wait(f"captured through {progress.captured_through}, past the barrier {barrier}")
    elif waiting_bytes < policy.min_bytes and not _is_old_enough(progress, policy):
        return Wait(
            f"{waiting_bytes} bytes wait: a window opens at {policy.min_bytes} bytes or "
            f"{policy.max_age_seconds:g} s after the last one"
        )
    end = min(progress.flush_lsn, progress.captured_through + policy.max_bytes)
    if barrier is not None:
        end = min(end, barrier)
    return Capture(LsnWindow.of(progress.epoch, progress.captured_through, end), is_new=True)


def may_wait_for_changes(
    plan: Capture | Wait | Discard, progress: CaptureProgress, policy: WindowPolicy
) -> bool:
    """Return whether a planned window may wait for the first change after the last window.

    A window without changes only lets the server remove WAL. A running capture, whose stream shows
    that no change has arrived, delays such a window until it has the maximum size or age.
    """
    age = progress.seconds_since_landing
    return (
        isinstance(plan, Capture)
        and plan.is_new
        and plan.window.size_bytes < policy.max_bytes
        and age is not None
        and age < policy.max_empty_seconds
    )


def _plan_open_window(progress: CaptureProgress, policy: WindowPolicy) -> Capture | Wait | Discard:
    window = progress.open_windows[0]
    if window.start > progress.captured_through:
        # A partition key was deleted, or typed in the UI: the missing range before this window is
        # captured first.
        end = min(window.start, progress.captured_through + policy.max_bytes)
        missing = LsnWindow.of(progress.epoch, progress.captured_through, end)
        return Capture(missing, is_new=True)
    if window.start < progress.captured_through:
        return Discard(window)
    pause = policy.backoff(progress.attempts)
    since = progress.seconds_since_attempt
    if since is not None and since < pause:
        return Wait(
            f"window {window.key} failed {progress.attempts} times: next attempt in "
            f"{pause - since:.0f} s"
        )
    return Capture(window, attempt=progress.attempts)


def _is_old_enough(progress: CaptureProgress, policy: WindowPolicy) -> bool:
    age = progress.seconds_since_landing
    return age is None or age >= policy.max_age_seconds
