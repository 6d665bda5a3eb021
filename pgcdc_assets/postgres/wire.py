"""The bytes of a replication connection after START_REPLICATION, both ways.

libpq connects and authenticates; then there are two ways to read. `SocketWire` takes the socket
from libpq and reads into its own buffers, which are cut into messages a buffer at a time: no object
and no call per message. `LibpqWire` asks libpq for each message and is for connections that libpq
encrypts. Measurements: docs/decisions/0001-stream-over-psycopg-3.md.

How a walsender works decides the speed. It writes each message to its socket at once. While the
reader's end has room, each of these writes travels the whole way through the kernel and wakes the
reader for 200 bytes: more CPU than decoding the WAL takes, on the server's one busy core. While the
reader's end is full, messages are appended to what waits already, at half the cost. So we do not
read what there is as soon as it is there: after the first bytes we pause, then take all that has
gathered, until a pause brings little. A Unix socket holds too few messages for that; there one call
reads until the batch is full or the pause is over (MSG_WAITALL), without a return to Python in
between, where it would wait for the interpreter's lock while the decoder holds it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psycopg
from psycopg import pq

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.frames import HEAD_BYTES, SLACK_BYTES, MessageBatch, cut

_COPY_BOTH, _COPY_DONE, _ERROR, _NOTICE = b"W", b"c", b"E", b"N"
# CommandComplete, ParameterStatus, ReadyForQuery: nothing to do.
_IGNORED = frozenset((b"C", b"S", b"Z"))

_NOT_IN_PREREQUISITE_STATE = "55000"
_UNDEFINED_OBJECT = "42704"

# A read hands over, or gives up for now, after so long: between two reads status packets go out,
# and a message larger than a batch may come for minutes. A full batch rarely takes as long.
_READ_SECONDS = 0.5


@dataclass(frozen=True)
class WireSettings:
    """How bytes are read.

    Attributes:
        batch_bytes: a batch is handed over when it has so many bytes.
        quiet_seconds: how long a read waits for the first byte.
        pause_seconds: after the first byte, how long the kernel collects before we read again; over
            a Unix socket, how long one read waits in all.
        busy_bytes: less than this in a pause, and what is there is handed over.
        send_seconds: a packet that cannot be sent in this time is an error.
        start_seconds: the server has so long to answer START_REPLICATION.
    """

    batch_bytes: int = 8 * 1024 * 1024
    quiet_seconds: float = 0.1
    pause_seconds: float = 0.02
    busy_bytes: int = 32 * 1024
    send_seconds: float = 10.0
    start_seconds: float = 60.0


class ServerError(Exception):
    """What the server answered instead of going on."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message


class StreamEnded(Exception):
    """The server ended the stream in order."""


class Wire(Protocol):
    """A started stream. `send` may be called by several threads, `read` by one.

    Attributes:
        heard_at: when bytes last came, by the monotonic clock; a long message comes in many reads.
    """

    bytes_received: int
    heard_at: float

    def read(self) -> MessageBatch | None:
        """Wait for messages: a full batch, or what came until the stream fell quiet.

        Raises:
            ServerError: the server sent an error.
            StreamEnded: the server ended the stream.
            OSError: the connection broke.
        """

    def send(self, payload: bytes) -> None:
        """Send one CopyData message.

        Raises:
            OSError: the connection broke.
        """

    def send_end(self) -> None:
        """Send CopyDone: the server answers with its own and reads nothing more of us."""

    def close(self) -> None:
        """Close the connection, whatever state it is in."""


