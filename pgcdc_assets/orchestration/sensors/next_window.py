"""Which window to capture next: decided from plain values, without a clock or a connection.

The rules, in order: one capture at a time; a window that was opened and is not landed comes before
any new one, or is given up if it never can be; a hole before it is filled first; a new window
starts exactly where the last one ended, and is opened when enough bytes wait or the last landing is
old enough. Lag above zero alone opens nothing: with Dagster's own storage in the source cluster,
each run writes WAL, and the next run would be its consequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.policies import WindowPolicy


@dataclass(frozen=True)
class CaptureProgress:
    """How far a capture is.

    Attributes:
        captured_through: where the raw zone ends: the newest window's end, or the epoch's start.
        flush_lsn: where the server's durable WAL ends.
        open_windows: windows that have a partition key and are not landed, oldest first.
        attempts: runs that the oldest open window has had.
        seconds_since_attempt: time since the last of them ended; None when there was none.
        seconds_since_landing: time since a window was landed; None when none was.
        is_capturing: a capture is queued or under way.
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
        attempt: runs the window has had before.
        is_new: its partition key has to be added.
    """

    window: LsnWindow
    attempt: int = 0
    is_new: bool = False


@dataclass(frozen=True)
class Wait:
    """Do nothing for now."""

    reason: str


@dataclass(frozen=True)
class Discard:
    """Discard an open window that cannot be landed, because another window has a part of it.

    Two openers at one moment, such as the daemon and `pgcdc sync`, leave one behind.
    """

    window: LsnWindow


def plan_window(
    progress: CaptureProgress, policy: WindowPolicy, barrier: Lsn | None = None
) -> Capture | Wait | Discard:
    """Decide what to capture next.

    Args:
        barrier: of a one-shot run: everything before it is captured without waiting for bytes or
            age, the last window ends there, and nothing is opened once it is reached.
    """
    if progress.is_capturing:
        return Wait("a capture is under way")
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


def _plan_open_window(progress: CaptureProgress, policy: WindowPolicy) -> Capture | Wait | Discard:
    window = progress.open_windows[0]
    if window.start > progress.captured_through:
        # A partition key was deleted: the missing range before this window is captured first.
        missing = LsnWindow.of(progress.epoch, progress.captured_through, window.start)
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
