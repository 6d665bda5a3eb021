"""The time limits and sizes of a capture, and the pauses before it resumes a lost connection."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from time import monotonic

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.settings.policies import HeartbeatPolicy, MessagePolicy

_FIRST_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class CaptureLimits:
    """Time limits and sizes of a capture.

    Attributes:
        total_seconds: time limit until a window is landed; None: no limit. A landing that hangs is
            abandoned `stream.end_seconds` after the limit.
        slot_wait_seconds: time to wait before the stale walsender of a dead capture is ended.
        resume_seconds: time without a connection during one window after which a capture no longer
            tries to resume; 0: the loss of a connection is an error at once.
        resume_pause_seconds: the longest pause between two attempts to resume.
        report_seconds: interval of the reports about a capture in progress.
        messages: the logical messages to land; None: all transactional ones.
        malformed_folder: folder for batches that cannot be decoded, which hold values of rows;
            None: batches are not kept.
        stream: time limits and sizes of the stream.
        heartbeat: the heartbeats in the source; None: no heartbeats.
        failover: let standbys keep a copy of the slot.
        adopt_slot: take over a slot that belongs to another lake.
    """

    total_seconds: float | None = None
    slot_wait_seconds: float = 5.0
    resume_seconds: float = 0.0
    resume_pause_seconds: float = 10.0
    report_seconds: float = 60.0
    stream: StreamSettings = field(default_factory=StreamSettings)
    heartbeat: HeartbeatPolicy | None = None
    failover: bool = False
    adopt_slot: bool = False
    malformed_folder: str | None = None
    messages: MessagePolicy | None = None


class Outage:
    """The time without a connection, and the pauses between the attempts to resume.

    A pause doubles at each attempt. Each pause is shortened at random by up to a half, so that
    captures which lost one server do not return at the same moment.
    """

    def __init__(self, limits: CaptureLimits) -> None:
        self._limits = limits
        self._attempts = 0
        self._seconds = 0.0
        self._lost_at: float | None = None

    def next_pause(self, error: PgcdcError) -> float:
        """Return the seconds to wait after a failed attempt; raise the error at the limit."""
        now = monotonic()
        if self._lost_at is not None:
            self._seconds += now - self._lost_at
        self._lost_at = now
        if self._seconds >= self._limits.resume_seconds:
            raise error
        longest = min(_FIRST_PAUSE_SECONDS * 2.0**self._attempts, self._limits.resume_pause_seconds)
        self._attempts = min(self._attempts + 1, 30)
        return longest * random.uniform(0.5, 1.0)

    def end(self) -> None:
        """Count the outage until now: the stream has started again."""
        if self._lost_at is not None:
            self._seconds += monotonic() - self._lost_at
            self._lost_at = None
