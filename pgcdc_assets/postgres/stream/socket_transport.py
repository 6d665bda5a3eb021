"""Transport over the socket of an unencrypted connection, without libpq.

Frames: Postgres documentation, 53.7 Message Formats.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time

import numpy as np
from psycopg import pq

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.postgres.stream.transport import (
    READ_SECONDS,
    ServerError,
    StreamEnded,
    WireSettings,
    check_notice,
)
from pgcdc_assets.protocol.frames import HEAD_BYTES, SLACK_BYTES, FramingError, MessageBatch, cut

_COPY_BOTH, _COPY_DONE, _ERROR, _NOTICE = b"W", b"c", b"E", b"N"
# CommandComplete, ParameterStatus and ReadyForQuery need no action.
_IGNORED = frozenset((b"C", b"S", b"Z"))


class SocketWire:
    """Transport over a duplicate of libpq's socket. See `Wire`.

    Args:
        conn: an established, unencrypted replication connection.
        command: START_REPLICATION.
        settings: sizes and time limits.
    """

    def __init__(self, conn: pq.abc.PGconn, command: bytes, settings: WireSettings) -> None:
        self._conn = conn
        self._prepare(socket.socket(fileno=os.dup(conn.socket)), conn.backend_pid, settings)
        self._start(command)

    def _prepare(self, source: socket.socket, backend_pid: int, settings: WireSettings) -> None:
        self._settings = settings
        self._socket = source
        self._socket.setblocking(True)
        self._set(socket.SO_RCVTIMEO, timeval(settings.pause_seconds))
        self._set(socket.SO_SNDTIMEO, timeval(settings.send_seconds))
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._send_lock = threading.Lock()
        self._buffer = np.empty(settings.batch_bytes + SLACK_BYTES, np.uint8)
        self._filled = 0
        # A frame begins at the start of the buffer. With fewer bytes no frame is complete.
        self._awaited = 1
        self._is_at_end = False
        self._is_started = False
        self.backend_pid = backend_pid
        self.bytes_received = 0
        self.heard_at = time.monotonic()
        self.standby_notice = ""

    def _start(self, command: bytes) -> None:
        try:
            self._send_frame(b"Q", command + b"\0")
            deadline = time.monotonic() + self._settings.start_seconds
            while not self._is_started:
                self.read()
                if not self._is_started and time.monotonic() > deadline:
                    raise TimeoutError(f"no answer in {self._settings.start_seconds:g} s")
        except BaseException:
            # The caller closes libpq's socket. The connection closes with the last duplicate.
            self._socket.close()
            raise

    def read(self) -> MessageBatch | None:
        self._receive()
        if self._filled < self._awaited and not self._is_at_end:
            return None
        try:
            return self._split()
        except ProtocolError as error:
            failure = FramingError(**error.facts)
            failure.received = self._buffer[: self._filled].tobytes()
            raise failure from None

    def _split(self) -> MessageBatch | None:
        """Return the received messages, or react to a frame of another kind."""
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
        """Receive until the buffer is full, a pause brings few bytes, or the time limit is over."""
        is_busy = self._wait() and self._take()
        deadline = time.monotonic() + READ_SECONDS
        while is_busy and self._room and time.monotonic() < deadline:
            before = self._filled
            if self._socket.family == socket.AF_UNIX:
                self._take(socket.MSG_WAITALL)
            else:
                # During the pause the server fills the kernel's buffers: fewer, larger reads.
                time.sleep(self._settings.pause_seconds)
                while self._take(socket.MSG_DONTWAIT) and time.monotonic() < deadline:
                    pass
            is_busy = self._filled - before >= self._settings.busy_bytes

    def _wait(self) -> bool:
        """Wait for the first bytes. Return whether there are bytes."""
        return bool(self._readable.poll(self._settings.quiet_seconds * 1000))

    @property
    def _room(self) -> int:
        return len(self._buffer) - SLACK_BYTES - self._filled

    def _take(self, flags: int = 0) -> bool:
        """Receive once. Return False for no bytes, a full buffer, or a closed connection."""
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
        """Copy the bytes behind `taken` to a new buffer. The batch keeps the old buffer."""
        if taken == 0 and needed + SLACK_BYTES <= len(self._buffer):
            return
        rest = self._buffer[taken : self._filled]
        size = max(self._settings.batch_bytes, needed)
        buffer = np.empty(size + SLACK_BYTES, np.uint8)
        buffer[: len(rest)] = rest
        self._buffer, self._filled = buffer, len(rest)

    def _take_other(self, kind: bytes, payload: bytes) -> None:
        if kind == _ERROR:
            raise server_error(payload)
        if kind == _COPY_DONE:
            raise StreamEnded
        if kind == _NOTICE:
            self.standby_notice = check_notice(_fields(payload)) or self.standby_notice
            return
        if kind != _COPY_BOTH and kind not in _IGNORED:
            raise ProtocolError(
                message_type=f"{kind!r}"[2:-1],
                offset=0,
                reason="the type does not belong to a stream",
            )

    def _send_frame(self, kind: bytes, payload: bytes) -> None:
        with self._send_lock:
            self._socket.sendall(kind + struct.pack("!I", len(payload) + 4) + payload)

    def _set(self, option: int, value: int | bytes) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)


def server_error(payload: bytes) -> ServerError:
    """Return the error of an ErrorResponse."""
    return ServerError.of(_fields(payload))


def _fields(payload: bytes) -> dict[bytes, str]:
    """Return the fields of an ErrorResponse or NoticeResponse by letter.

    A field is one letter and a zero-terminated text (53.8 Error and Notice Message Fields).
    """
    return {
        field[:1]: field[1:].decode(errors="replace") for field in payload.split(b"\0") if field
    }


def timeval(seconds: float) -> bytes:
    """Return a time as a `struct timeval`, for SO_RCVTIMEO and SO_SNDTIMEO."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
