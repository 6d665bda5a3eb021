"""Parsers of pgoutput's rare messages, and the writer of standby status updates.

Formats: 53.9 Logical Replication Message Formats
(https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html), 53.4 Streaming
Replication Protocol (protocol-replication.html) and src/backend/replication/logical/proto.c.
`decoder` reads the frequent messages (Begin, Commit, Insert, Update, Delete) by numpy.

Every parser checks bounds before a read and requires that the last field ends at the message's
end. Malformed bytes therefore raise ProtocolError and no other error.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import utf8
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity

# Microseconds from the Unix epoch to the Postgres epoch, 2000-01-01.
POSTGRES_EPOCH_US = 946_684_800_000_000
# The first and the last microsecond that a datetime can represent: years 1 and 9999.
FIRST_TIME_US = -62_135_596_800_000_000
LAST_TIME_US = 253_402_300_799_999_999
# The highest LSN of the columns of the raw zone.
MAX_LSN = 2**63 - 1

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
    """TRUNCATE of one or more tables in one statement.

    Attributes:
        relation_ids: OIDs of the tables, at least one.
        cascade: bit 0 of the options, TRUNCATE ... CASCADE.
        restart_identity: bit 1 of the options, TRUNCATE ... RESTART IDENTITY.
    """

    relation_ids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


class LogicalMessage(NamedTuple):
    """A message of `pg_logical_emit_message`.

    Attributes:
        is_transactional: the message belongs to the transaction that wrote the message.
        lsn: end of the message's record in the WAL.
        prefix: start and end offset of the prefix in the message.
        content: start and end offset of the content in the message.
    """

    is_transactional: bool
    lsn: int
    prefix: tuple[int, int]
    content: tuple[int, int]


def standby_status(flush_lsn: int, *, reply_requested: bool = False, now_us: int = 0) -> bytes:
    """Return a standby status update that confirms `flush_lsn`, 34 bytes long.

    The write and apply positions are `flush_lsn` as well. A walsender that shuts down compares the
    write position with its sent position if the flush position is invalid
    (src/backend/replication/walsender.c, WalSndDone): a higher write position could count as
    received data.

    Args:
        flush_lsn: the last durable LSN.
        reply_requested: ask the server to answer at once with a keepalive.
        now_us: the client's clock, microseconds since 1970.
    """
    return _status(
        b"r", flush_lsn, flush_lsn, flush_lsn, now_us - POSTGRES_EPOCH_US, int(reply_requested)
    )


def parse_relation(data: bytes) -> Relation:
    """Return the relation of a Relation message. `data` begins with the action byte R.

    Raises:
        ProtocolError: the bytes are no Relation message.
    """
    reader = MessageReader(data)
    (relation_id,) = reader.unpack(_relation_head)
    # An empty namespace means pg_catalog (proto.c, logicalrep_write_namespace).
    schema = reader.text() or "pg_catalog"
    table = reader.text()
    identity, column_count = reader.unpack(_relation_tail)
    try:
        replica_identity = ReplicaIdentity(identity.decode("latin-1"))
    except ValueError:
        raise reader.error("the replica identity is not d, n, f or i") from None
    columns = []
    for _ in range(column_count):
        (flags,) = reader.unpack(_flags)
        name = reader.text()
        type_oid, typmod = reader.unpack(_column_tail)
        columns.append(Column(name, type_oid, typmod, is_key=bool(flags & 1)))
    reader.end()
    return Relation(relation_id, schema, table, replica_identity, tuple(columns))


def parse_type(data: bytes) -> tuple[int, str]:
    """Return OID and qualified name of the type that a Type message announces.

    Raises:
        ProtocolError: the bytes are no Type message.
    """
    reader = MessageReader(data)
    (type_oid,) = reader.unpack(_relation_head)
    schema = reader.text() or "pg_catalog"
    name = reader.text()
    reader.end()
    return type_oid, f"{schema}.{name}"


def parse_origin(data: bytes) -> str:
    """Return the replication origin's name of an Origin message.

    Raises:
        ProtocolError: the bytes are no Origin message.
    """
    reader = MessageReader(data)
    reader.unpack(_origin_lsn)
    name = reader.text()
    reader.end()
    return name


def parse_truncate(data: bytes) -> Truncate:
    """Return the tables and the options of a Truncate message.

    Raises:
        ProtocolError: the bytes are no Truncate message.
    """
    reader = MessageReader(data)
    count, options = reader.unpack(_truncate_head)
    if count < 1 or count * 4 != reader.left:
        raise reader.error(f"the list of {count} relations has {reader.left} bytes")
    relation_ids = reader.unpack(struct.Struct(f"!{count}I"))
    return Truncate(tuple(relation_ids), bool(options & 1), bool(options & 2))


def parse_logical_message(data: bytes) -> LogicalMessage:
    """Return flags and offsets of a Message, without a copy of prefix and content.

    Raises:
        ProtocolError: the bytes are no Message.
    """
    reader = MessageReader(data)
    flags, lsn = reader.unpack(_logical_head)
    prefix = (reader.position, reader.position + len(reader.name()))
    (length,) = reader.unpack(_count)
    if length != reader.left:
        raise reader.error(f"the content of {length} bytes has {reader.left} bytes")
    content = (reader.position, reader.position + length)
    return LogicalMessage(bool(flags & 1), lsn, prefix, content)


def read_commit_time(postgres_us: int) -> int:
    """Convert the time of a transaction since 2000 to microseconds since 1970.

    The time of a transaction with a replication origin is the one that its session has given, which
    is any time (pg_replication_origin_xact_setup). Postgres sends 0, the year 2000, without one: so
    a time outside the years 1 to 9999 counts as 0.
    """
    time_us = postgres_us + POSTGRES_EPOCH_US
    return time_us if FIRST_TIME_US <= time_us <= LAST_TIME_US else POSTGRES_EPOCH_US


def check_time(reader: MessageReader, postgres_us: int) -> int:
    """Convert microseconds since 2000 to microseconds since 1970.

    Raises:
        ProtocolError: the time is outside the years 1 to 9999.
    """
    time_us = postgres_us + POSTGRES_EPOCH_US
    if not FIRST_TIME_US <= time_us <= LAST_TIME_US:
        raise reader.error("the time is outside the years 1 to 9999")
    return time_us


class MessageReader:
    """Reader of a message's fields in order, from the byte after the action byte."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 1

    @property
    def left(self) -> int:
        return len(self._data) - self.position

    def unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        if self.left < fields.size:
            raise self.error("the message ends in the middle of a field")
        values = fields.unpack_from(self._data, self.position)
        self.position += fields.size
        return values

    def name(self) -> bytes:
        end = self._data.find(b"\0", self.position)
        if end < 0:
            raise self.error("a name has no terminating zero byte")
        name = self._data[self.position : end]
        self.position = end + 1
        return name

    def text(self) -> str:
        """Return a name. A name that is not UTF-8 (encoding SQL_ASCII) becomes hex, see `utf8`."""
        return utf8.text_of_bytes(self.name())

    def end(self) -> None:
        if self.left:
            raise self.error(f"{self.left} bytes follow the last field")

    def error(self, reason: str) -> ProtocolError:
        kind = chr(self._data[0]) if self._data else "nothing"
        return ProtocolError(message_type=kind, offset=self.position, reason=reason)
