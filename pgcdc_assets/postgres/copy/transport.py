"""The bytes of COPY TO STDOUT, in chunks of whole rows.

libpq returns COPY row by row, which costs a call into Python per row. Over an unencrypted
connection this module therefore reads the socket without libpq, into buffers of the chunk's size,
which numpy splits into rows. libpq does not take part in the statement: its connection is idle
before and after. An encrypted connection is read through the driver.

A thread receives while the caller decodes and writes earlier chunks. A bounded queue connects the
two, so memory does not grow with the table.

Protocol: Postgres documentation, 53.2.6 COPY Operations and 53.7 Message Formats.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import numpy as np

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.postgres.backend_cancellation import end_session
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.copy.text import CopyChunk
from pgcdc_assets.postgres.stream.socket_transport import server_error, timeval
from pgcdc_assets.postgres.stream.transport import ServerError
from pgcdc_assets.protocol.frames import HEAD_BYTES, SLACK_BYTES, cut_rows

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

CHUNK_BYTES = 2 * 1024 * 1024
_WAITING_CHUNKS = 8

# Time limit of one receive call. Nothing follows the end of a reply, so a call that waits for a
# full buffer waits this long at the end of each statement.
_RECEIVE_SECONDS = 0.002

# Time after which the received rows are passed on, although the buffer is not full.
_FILL_SECONDS = 0.05

_ERROR, _READY = b"E", b"Z"
# CopyOutResponse, CopyDone, CommandComplete, NoticeResponse, ParameterStatus.
_IGNORED = frozenset((b"H", b"c", b"C", b"N", b"S"))

_IS_GSS_ENCRYPTED = """
select exists (select from pg_catalog.pg_stat_gssapi
                where pid = pg_catalog.pg_backend_pid() and encrypted)
"""

_Put = Callable[[CopyChunk], None]


def copy_chunks(
    settings: ConnectionSettings, conn: Connection, statement: str, chunk_bytes: int = CHUNK_BYTES
) -> Generator[CopyChunk, None, None]:
    """Run a COPY TO STDOUT in text format, and yield its rows.

    Closing the iterator early ends the statement and the session. Close the connection afterwards.

    Args:
        settings: the server and role of the connection.
        conn: a connection in autocommit mode, or inside a transaction that was begun by a
            statement. No other thread uses the connection during the COPY.
        statement: the COPY statement.
        chunk_bytes: size of a chunk.

    Raises:
        ServerError: the server ended the statement with an error.
        psycopg2.Error: the same, over an encrypted connection.
        OSError: the connection was lost.
        ProtocolError: the server sent a message that does not belong to a COPY.
    """
    read = _read_by_driver if _is_encrypted(conn) else _read_socket
    chunks: queue.Queue[CopyChunk | None] = queue.Queue(_WAITING_CHUNKS)
    failures: list[BaseException] = []

    def put(chunk: CopyChunk) -> None:
        chunks.put(chunk)
        if len(chunk.source) > 2 * chunk_bytes:
            # A large row: wait until it is taken, so that few large rows are in memory.
            chunks.join()

    def take() -> CopyChunk | None:
        chunk = chunks.get()
        chunks.task_done()
        return chunk

    def run() -> None:
        try:
            read(conn, statement, chunk_bytes, put)
        except BaseException as error:
            failures.append(error)
        finally:
            chunks.put(None)

    reader = threading.Thread(target=run, name="pgcdc copy", daemon=True)
    reader.start()
    is_finished = False
    try:
        while (chunk := take()) is not None:
            yield chunk
        is_finished = True
    finally:
        if not is_finished:
            end_session(settings, conn)
            while take() is not None:
                pass
        reader.join()
    if failures:
        raise failures[0]


def _is_encrypted(conn: Connection) -> bool:
    if conn.info.ssl_in_use:
        return True
    with conn.cursor() as cursor:
        cursor.execute(_IS_GSS_ENCRYPTED)
        row = cursor.fetchone()
    assert row is not None
    return bool(row[0])


def _read_by_driver(conn: Connection, statement: str, chunk_bytes: int, put: _Put) -> None:
    sink = _Sink(chunk_bytes, put)
    with conn.cursor() as cursor:
        cursor.copy_expert(statement, sink)
    sink.flush()


class _Sink:
    """File-like target of the driver's COPY, which joins rows to chunks."""

    def __init__(self, chunk_bytes: int, put: _Put) -> None:
        self._put = put
        self._chunk_bytes = chunk_bytes
        self._rows: list[bytes] = []
        self._size = 0

    def write(self, row: bytes) -> None:
        self._rows.append(row)
        self._size += len(row)
        if self._size >= self._chunk_bytes:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            chunk = CopyChunk(np.frombuffer(bytearray().join(self._rows), dtype=np.uint8))
            self._rows, self._size = [], 0
            self._put(chunk)