class SocketWire:
    """Reads the socket of an unencrypted connection directly."""

    def __init__(self, conn: pq.abc.PGconn, command: bytes, settings: WireSettings) -> None:
        self._conn = conn
        self._settings = settings
        self._socket = socket.socket(fileno=os.dup(conn.socket))
        self._socket.setblocking(True)
        self._set(socket.SO_RCVTIMEO, _timeval(settings.pause_seconds))
        self._set(socket.SO_SNDTIMEO, _timeval(settings.send_seconds))
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._send_lock = threading.Lock()
        self._buffer = np.empty(settings.batch_bytes + SLACK_BYTES, np.uint8)
        self._filled = 0
        # The buffer begins with a frame; with fewer bytes there is nothing to cut.
        self._awaited = 1
        self._is_at_end = False
        self._is_started = False
        self.bytes_received = 0
        self.heard_at = time.monotonic()
        try:
            self._start(command)
        except BaseException:
            # The caller ends libpq's side; the connection lives until this one is closed too.
            self._socket.close()
            raise

    def _start(self, command: bytes) -> None:
        self._send_frame(b"Q", command + b"\0")
        deadline = time.monotonic() + self._settings.start_seconds
        while not self._is_started:
            self.read()
            if not self._is_started and time.monotonic() > deadline:
                raise TimeoutError("the server did not start the stream in time")

    def read(self) -> MessageBatch | None:
        self._receive()
        if self._filled < self._awaited and not self._is_at_end:
            return None
        frames = cut(self._buffer, 0, self._filled)
        taken, self._awaited = frames.consumed, max(1, frames.needed)
        if len(frames.batch.starts) == 0 and frames.other is not None:
            taken, self._awaited = frames.consumed + frames.needed, 1
            payload = self._buffer[frames.consumed + HEAD_BYTES : taken].tobytes()
            self._is_started = self._is_started or frames.other == _COPY_BOTH
            self._take_other(frames.other, payload)
        elif taken == 0 and self._is_at_end:
            raise ConnectionResetError("the server closed the connection")
        self._keep_rest(taken, frames.needed)
        return frames.batch if len(frames.batch.starts) else None

    def send(self, payload: bytes) -> None:
        self._send_frame(b"d", payload)

    def send_end(self) -> None:
        self._send_frame(b"c", b"")

    def close(self) -> None:
        self._socket.close()
        self._conn.finish()

    def _receive(self) -> None:
        """Read until the buffer is full, the stream falls quiet, or the time is over."""
        is_busy = bool(self._readable.poll(self._settings.quiet_seconds * 1000)) and self._take()
        deadline = time.monotonic() + _READ_SECONDS
        while is_busy and self._room and time.monotonic() < deadline:
            before = self._filled
            if self._socket.family == socket.AF_UNIX:
                self._take(socket.MSG_WAITALL)
            else:
                # The server fills the kernel's buffers meanwhile; then all of it is taken at once.
                time.sleep(self._settings.pause_seconds)
                while self._take(socket.MSG_DONTWAIT) and time.monotonic() < deadline:
                    pass
            is_busy = self._filled - before >= self._settings.busy_bytes

    @property
    def _room(self) -> int:
        return len(self._buffer) - SLACK_BYTES - self._filled

    def _take(self, flags: int = 0) -> bool:
        """Receive once; False when nothing came, nothing fits, or the connection has ended."""
        if not self._room or self._is_at_end:
            return False
        place = memoryview(self._buffer.data)[self._filled : self._filled + self._room]
        try:
            count = self._socket.recv_into(place, 0, flags)
        except BlockingIOError:
            return False
        self._is_at_end = count == 0
        self._filled += count
        self.bytes_received += count
        if count:
            self.heard_at = time.monotonic()
        return count > 0

    def _keep_rest(self, taken: int, needed: int) -> None:
        """Begin a new buffer with the bytes behind `taken`; the old one belongs to its batch."""
        if taken == 0 and needed + SLACK_BYTES <= len(self._buffer):
            return
        rest = self._buffer[taken : self._filled]
        size = max(self._settings.batch_bytes, needed)
        buffer = np.empty(size + SLACK_BYTES, np.uint8)
        buffer[: len(rest)] = rest
        self._buffer, self._filled = buffer, len(rest)

    def _take_other(self, kind: bytes, payload: bytes) -> None:
        if kind == _ERROR:
            raise _server_error(payload)
        if kind == _COPY_DONE:
            raise StreamEnded
        if kind == _NOTICE:
            _check_notice(_fields(payload))
            return
        if kind != _COPY_BOTH and kind not in _IGNORED:
            raise ProtocolError(
                message_type=f"{kind!r}"[2:-1], offset=0, reason="it does not belong to a stream"
            )

    def _send_frame(self, kind: bytes, payload: bytes) -> None:
        with self._send_lock:
            self._socket.sendall(kind + struct.pack("!I", len(payload) + 4) + payload)

    def _set(self, option: int, value: int | bytes) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)


