"""Transport through libpq, message by message, for connections that only libpq can encrypt.

Source: Postgres documentation, 32.10 Functions Associated with the COPY Command.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

import psycopg
from psycopg import pq

from pgcdc_assets.error_text import first_line
from pgcdc_assets.postgres.libpq import execute
from pgcdc_assets.postgres.stream.transport import (
    READ_SECONDS,
    ServerError,
    StreamEnded,
    WireSettings,
    check_notice,
)
from pgcdc_assets.protocol.frames import MessageBatch


class LibpqWire:
    """Transport of a stream that libpq decrypts. See `Wire`.

    Args:
        conn: an established replication connection.
        command: START_REPLICATION.
        settings: sizes and time limits.
    """

    def __init__(self, conn: pq.abc.PGconn, command: bytes, settings: WireSettings) -> None:
        self._conn = conn
        self._settings = settings
        self._lock = threading.Lock()
        self.backend_pid = conn.backend_pid
        self.bytes_received = 0
        self.heard_at = time.monotonic()
        self._notice: ServerError | None = None
        self.standby_notice = ""
        self._is_at_end = False
        conn.notice_handler = self._take_notice
        result = execute(conn, command, settings.start_seconds)
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise result_error(result)
        conn.nonblocking = 1
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(conn.socket, select.POLLIN)
        self._writable.register(conn.socket, select.POLLOUT)

    def read(self) -> MessageBatch | None:
        payloads: list[memoryview] = []
        limit = self._settings.batch_bytes
        with self._lock:
            size = self._take(payloads, limit)
        is_busy = bool(payloads) or bool(self._readable.poll(self._settings.quiet_seconds * 1000))
        deadline = time.monotonic() + READ_SECONDS
        while is_busy and size < limit and not self._is_at_end and time.monotonic() < deadline:
            time.sleep(self._settings.pause_seconds)
            before = size
            # libpq reads a few kilobytes per call: repeat until the socket is empty.
            while self._readable.poll(0) and time.monotonic() < deadline:
                self.heard_at = time.monotonic()
                with self._lock:
                    self._consume()
                    size += self._take(payloads, limit - size)
                if size >= limit or self._is_at_end:
                    break
            is_busy = size - before >= self._settings.busy_bytes
        self.bytes_received += size
        return MessageBatch.of(payloads) if payloads else None

    def send(self, payload: bytes) -> None:
        self._put(lambda: self._conn.put_copy_data(payload))

    def send_end(self) -> None:
        self._put(self._conn.put_copy_end)

    def _put(self, put: Callable[[], int]) -> None:
        with self._lock:
            try:
                while put() == 0:
                    self._flush()
                self._flush()
            except psycopg.OperationalError as error:
                raise OSError(first_line(error)) from error

    def close(self) -> None:
        with self._lock:
            self._conn.finish()

    def _take(self, payloads: list[memoryview], limit: int) -> int:
        """Append the messages in libpq's buffer to `payloads`, up to `limit` bytes.

        Return the number of bytes.
        """
        size = 0
        while size < limit and not self._is_at_end:
            try:
                count, payload = self._conn.get_copy_data(1)
            except psycopg.OperationalError as error:
                raise OSError(first_line(error)) from error
            if self._notice is not None:
                raise self._notice
            if count == 0:
                break
            if count < 0:
                self._is_at_end = True
                break
            payloads.append(payload)
            size += count
        # Return the messages before the end of the stream first. The next read raises the end.
        if self._is_at_end and not payloads:
            self._raise_end()
        return size

    def _take_notice(self, result: pq.abc.PGresult) -> None:
        # libpq ignores an exception of a notice handler: keep the error for the next read.
        try:
            self.standby_notice = check_libpq_notice(result) or self.standby_notice
        except ServerError as error:
            self._notice = error

    def _raise_end(self) -> None:
        result = self._conn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            raise result_error(result)
        raise StreamEnded

    def _consume(self) -> None:
        try:
            self._conn.consume_input()
        except psycopg.OperationalError as error:
            raise OSError(first_line(error)) from error

    def _flush(self) -> None:
        deadline = time.monotonic() + self._settings.send_seconds
        while self._conn.flush() != 0:
            if not self._writable.poll(1000) and time.monotonic() > deadline:
                raise TimeoutError("a status packet could not be sent")


def check_libpq_notice(result: pq.abc.PGresult) -> str:
    """Check a notice that libpq has received. See `check_notice`.

    Raises:
        ServerError: the notice is the warning about a publication.
    """
    return check_notice(_fields(result))


def _fields(result: pq.abc.PGresult) -> dict[bytes, str]:
    """Return the fields of an error or a notice by letter (53.8)."""
    return {
        letter: (result.error_field(field) or b"").decode(errors="replace")
        for letter, field in {
            b"V": pq.DiagnosticField.SEVERITY_NONLOCALIZED,
            b"C": pq.DiagnosticField.SQLSTATE,
            b"M": pq.DiagnosticField.MESSAGE_PRIMARY,
            b"D": pq.DiagnosticField.MESSAGE_DETAIL,
            b"H": pq.DiagnosticField.MESSAGE_HINT,
            b"W": pq.DiagnosticField.CONTEXT,
            b"R": pq.DiagnosticField.SOURCE_FUNCTION,
        }.items()
    }


def result_error(result: pq.abc.PGresult) -> ServerError:
    """Return the error of a failed command."""
    # An error of libpq itself has a message, and no fields.
    own = {b"M": result.error_message.decode(errors="replace").strip()}
    return ServerError.of(own | {key: text for key, text in _fields(result).items() if text})
