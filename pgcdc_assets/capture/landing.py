"""The landing of a window: from the stream's batches to one durable commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from pgcdc_assets import failpoints
from pgcdc_assets.activity import Activity, activity
from pgcdc_assets.capture.cancellation import Work
from pgcdc_assets.capture.captured_slot import CapturedSlot
from pgcdc_assets.capture.malformed_messages import keep_malformed
from pgcdc_assets.capture.meter import Meter, Phase
from pgcdc_assets.capture.schema_watch import SchemaWatch
from pgcdc_assets.capture.source_stream import SourceStream
from pgcdc_assets.errors import ProtocolError, TransientError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.slots.lease import Lease
from pgcdc_assets.postgres.wal.timelines import server_timeline
from pgcdc_assets.protocol.frames import FramingError, MessageBatch
from pgcdc_assets.protocol.parked_rows import ParkedRows
from pgcdc_assets.raw.app_ids import relations_app_id, timeline_start_app_id
from pgcdc_assets.raw.relations.schema_events import STREAM, SchemaChange, SchemaEvent
from pgcdc_assets.raw.windows.summary import WindowSummary

# A look at the catalog of a thousand tables takes less than a second.
_LOOK_SECONDS = 2.0


class UndecodableRows(Exception):
    """Rows of the stream cannot be decoded. Nothing was landed."""


@dataclass
class Landing:
    """The landing of one window in one commit.

    Attributes:
        captured: the slot and the raw zone.
        window: the window.
        source: the started stream, at the window's start.
        lease: the held lease of the slot.
        schema: the schema events.
        work: raises an error after the landing was abandoned: the landing must not commit.
        meter: receives the figures of the landing.
        end: time by the monotonic clock at which the capture's limit ends; None: no limit.
        parks: land rows that cannot be decoded as parked rows; otherwise raise UndecodableRows.
        facts: application transactions of the commit, beside the timeline.
        bytes_decoded: bytes of the messages that were decoded so far.
    """

    captured: CapturedSlot
    window: LsnWindow
    source: SourceStream
    lease: Lease
    schema: SchemaWatch
    work: Work
    meter: Meter
    end: float | None
    parks: bool
    facts: Callable[[LsnWindow], Mapping[str, int]]
    bytes_decoded: int = 0

    def run(self) -> WindowSummary:
        """Land the window.

        An abandoned landing does not start a commit: it asks `work` directly before the commit. A
        commit in progress may still succeed. The next run then finds a landed window, or its own
        commit is refused.

        Raises:
            UndecodableRows: the stream has rows that cannot be decoded, and `parks` is false.
        """
        self.source.begin_window(self.window, self.schema)
        try:
            with activity(f"capture of window {self.window.key}", "changes") as progress:
                report = self.captured.zone.changes.land(
                    self.window,
                    self._rows(progress),
                    self._before_commit,
                    self._timeline,
                    self._facts(self.facts(self.window)),
                )
        except BaseException as error:
            self.captured.zone.relations.discard()
            if isinstance(error, FramingError):
                batch = MessageBatch.of([error.received])
                raise self._keep(error, batch) from error
            raise
        if not self.source.decoder.is_finished:
            raise TransientError(
                reason=f"Another capture has landed window {self.window.key}, and the stream is "
                "not at its end; run it again."
            )
        return report.summary

    def finish(self) -> None:
        """End the window in the stream, after its commit. No time limit applies."""
        failpoints.reach(failpoints.AFTER_DELTA_COMMIT)
        self.source.end_window(self.window)

    def _rows(self, progress: Activity) -> Iterator[pa.RecordBatch]:
        decoder, meter = self.source.decoder, self.meter
        meter.enter(Phase.WAITING)
        for batch in self.source.messages():
            # Batches may decode to nothing.
            self.work.check()
            meter.enter(Phase.DECODING)
            for decoded in self._decoded(batch):
                self.work.check()
                if decoder.parked and not self.parks:
                    raise UndecodableRows
                progress.count += decoded.num_rows
                meter.add(rows=decoded.num_rows)
                meter.enter(Phase.WRITING)
                yield decoded
                meter.enter(Phase.DECODING)
            later = 0 if decoder.rest is None else decoder.rest.size_bytes
            byte_count = batch.size_bytes - later
            self.bytes_decoded += byte_count
            meter.add(byte_count=byte_count)
            failpoints.reach(failpoints.MID_STREAM)
            if decoder.is_finished:
                meter.enter(Phase.WRITING)
                return
            meter.enter(Phase.WAITING)
        raise TransientError(
            reason=f"The stream ended before the end of window {self.window.key}. "
            "No change is lost; run it again."
        )

    def _decoded(self, batch: MessageBatch) -> Iterator[pa.RecordBatch]:
        try:
            yield from self.source.decoder.decode(batch)
        except ProtocolError as error:
            raise self._keep(error, batch) from error

    def _keep(self, error: ProtocolError, batch: MessageBatch) -> ProtocolError:
        slot, folder = self.captured.slot, self.captured.limits.malformed_folder
        return keep_malformed(error, batch, self.window, slot, folder)

    def _timeline(self) -> int:
        """Return the timeline of the window's end.

        A standby may follow to another timeline during the stream.
        """
        stream = self.source.stream
        if not stream.is_standby:
            return stream.timeline
        with server_timeline(self.captured.settings) as server:
            return server.number

    def _facts(self, known: Mapping[str, int]) -> Callable[[], Mapping[str, int]]:
        """Return a function for the facts of the commit, which the decoder knows at its end."""
        zone, window = self.captured.zone, self.window

        def read() -> Mapping[str, int]:
            found, stream = dict(known), self.source.stream
            # A standby may follow to another timeline.
            if stream.timeline_start is not None and not stream.is_standby:
                name = timeline_start_app_id(zone.name, window.epoch, stream.timeline)
                found[name] = stream.timeline_start
            versions = zone.relations.count(window.epoch)
            if versions is not None:
                found[relations_app_id(zone.name, window.epoch)] = versions
            through = self.source.decoder.messages.landed_through
            if through > window.end:
                found[zone.changes.messages_app_id(window.epoch)] = through
            return found

        return read

    def _has_time(self) -> bool:
        """Return whether the limit leaves time for a look at the catalog."""
        return self.end is None or time.monotonic() + _LOOK_SECONDS < self.end

    def _before_commit(self) -> None:
        self.meter.enter(Phase.COMMITTING)
        unfinished = self.source.decoder.unfinished()
        if not self.parks and any(each.transaction.has_parked for each in unfinished):
            # The server does not send the rows of a stored transaction again.
            raise UndecodableRows
        failpoints.reach(failpoints.BEFORE_DELTA_COMMIT)
        # The events come first: a stored relation version counts as known.
        self.schema.record(self.lease.conn if self._has_time() else None)
        self.captured.zone.relations.flush()
        self.captured.zone.record_events(
            self.window.epoch, parked_events(self.window.epoch, self.source.decoder.parked)
        )
        failpoints.reach(failpoints.AFTER_RELATIONS_COMMIT)
        self.source.archive.store(self.source.decoder, self.window)
        failpoints.reach(failpoints.AFTER_PREPARED_COMMIT)
        self.lease.verify()
        self.work.check()


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
