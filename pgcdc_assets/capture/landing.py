"""The landing of a window: from the stream's batches to one durable commit.

Nothing in Python ends a thread that waits in a system call, as for a file server that does not
answer. A landing with a limit of time runs in a thread of its own, so that the capture can go on
without it and say so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from pgcdc_assets import failpoints
from pgcdc_assets.activity import Activity, activity
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.lease import Lease
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.timelines import server_timeline
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.raw.window_summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Landing:
    """Makes the window's rows visible in one commit."""

    zone: RawZone
    window: LsnWindow
    stream: ReplicationStream
    decoder: Decoder
    lease: Lease
    settings: ConnectionSettings
    is_left: threading.Event = field(default_factory=threading.Event, repr=False)

    def run_within(self, seconds: float | None) -> WindowSummary:
        """Land the window, or leave the landing behind when it hangs.

        A landing that is left behind cannot commit: the lease, which it verifies right before, ends
        with the capture. A commit already under way may still take effect, and the next run finds
        the window landed, or its own commit refused.

        Args:
            seconds: None for no limit.

        Raises:
            TransientError: it did not return in time.
        """
        if seconds is None:
            return self._run()
        try:
            return _call_within(seconds, self._run, self.is_left)
        except _Overdue:
            raise TransientError(
                reason="The capture took longer than its limit, and its landing does not return: "
                f"see whether the server and the lake {self.zone.uri} answer. Nothing un-landed "
                "was confirmed; run it again."
            ) from None

    def _run(self) -> WindowSummary:
        try:
            with activity(f"capture of window {self.window.key}", "changes") as work:
                return self.zone.changes.land(
                    self.window, self._rows(work), self._before_commit, self._timeline
                ).summary
        except BaseException:
            self.zone.relations.discard()
            raise

    def _rows(self, work: Activity) -> Iterator[pa.RecordBatch]:
        for batch in self.stream.batches():
            decoded = self.decoder.decode(batch)
            if self.decoder.is_finished:
                self.stream.pause()
            if decoded is not None:
                work.count += decoded.num_rows
                yield decoded
            failpoints.reach(failpoints.MID_STREAM)
            if self.decoder.is_finished:
                return

    def _timeline(self) -> int:
        """Return the timeline of the window's end.

        A standby goes over to another one while it streams, without a gap.
        """
        if not self.stream.is_standby:
            return self.stream.timeline
        with server_timeline(self.settings) as server:
            return server.number

    def _before_commit(self) -> None:
        failpoints.reach(failpoints.BEFORE_DELTA_COMMIT)
        self.zone.relations.flush()
        failpoints.reach(failpoints.AFTER_RELATIONS_COMMIT)
        self.lease.verify()
        if self.is_left.is_set():
            raise TransientError(reason=f"Window {self.window.key} is not landed: time was up.")


class _Overdue(Exception):
    """The call had not returned when its time was up."""


def _call_within(seconds: float, call: Callable[[], _Result], is_left: threading.Event) -> _Result:
    """Return what a call returns, or raise what it raises.

    Args:
        is_left: set when nobody waits for the call any more; the call looks at it before it does
            what cannot be undone.

    Raises:
        _Overdue: the call has not returned within so many seconds; it is left running.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    # A daemon: the process need not wait for it either.
    thread = threading.Thread(target=run, name="landing", daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    except BaseException:
        is_left.set()
        raise
    if thread.is_alive():
        is_left.set()
        raise _Overdue
    if errors:
        raise errors[0]
    return results[0]
