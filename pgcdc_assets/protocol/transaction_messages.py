"""Parsers of the messages of protocol versions 2, 3 and 4 that delimit transactions.

Version 2 streams open transactions in blocks, from Stream Start to Stop. Version 3 adds two-phase
commit. Version 4 adds LSN and time to Stream Abort, if the stream was started with `streaming
'parallel'`.

Formats: 53.9 Logical Replication Message Formats
(https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html) and
src/backend/replication/logical/proto.c. All LSNs have 8 bytes, times have 8 bytes (microseconds
since 2000-01-01), and transaction ids have 4 bytes.

Every parser requires that the last field ends at the message's end, and raises ProtocolError
otherwise. `data` begins with the action byte.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from pgcdc_assets.protocol.messages import MAX_LSN, MessageReader, read_commit_time

STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT, STREAM_PREPARE = b"SEcAp"
BEGIN_PREPARE, PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED = b"bPKr"

# Messages of two-phase commit: the server sends them if the slot or the stream has `two_phase`.
TWO_PHASE = (BEGIN_PREPARE, PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED, STREAM_PREPARE)

_start = struct.Struct("!IB")
_stream_commit = struct.Struct("!IBQQq")
_abort = struct.Struct("!II")
_abort_place = struct.Struct("!Qq")
_begin_prepare = struct.Struct("!QQqI")
_prepared = struct.Struct("!BQQqI")
_rollback_prepared = struct.Struct("!BQQqqI")


class StreamStart(NamedTuple):
    """The start of a block of an open transaction.

    Attributes:
        xid: id of the top-level transaction.
        is_first: the block is the first block of the transaction.
    """

    xid: int
    is_first: bool


class StreamCommit(NamedTuple):
    """The commit of a streamed transaction. `time_us` is in microseconds since 1970."""

    xid: int
    commit_lsn: int
    end_lsn: int
    time_us: int


class StreamAbort(NamedTuple):
    """The abort of a streamed transaction, or of one of its subtransactions.

    Attributes:
        xid: id of the top-level transaction.
        subxid: id of the aborted transaction; `xid` if the top-level transaction was aborted.
        abort_lsn: LSN of the abort; None without `streaming 'parallel'`.
        time_us: time of the abort in microseconds since 1970; None like `abort_lsn`.
    """

    xid: int
    subxid: int
    abort_lsn: int | None
    time_us: int | None


class Prepared(NamedTuple):
    """Begin Prepare, Prepare, Stream Prepare or Commit Prepared of a transaction.

    Attributes:
        xid: id of the top-level transaction.
        gid: the global identifier of PREPARE TRANSACTION.
        lsn: LSN of the PREPARE record; for Commit Prepared, LSN of the COMMIT PREPARED record.
        end_lsn: end of this record.
        time_us: time of PREPARE or COMMIT PREPARED in microseconds since 1970.
    """

    xid: int
    gid: str
    lsn: int
    end_lsn: int
    time_us: int


class RollbackPrepared(NamedTuple):
    """ROLLBACK PREPARED of a transaction.

    Attributes:
        xid: id of the top-level transaction.
        gid: the global identifier of PREPARE TRANSACTION.
        prepare_end_lsn: end of the PREPARE record.
        end_lsn: end of the ROLLBACK PREPARED record.
        prepare_time_us: time of PREPARE in microseconds since 1970.
        time_us: time of ROLLBACK PREPARED in microseconds since 1970.
    """

    xid: int
    gid: str
    prepare_end_lsn: int
    end_lsn: int
    prepare_time_us: int
    time_us: int


def parse_stream_start(data: bytes) -> StreamStart:
    """Return the transaction of a Stream Start (S)."""
    reader = MessageReader(data)
    xid, first = reader.unpack(_start)
    if first not in (0, 1):
        raise reader.error("the flag of the first block is not 0 or 1")
    reader.end()
    return StreamStart(_checked_xid(reader, xid), first == 1)


def check_stream_stop(data: bytes) -> None:
    """Check a Stream Stop (E), which has no field."""
    MessageReader(data).end()


def parse_stream_commit(data: bytes) -> StreamCommit:
    """Return the commit of a Stream Commit (c)."""
    reader = MessageReader(data)
    xid, flags, lsn, end_lsn, time = reader.unpack(_stream_commit)
    _check_record(reader, flags, lsn, end_lsn)
    reader.end()
    return StreamCommit(_checked_xid(reader, xid), lsn, end_lsn, read_commit_time(time))


def parse_stream_abort(data: bytes) -> StreamAbort:
    """Return the abort of a Stream Abort (A). The length tells whether it has LSN and time."""
    reader = MessageReader(data)
    xid, subxid = reader.unpack(_abort)
    abort_lsn = time_us = None
    if reader.left:
        abort_lsn, time_us = reader.unpack(_abort_place)
        time_us = read_commit_time(time_us)
    reader.end()
    return StreamAbort(_checked_xid(reader, xid), _checked_xid(reader, subxid), abort_lsn, time_us)


def parse_begin_prepare(data: bytes) -> Prepared:
    """Return the transaction of a Begin Prepare (b)."""
    reader = MessageReader(data)
    lsn, end_lsn, time, xid = reader.unpack(_begin_prepare)
    _check_record(reader, 0, lsn, end_lsn)
    return _prepared_of(reader, xid, lsn, end_lsn, time)


def parse_prepared(data: bytes) -> Prepared:
    """Return the transaction of a Prepare (P), Commit Prepared (K) or Stream Prepare (p)."""
    reader = MessageReader(data)
    flags, lsn, end_lsn, time, xid = reader.unpack(_prepared)
    _check_record(reader, flags, lsn, end_lsn)
    return _prepared_of(reader, xid, lsn, end_lsn, time)


def parse_rollback_prepared(data: bytes) -> RollbackPrepared:
    """Return the transaction of a Rollback Prepared (r)."""
    reader = MessageReader(data)
    flags, prepare_end, end_lsn, prepare_time, time, xid = reader.unpack(_rollback_prepared)
    _check_record(reader, flags, prepare_end, end_lsn)
    gid = reader.text()
    reader.end()
    times = read_commit_time(prepare_time), read_commit_time(time)
    return RollbackPrepared(_checked_xid(reader, xid), gid, prepare_end, end_lsn, *times)


def _prepared_of(reader: MessageReader, xid: int, lsn: int, end_lsn: int, time: int) -> Prepared:
    gid = reader.text()
    reader.end()
    return Prepared(_checked_xid(reader, xid), gid, lsn, end_lsn, read_commit_time(time))


def _checked_xid(reader: MessageReader, xid: int) -> int:
    if xid == 0:
        raise reader.error("the transaction id is 0")
    return xid


def _check_record(reader: MessageReader, flags: int, *lsns: int) -> None:
    if flags != 0:
        raise reader.error(f"the flags {flags} are unknown")
    if not all(0 < lsn <= MAX_LSN for lsn in lsns):
        raise reader.error("an LSN is impossible")
