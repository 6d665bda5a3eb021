"""One replication connection: messages, confirmations, and status packets on a timer.

A reader thread reads messages and puts batches into a short queue. The same thread sends status
packets on a timer. The consumer does not block the timer: decoding and landing may take minutes.
Every status packet confirms the LSN of the last call of `confirm`. The reply to a keepalive
confirms this LSN as well, not the position in the keepalive. The server therefore never receives a
confirmation of data that is not durable.

psycopg2's replication cursor is not used, because the cursor moves the confirmed position by itself
on keepalives, which loses transactions (docs/decisions/0001-stream-over-psycopg-3.md).

Protocol: START_REPLICATION, XLogData, Primary keepalive message and Standby status update in 53.4
Streaming Replication Protocol; src/backend/replication/walsender.c.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.stream.request import StreamRequest, StreamSettings
from pgcdc_assets.postgres.stream.start import start_stream
from pgcdc_assets.postgres.stream.transport import ServerError, StreamEnded, Wire
from pgcdc_assets.postgres.wal.timelines import ServerTimeline
from pgcdc_assets.protocol.frames import KEEPALIVE, MessageBatch
from pgcdc_assets.protocol.messages import standby_status

_REPLY_REQUESTED_AT = 17


def nothing() -> None:
    """Do nothing: the default of `watch`."""


def ignore(text: str) -> None:
    """Ignore a sentence: the default of `on_notice`."""


def accept(timeline: ServerTimeline) -> None:
    """Accept any timeline: the default of `check_timeline`."""


class ReplicationStream:
    """The pgoutput stream of one slot and publication, a context manager.

    Args:
        connection: the source database.
        slot: the slot's name.
        publication: the publication's name.
        start_lsn: end of the durable data in the raw zone; the stream resumes there.
        settings: time limits and sizes.
        watch: function that the reader thread calls every `watch_seconds`; an error of `watch` ends
            the stream.
        check_timeline: function that is called before START_REPLICATION; an error prevents the
            stream.
        on_notice: function that the reader thread calls with the server's sentence about a standby
            that the stream waits for.

    Attributes:
        backend_pid: pid of the walsender.
        timeline: the server's timeline at the start of the stream.
        is_standby: the server was a standby at the start of the stream; its timeline may change
            during the stream.
        is_as_stored: texts are received in the encoding of the database.
    """

    def __init__(
        self,
        connection: ConnectionSettings,
        slot: str,
        publication: str,
        start_lsn: Lsn,
        settings: StreamSettings | None = None,
        watch: Callable[[], None] = nothing,
        check_timeline: Callable[[ServerTimeline], None] = accept,
        on_notice: Callable[[str], None] = ignore,
    ) -> None:
        self._settings = settings or StreamSettings()
        self._request = StreamRequest(connection, slot, publication, start_lsn, self._settings)
        self.is_as_stored = self._settings.as_stored
        self._watch = watch
        self._check_timeline = check_timeline
        self._on_notice = on_notice
        self._notice = ""
        self._flush_lsn = start_lsn
        self._queue: queue.Queue[MessageBatch | BaseException] = queue.Queue(
            self._settings.queued_batches
        )
        self._is_stopping = threading.Event()
        self._reader = threading.Thread(target=self._run, name=f"stream {slot}", daemon=True)
        self._failure: BaseException | None = None
        self._wire: Wire | None = None
        # Every status packet requests a reply. A third of the limit allows for two lost replies.
        self._status_seconds = min(
            self._settings.status_seconds, self._settings.silence_seconds / 3
        )
        self.backend_pid = self.timeline = 0
        self.is_standby = False
        self.timeline_start: Lsn | None = None

    @property
    def bytes_received(self) -> int:
        """Number of bytes received."""
        return 0 if self._wire is None else self._wire.bytes_received

    @property
    def queued_batches(self) -> int:
        """Number of batches that were received and not taken yet."""
        return self._queue.qsize()

    def __enter__(self) -> Self:
        started = start_stream(self._request, self._check_timeline)
        self._wire = started.wire
        self.backend_pid = started.wire.backend_pid
        self.timeline, self.is_standby = started.timeline, started.is_standby
        self.timeline_start = started.timeline_start
        if started.timeout_seconds is not None:
            # A third of the timeout: a late status packet does not exceed the timeout.
            self._status_seconds = min(self._status_seconds, started.timeout_seconds / 3)
        self._next_status = self._next_watch = self._reading_since = time.monotonic()
        self._reader.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def batches(self) -> Iterator[MessageBatch]:
        """Yield batches of messages as they arrive, without an end.

        Raises:
            ConnectionLost: the connection was lost, was silent, or was ended by the server.
            PgcdcError: the server reported an error, or `watch` raised an error.
        """
        while True:
            item = self._next()
            if isinstance(item, BaseException):
                raise item
            yield item

    def poll(self) -> MessageBatch | None:
        """Return the next batch if one has arrived; None otherwise.

        Raises:
            ConnectionLost: the connection was lost, was silent, or was ended by the server.
            PgcdcError: the server reported an error, or `watch` raised an error.
        """
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            self.check()
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def _next(self) -> MessageBatch | BaseException:
        """Return the next batch or error of the reader thread, or an error if the thread ended."""
        while True:
            # Check the thread before the queue: a thread that ends puts its last item first.
            is_reading = self._reader.is_alive()
            try:
                return self._queue.get(timeout=self._settings.watch_seconds if is_reading else 0)
            except queue.Empty:
                if not is_reading:
                    reason = "the reader thread has ended"
                    return self._failure or self._request.lost("reading the stream", reason)

    def cancel(self, error: BaseException) -> None:
        """End `batches` with an error, from another thread. Only `close` may follow."""
        self._is_stopping.set()
        # The consumer of a full queue is not waiting.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(error)

    def check(self) -> None:
        """Raise the error that has ended the stream, if there is one."""
        if self._failure is not None:
            raise self._failure

    def confirm(self, lsn: Lsn) -> None:
        """Confirm to the server that all transactions below `lsn` are durable.

        An LSN below the last confirmed LSN is ignored.

        Raises:
            ConnectionLost: the connection was lost; the server may have received the confirmation.
        """
        self._flush_lsn = max(self._flush_lsn, lsn)
        self.check()
        try:
            self._send_status()
        except OSError as error:
            raise self._request.lost(f"confirming {lsn}", error) from error

    def finish(self) -> bool:
        """End the stream by CopyDone. Return whether the server has received all confirmations.

        The server replies to CopyDone after it has read the earlier status packets. The server
        replies between two transactions only, so the wait is limited to `end_seconds`: a result of
        False means that the last confirmation may be lost.

        Raises:
            ConnectionLost: the connection was lost.
        """
        self._is_stopping.set()
        self._reader.join(self._settings.end_seconds)
        if self._reader.is_alive():
            raise self._request.lost("ending the stream", "the reader thread does not end")
        wire = self._started()
        deadline = time.monotonic() + self._settings.end_seconds
        try:
            self._send_status()
            wire.send_end()
            while time.monotonic() < deadline:
                wire.read()
        except StreamEnded:
            return True
        except ServerError as error:
            # The cause may quote a row of a later window.
            raise self._request.refused(error) from None
        except OSError as error:
            raise self._request.lost("ending the stream", error) from error
        return False

    def close(self) -> None:
        """Close the connection at once."""
        self._is_stopping.set()
        if self._reader.ident is not None:
            self._reader.join(self._settings.end_seconds)
        if self._wire is not None:
            self._wire.close()

    def _run(self) -> None:
        """Read messages, reply to keepalives and send status packets: the reader thread."""
        try:
            while not self._is_stopping.is_set():
                self._keep_time()
                batch = self._started().read()
                self._pass_notice()
                if batch is None:
                    self._check_silence()
                    continue
                self._answer(batch)
                self._hand_over(batch)
                self._reading_since = time.monotonic()
        except StreamEnded:
            self._fail(self._request.lost("reading the stream", "the server ended it"))
        except ServerError as error:
            self._fail(self._request.refused(error))
        except OSError as error:
            self._fail(self._request.lost("reading the stream", error))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Close the connection and hand the error to the consumer.

        A server that shuts down waits for open replication connections.
        """
        self._failure = error
        with contextlib.suppress(OSError):
            self._started().close()
        while not self._is_stopping.is_set():
            try:
                self._queue.put(error, timeout=0.05)
                return
            except queue.Full:
                continue

    def _hand_over(self, batch: MessageBatch) -> None:
        while not self._is_stopping.is_set():
            try:
                self._queue.put(batch, timeout=min(self._status_seconds, 0.2))
                return
            except queue.Full:
                self._keep_time()

    def _keep_time(self) -> None:
        now = time.monotonic()
        if now >= self._next_watch:
            self._next_watch = now + self._settings.watch_seconds
            self._watch()
        if now >= self._next_status:
            self._send_status(is_ping=True)

    def _pass_notice(self) -> None:
        notice = self._started().standby_notice
        if notice != self._notice:
            self._notice = notice
            self._on_notice(notice)

    def _answer(self, batch: MessageBatch) -> None:
        """Reply to keepalives that request a reply, with the confirmed LSN."""
        keepalives = batch.starts[batch.buffer[batch.starts] == KEEPALIVE]
        if batch.buffer[keepalives + _REPLY_REQUESTED_AT].any():
            self._send_status()

    def _check_silence(self) -> None:
        # Called after a read without bytes only. Time during which the thread did not read is not
        # silence of the server.
        quiet_since = max(self._started().heard_at, self._reading_since)
        if time.monotonic() - quiet_since > self._settings.silence_seconds:
            raise TimeoutError(
                f"the server has been silent for {self._settings.silence_seconds:g} s"
            )

    def _send_status(self, *, is_ping: bool = False) -> None:
        self._next_status = time.monotonic() + self._status_seconds
        self._started().send(
            standby_status(self._flush_lsn, reply_requested=is_ping, now_us=time.time_ns() // 1000)
        )

    def _started(self) -> Wire:
        assert self._wire is not None, "the stream is used as a context"
        return self._wire
