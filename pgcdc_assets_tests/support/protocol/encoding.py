"""Encoder of the messages that a server sends, for tests of the decoder."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Literal

from pgcdc_assets.protocol.messages import POSTGRES_EPOCH_US
from pgcdc_assets.protocol.relation import Relation

UNCHANGED: Literal["unchanged"] = "unchanged"

# A value is bytes, NULL or unchanged TOAST.
Value = bytes | None | Literal["unchanged"]


def xlog_data(message: bytes, lsn: int = 0) -> bytes:
    return b"w" + struct.pack("!QQq", lsn, lsn, 0) + message


def keepalive(wal_end: int, *, reply_requested: bool = False) -> bytes:
    return b"k" + struct.pack("!QqB", wal_end, 0, reply_requested)


def begin(commit_lsn: int, xid: int, commit_us: int = POSTGRES_EPOCH_US) -> bytes:
    return b"B" + struct.pack("!QqI", commit_lsn, commit_us - POSTGRES_EPOCH_US, xid)


def commit(commit_lsn: int) -> bytes:
    return b"C" + struct.pack("!BQQq", 0, commit_lsn, commit_lsn + 8, 0)


def relation(described: Relation) -> bytes:
    data = b"R" + struct.pack("!I", described.relation_id)
    data += described.schema.encode() + b"\0" + described.table.encode() + b"\0"
    data += described.replica_identity.encode() + struct.pack("!h", len(described.columns))
    for column in described.columns:
        data += struct.pack("!B", column.is_key) + column.name.encode() + b"\0"
        data += struct.pack("!Ii", column.type_oid, column.typmod)
    return data


def tuple_data(values: Sequence[Value]) -> bytes:
    data = struct.pack("!h", len(values))
    for value in values:
        if value is None:
            data += b"n"
        elif value == UNCHANGED:
            data += b"u"
        else:
            assert isinstance(value, bytes)
            data += b"t" + struct.pack("!i", len(value)) + value
    return data


def insert(relation_id: int, new: Sequence[Value]) -> bytes:
    return b"I" + struct.pack("!I", relation_id) + b"N" + tuple_data(new)


def update(
    relation_id: int,
    new: Sequence[Value],
    old: Sequence[Value] | None = None,
    old_kind: bytes = b"K",
) -> bytes:
    before = b"" if old is None else old_kind + tuple_data(old)
    return b"U" + struct.pack("!I", relation_id) + before + b"N" + tuple_data(new)


def delete(relation_id: int, old: Sequence[Value], old_kind: bytes = b"K") -> bytes:
    return b"D" + struct.pack("!I", relation_id) + old_kind + tuple_data(old)


def truncate(relation_ids: Sequence[int], options: int = 0) -> bytes:
    count = len(relation_ids)
    return b"T" + struct.pack(f"!iB{count}I", count, options, *relation_ids)


def origin(name: str) -> bytes:
    return b"O" + struct.pack("!Q", 1) + name.encode() + b"\0"


def type_message(type_oid: int, schema: str, name: str) -> bytes:
    return b"Y" + struct.pack("!I", type_oid) + f"{schema}\0{name}\0".encode()


def logical_message(prefix: str, content: bytes, *, is_transactional: bool = True) -> bytes:
    head = struct.pack("!Bq", is_transactional, 1)
    return b"M" + head + prefix.encode() + b"\0" + struct.pack("!i", len(content)) + content


def with_xid(message: bytes, xid: int) -> bytes:
    """Return a message of a block of a streamed transaction."""
    return message if message[:1] == b"O" else message[:1] + struct.pack("!I", xid) + message[1:]


def stream_start(xid: int, *, is_first: bool) -> bytes:
    return b"S" + struct.pack("!IB", xid, is_first)


def stream_stop() -> bytes:
    return b"E"


def stream_commit(xid: int, commit_lsn: int, commit_us: int = POSTGRES_EPOCH_US) -> bytes:
    times = struct.pack("!q", commit_us - POSTGRES_EPOCH_US)
    return b"c" + struct.pack("!IBQQ", xid, 0, commit_lsn, commit_lsn + 8) + times


def stream_abort(xid: int, subxid: int, place: tuple[int, int] | None = None) -> bytes:
    """Return a Stream Abort, with LSN and time as with `streaming 'parallel'` if given."""
    return b"A" + struct.pack("!II", xid, subxid) + (struct.pack("!Qq", *place) if place else b"")


def begin_prepare(lsn: int, xid: int, gid: str, time_us: int = POSTGRES_EPOCH_US) -> bytes:
    """Return a Begin Prepare; `lsn` is the LSN of the PREPARE record."""
    return b"b" + struct.pack("!QQ", lsn, lsn + 8) + _named(xid, gid, time_us)


def prepare(lsn: int, xid: int, gid: str, time_us: int = POSTGRES_EPOCH_US) -> bytes:
    return b"P" + struct.pack("!BQQ", 0, lsn, lsn + 8) + _named(xid, gid, time_us)


def stream_prepare(lsn: int, xid: int, gid: str) -> bytes:
    return b"p" + prepare(lsn, xid, gid)[1:]


def commit_prepared(lsn: int, xid: int, gid: str, time_us: int = POSTGRES_EPOCH_US) -> bytes:
    return b"K" + prepare(lsn, xid, gid, time_us)[1:]


def rollback_prepared(prepare_lsn: int, lsn: int, xid: int, gid: str) -> bytes:
    head = struct.pack("!BQQq", 0, prepare_lsn + 8, lsn + 8, 0)
    return b"r" + head + _named(xid, gid, POSTGRES_EPOCH_US)


def _named(xid: int, gid: str, time_us: int) -> bytes:
    return struct.pack("!qI", time_us - POSTGRES_EPOCH_US, xid) + gid.encode() + b"\0"


def frame(payload: bytes, kind: bytes = b"d") -> bytes:
    return kind + struct.pack("!I", len(payload) + 4) + payload


def stream(messages: Iterable[bytes]) -> list[bytes]:
    """Return the plugin's messages as XLogData; keepalives stay unchanged."""
    return [m if m[:1] == b"k" and len(m) == 18 else xlog_data(m) for m in messages]