class LibpqWire:
    """Reads message by message through libpq, which decrypts them."""

    def __init__(self, conn: pq.abc.PGconn, command: bytes, settings: WireSettings) -> None:
        self._conn = conn
        self._settings = settings
        self._lock = threading.Lock()
        self.bytes_received = 0
        self.heard_at = time.monotonic()
        self._notice: ServerError | None = None
        self._is_at_end = False
        conn.notice_handler = self._take_notice
        result = conn.exec_(command)
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise _result_error(result)
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
        deadline = time.monotonic() + _READ_SECONDS
        while is_busy and size < limit and not self._is_at_end and time.monotonic() < deadline:
            time.sleep(self._settings.pause_seconds)
            before = size
            # libpq reads a few kilobytes at a time.
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
        with self._lock:
            try:
                while self._conn.put_copy_data(payload) == 0:
                    self._flush()
                self._flush()
            except psycopg.OperationalError as error:
                raise OSError(_first_line(error)) from error

    def send_end(self) -> None:
        with self._lock:
            try:
                while self._conn.put_copy_end() == 0:
                    self._flush()
                self._flush()
            except psycopg.OperationalError as error:
                raise OSError(_first_line(error)) from error

    def close(self) -> None:
        with self._lock:
            self._conn.finish()

    def _take(self, payloads: list[memoryview], limit: int) -> int:
        """Take the messages that libpq holds, up to a limit of bytes."""
        size = 0
        while size < limit and not self._is_at_end:
            try:
                count, payload = self._conn.get_copy_data(1)
            except psycopg.OperationalError as error:
                raise OSError(_first_line(error)) from error
            if self._notice is not None:
                raise self._notice
            if count == 0:
                break
            if count < 0:
                self._is_at_end = True
                break
            payloads.append(payload)
            size += count
        # What came before the end is handed over first; the next read ends here again.
        if self._is_at_end and not payloads:
            self._raise_end()
        return size

    def _take_notice(self, result: pq.abc.PGresult) -> None:
        # Called by libpq in the middle of its work, where an error would go unheard.
        try:
            _check_notice(
                {
                    b"V": _field(result, pq.DiagnosticField.SEVERITY_NONLOCALIZED),
                    b"C": _field(result, pq.DiagnosticField.SQLSTATE),
                    b"M": _field(result, pq.DiagnosticField.MESSAGE_PRIMARY),
                }
            )
        except ServerError as error:
            self._notice = error

    def _raise_end(self) -> None:
        result = self._conn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            raise _result_error(result)
        raise StreamEnded

    def _consume(self) -> None:
        try:
            self._conn.consume_input()
        except psycopg.OperationalError as error:
            raise OSError(_first_line(error)) from error

    def _flush(self) -> None:
        deadline = time.monotonic() + self._settings.send_seconds
        while self._conn.flush() != 0:
            if not self._writable.poll(1000) and time.monotonic() > deadline:
                raise TimeoutError("a status packet could not be sent")


def _check_notice(fields: dict[bytes, str]) -> None:
    """Refuse the one warning that means lost changes.

    Since Postgres 18 pgoutput goes on without a publication that does not exist at this point of
    the WAL, and only warns; before it was an error. Changes of its tables would be missing, with
    success in the log.
    """
    if fields.get(b"V") == "WARNING" and fields.get(b"C") == _NOT_IN_PREREQUISITE_STATE:
        raise ServerError(_UNDEFINED_OBJECT, fields.get(b"M", "the publication does not exist"))


def _server_error(payload: bytes) -> ServerError:
    fields = _fields(payload)
    return ServerError(fields.get(b"C", ""), fields.get(b"M", "no reason given"))


def _fields(payload: bytes) -> dict[bytes, str]:
    """Read an ErrorResponse or NoticeResponse: fields of one letter and a text, zero-ended."""
    return {
        field[:1]: field[1:].decode(errors="replace") for field in payload.split(b"\0") if field
    }


def _field(result: pq.abc.PGresult, field: pq.DiagnosticField) -> str:
    return (result.error_field(field) or b"").decode(errors="replace")


def _result_error(result: pq.abc.PGresult) -> ServerError:
    sqlstate = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
    message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
    return ServerError(sqlstate.decode(), message.decode(errors="replace").strip())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
