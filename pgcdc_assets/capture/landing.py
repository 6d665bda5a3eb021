"""The landing of a window: from the stream's batches to one durable commit.

Python cannot end a thread that waits in a system call, such as a write to a file server that does
not answer. A landing with a time limit therefore runs in a thread of its own: at the limit the
capture abandons the thread and raises an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import pyarrow as pa

from pgcdc_assets import failpoints
from pgcdc_assets.activity import Activity, activity
from pgcdc_assets.capture.schema_watch import SchemaWatch
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.lease import Lease
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.timelines import server_timeline
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.heads import split_by_values
from pgcdc_assets.protocol.parked import ParkedRows
from pgcdc_assets.raw.schema_events import STREAM, SchemaChange, SchemaEvent
from pgcdc_assets.raw.window_summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone

_Result = TypeVar("_Result")

# A look at the catalog of a thousand tables takes less than a second.
_LOOK_SECONDS = 2.0


class UndecodableRows(Exception):
    """Rows of the stream cannot be decoded. Nothing was landed."""


@dataclass(frozen=True)
class Landing:
    """The landing of one window in one commit.

    Attributes:
        zone: the raw zone.
        window: the window.
        stream: the started stream.
        decoder: the window's decoder.
        lease: the held lease of the slot.
        settings: the source database.
        schema: the schema events.
        end: time by the monotonic clock at which the capture's limit ends; None: no limit.
        parks: land rows that cannot be decoded as parked rows; otherwise raise UndecodableRows.
        is_left: set after the landing was abandoned: the landing must not commit.
    """

    zone: RawZone
    window: LsnWindow
    stream: ReplicationStream
    decoder: Decoder
    lease: Lease
    settings: ConnectionSettings
    schema: SchemaWatch
    end: float | None = None
    parks: bool = True
    is_left: threading.Event = field(default_factory=threading.Event, repr=False)

    def run_within(self, seconds: float | None) -> WindowSummary:
        """Land the window, or abandon the landing at a time limit.

        An abandoned landing does not start a commit: it verifies the lease directly before the
        commit, and the lease ends with the capture. A commit in progress may still succeed. The
        next run then finds a landed window, or its own commit is refused.

        Args:
            seconds: the time limit; None: no limit.

        Raises:
            TransientError: the landing did not return within the limit.
            UndecodableRows: the stream has rows that cannot be decoded, and `parks` is false.
        """
        if seconds is None:
            return self._run()
        try:
            return _call_within(seconds, self._run, self.is_left)
        except _Overdue:
            raise TransientError(
                reason="The capture took longer than its limit, and its landing does not return. "
                f"Check that the server and the lake {self.zone.uri} answer. Nothing un-landed "
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
        for batch in chain.from_iterable(map(split_by_values, self.stream.batches())):
            decoded = self.decoder.decode(batch)
            if self.decoder.is_finished:
                self.stream.pause()
            if self.decoder.parked and not self.parks:
                raise UndecodableRows
            if decoded is not None:
                work.count += decoded.num_rows
                yield decoded
            failpoints.reach(failpoints.MID_STREAM)
            if self.decoder.is_finished:
                return

    def _timeline(self) -> int:
        """Return the timeline of the window's end.

        A standby may follow to another timeline during the stream.
        """
        if not self.stream.is_standby:
            return self.stream.timeline
        with server_timeline(self.settings) as server:
            return server.number

    def _has_time(self) -> bool:
        """Return whether the limit leaves time for a look at the catalog."""
        return self.end is None or time.monotonic() + _LOOK_SECONDS < self.end

    def _before_commit(self) -> None:
        failpoints.reach(failpoints.BEFORE_DELTA_COMMIT)
        # The events come first: a stored relation version counts as known.
        self.schema.record(self.lease.conn if self._has_time() else None)
        self.zone.relations.flush()
        self.zone.schema_events.record(parked_events(self.window.epoch, self.decoder.parked))
        failpoints.reach(failpoints.AFTER_RELATIONS_COMMIT)
        self.lease.verify()
        if self.is_left.is_set():
            raise TransientError(
                reason=f"Window {self.window.key} is not landed: the time limit was reached."
            )


def parked_events(epoch: int, parked: Mapping[int, ParkedRows]) -> list[SchemaEvent]:
    """Return the events of parked rows: one per table at the first and at the last parked row.

    The merge stops at the first event. A snapshot above the last event has the current rows.
    """
    return [
        SchemaEvent(
            epoch=epoch,
            lsn=lsn,
            table=rows.table,
            relation_id=relation_id,
            change=SchemaChange.ROW_PARKED,
            columns=(),
            detail=f"{rows.row_count} rows cannot be decoded ({rows.reason})",
            needs_snapshot=True,
            found_by=STREAM,
        )
        for relation_id, rows in parked.items()
        for lsn in sorted({rows.first_lsn, rows.last_lsn})
    ]


class _Overdue(Exception):
    """The call did not return within its time limit."""


def _call_within(seconds: float, call: Callable[[], _Result], is_left: threading.Event) -> _Result:
    """Run `call` in a thread, and return its result or raise its error.

    Args:
        seconds: time limit.
        call: the function to run.
        is_left: set at the time limit; `call` checks this event before an irreversible step.

    Raises:
        _Overdue: `call` did not return within the limit. The thread continues to run.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    # A daemon thread: the process can exit without the thread.
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
