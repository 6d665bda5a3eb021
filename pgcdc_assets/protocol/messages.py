"""pgoutput's rare messages, and the packets that the two sides of a stream exchange besides it.

Formats: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html and
protocol-replication.html. Row changes, Begin and Commit are not here: they come by the hundred
thousand and are read column by column in `decoder`.

Every parser checks bounds before it reads and ends exactly at the message's end, so malformed bytes
raise ProtocolError and nothing else.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.relation import Column, Relation

# Microseconds from the Unix epoch to 2000-01-01, where Postgres counts from.
POSTGRES_EPOCH_US = 946_684_800_000_000
# Years 1 and 9999: what a datetime holds.
FIRST_TIME_US = -62_135_596_800_000_000
LAST_TIME_US = 253_402_300_799_999_999

_status = struct.Struct("!cQQQqB").pack
_relation_head = struct.Struct("!I")
_relation_tail = struct.Struct("!ch")
_column_tail = struct.Struct("!Ii")
_truncate_head = struct.Struct("!iB")
_logical_head = struct.Struct("!Bq")
_count = struct.Struct("!i")
_flags = struct.Struct("!B")
_origin_lsn = struct.Struct("!Q")


class Truncate(NamedTuple):
    """TRUNCATE of one or more tables in one statement."""

    relation_ids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


class LogicalMessage(NamedTuple):
    """What `pg_logical_emit_message` wrote; the offsets say where its texts lie in the message."""

    is_transactional: bool
    prefix: tuple[int, int]
    content: tuple[int, int]


def standby_status(flush_lsn: int, *, reply_requested: bool = False, now_us: int = 0) -> bytes:
    """Write a standby status update that confirms `flush_lsn` and nothing more.

    Write and apply positions are given as the same LSN: a higher write position would be no promise
    either, but the server takes it for one while it shuts down.
    """
    return _status(
        b"r", flush_lsn, flush_lsn, flush_lsn, now_us - POSTGRES_EPOCH_US, int(reply_requested)
    )


def parse_relation(data: bytes) -> Relation:
    """Read a Relation message, its action byte included.

    Raises:
        ProtocolError: the bytes are not such a message.
    """
    reader = _Reader(data)
    (relation_id,) = reader.unpack(_relation_head)
    # An empty namespace stands for pg_catalog (logicalrep_write_namespace).
    schema = reader.text() or "pg_catalog"
    table = reader.text()
    identity, column_count = reader.unpack(_relation_tail)
    if identity not in (b"d", b"n", b"f", b"i"):
        raise reader.error("the replica identity is none of d, n, f, i")
    columns = []
    for _ in range(column_count):
        (flags,) = reader.unpack(_flags)
        name = reader.text()
        type_oid, typmod = reader.unpack(_column_tail)
        columns.append(Column(name, type_oid, typmod, is_key=bool(flags & 1)))
    reader.end()
    return Relation(relation_id, schema, table, identity.decode(), tuple(columns))


def parse_type(data: bytes) -> tuple[int, str]:
    """Read a Type message: the type's OID and its qualified name."""
    reader = _Reader(data)
    (type_oid,) = reader.unpack(_relation_head)
    schema = reader.text() or "pg_catalog"
    name = reader.text()
    reader.end()
    return type_oid, f"{schema}.{name}"


def parse_origin(data: bytes) -> str:
    """Read an Origin message: the name of the replication origin of the open transaction."""
    reader = _Reader(data)
    reader.unpack(_origin_lsn)
    name = reader.text()
    reader.end()
    return name


def parse_truncate(data: bytes) -> Truncate:
    """Read a Truncate message."""
    reader = _Reader(data)
    count, options = reader.unpack(_truncate_head)
    if count < 1 or count * 4 != reader.left:
        raise reader.error(f"{count} relations are announced in {reader.left} bytes")
    relation_ids = reader.unpack(struct.Struct(f"!{count}I"))
    return Truncate(tuple(relation_ids), bool(options & 1), bool(options & 2))


def parse_logical_message(data: bytes) -> LogicalMessage:
    """Read a Message; the texts themselves stay where they are."""
    reader = _Reader(data)
    flags, _lsn = reader.unpack(_logical_head)
    prefix = (reader.position, reader.position + len(reader.name()))
    (length,) = reader.unpack(_count)
    if length != reader.left:
        raise reader.error(f"a content of {length} bytes is announced, {reader.left} follow")
    return LogicalMessage(bool(flags & 1), prefix, (reader.position, reader.position + length))


class _Reader:
    """Takes fields from a message, one after the other, after its action byte."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 1

    @property
    def left(self) -> int:
        return len(self._data) - self.position

    def unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        if self.left < fields.size:
            raise self.error("it ends in the middle of a field")
        values = fields.unpack_from(self._data, self.position)
        self.position += fields.size
        return values

    def name(self) -> bytes:
        end = self._data.find(b"\0", self.position)
        if end < 0:
            raise self.error("a name has no end")
        name = self._data[self.position : end]
        self.position = end + 1
        return name

    def text(self) -> str:
        try:
            return self.name().decode()
        except UnicodeDecodeError:
            raise self.error("a name is not UTF-8") from None

    def end(self) -> None:
        if self.left:
            raise self.error(f"{self.left} bytes follow its end")

    def error(self, reason: str) -> ProtocolError:
        kind = chr(self._data[0]) if self._data else "nothing"
        return ProtocolError(message_type=kind, offset=self.position, reason=reason)