def _read_socket(conn: Connection, statement: str, chunk_bytes: int, put: _Put) -> None:
    # A duplicate descriptor, so that closing the socket keeps the driver's descriptor open.
    with socket.socket(fileno=os.dup(conn.fileno())) as source:
        source.setblocking(True)
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(_RECEIVE_SECONDS))
        try:
            _Receiver(source, chunk_bytes).run(statement.encode(), put)
        finally:
            # Restore the driver's mode, which both descriptors share.
            source.setblocking(False)


class _Receiver:
    """Receiver of the reply to one COPY statement."""

    def __init__(self, source: socket.socket, chunk_bytes: int) -> None:
        self._socket = source
        self._chunk_bytes = chunk_bytes
        self._readable = select.poll()
        self._readable.register(source, select.POLLIN)
        self._buffer = np.empty(chunk_bytes + SLACK_BYTES, np.uint8)
        self._filled = 0

    def run(self, statement: bytes, put: _Put) -> None:
        """Send the statement, and pass on the rows until ReadyForQuery."""
        query = statement + b"\0"
        with contextlib.suppress(ConnectionError):
            # A server that has ended the session said why before it closed the connection.
            self._socket.sendall(b"Q" + struct.pack("!I", len(query) + 4) + query)
        failure: ServerError | None = None
        is_ready = False
        awaited = 0
        while not is_ready:
            is_open = self._fill()
            if is_open and self._filled < awaited:
                # Still the same large row.
                continue
            taken = 0
            while True:
                frames = cut_rows(self._buffer, taken, self._filled)
                starts, ends = frames.batch.starts, frames.batch.ends
                if len(starts):
                    source = self._buffer[taken : int(ends[-1])]
                    put(CopyChunk(source, starts - HEAD_BYTES - taken))
                taken = frames.consumed
                if frames.other is None:
                    break
                payload = self._buffer[taken + HEAD_BYTES : taken + frames.needed].tobytes()
                taken += frames.needed
                if frames.other == _ERROR:
                    failure = server_error(payload)
                elif frames.other == _READY:
                    is_ready = True
                elif frames.other not in _IGNORED:
                    raise ProtocolError(
                        message_type=f"{frames.other!r}"[2:-1],
                        offset=0,
                        reason="the type does not belong to a COPY",
                    )
            if not (is_ready or is_open):
                raise failure or ConnectionResetError("the server closed the connection")
            self._keep_rest(taken, frames.needed)
            awaited = frames.needed
        if failure is not None:
            raise failure

    def _fill(self) -> bool:
        """Receive until the buffer is full, the reply is complete, or the time limit is over.

        Returns:
            Whether the connection is open.
        """
        self._readable.poll()
        deadline = time.monotonic() + _FILL_SECONDS
        flags = 0
        while room := len(self._buffer) - SLACK_BYTES - self._filled:
            place = memoryview(self._buffer.data)[self._filled : self._filled + room]
            try:
                count = self._socket.recv_into(place, 0, flags)
                if count == 0:
                    return False
            except BlockingIOError:
                count = 0
            except ConnectionError:
                # What was received before may have the reason.
                return False
            self._filled += count
            # ReadyForQuery is the last frame and has six bytes.
            last = self._buffer[max(0, self._filled - 6) : self._filled].tobytes()
            if last[:5] == b"Z\0\0\0\5" or time.monotonic() >= deadline:
                break
            # The rest by few calls, which wait for a full buffer without the interpreter lock.
            flags = socket.MSG_WAITALL
        return True

    def _keep_rest(self, taken: int, needed: int) -> None:
        """Copy the bytes behind `taken` to a new buffer. The chunks keep the old buffer."""
        if taken == 0 and needed + SLACK_BYTES <= len(self._buffer):
            return
        rest = self._buffer[taken : self._filled]
        buffer = np.empty(max(self._chunk_bytes, needed) + SLACK_BYTES, np.uint8)
        buffer[: len(rest)] = rest
        self._buffer, self._filled = buffer, len(rest)
