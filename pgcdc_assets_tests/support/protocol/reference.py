"""A slow and simple reference decoder: one message after the other, field by field.

The decoder follows
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html line by line, and
shares no code with the package.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_POSTGRES_EPOCH = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)


class Column(NamedTuple):
    """A column of a Relation message."""

    is_key: bool
    name: str
    type_oid: int
    typmod: int


class Relation(NamedTuple):
    """A Relation message."""

    relation_id: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[Column, ...]


class Message(NamedTuple):
    """A logical message; `lsn` is the position of the message."""

    is_transactional: bool
    lsn: int
    prefix: str
    content: str


class _Fields:
    """The fields of a message, from left to right."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        self.at += count
        assert len(taken) == count
        return taken

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "big", signed=signed)

    def text(self) -> str:
        taken = self.take(self.data.index(0, self.at) - self.at)
        self.take(1)
        return taken.decode()

    def value(self, size: int) -> str:
        taken = self.take(size)
        try:
            text = taken.decode()
        except UnicodeDecodeError:
            text = "\0"
        return "\0\\x" + taken.hex() if text.startswith("\0") else text

    def tuple(self) -> tuple[list[str | None], list[int]]:
        values: list[str | None] = []
        unchanged = []
        for column in range(self.number(2)):
            kind = self.take(1)
            assert kind in (b"n", b"t", b"u"), kind
            if kind == b"t":
                values.append(self.value(self.number(4)))
            else:
                values.append(None)
                if kind == b"u":
                    unchanged.append(column)
        return values, unchanged

    def relation(self) -> Relation:
        relation_id, schema, table = self.number(4), self.text() or "pg_catalog", self.text()
        replica_identity = self.take(1).decode()
        columns = [
            Column(bool(self.number(1)), self.text(), self.number(4), self.number(4, signed=True))
            for _ in range(self.number(2))
        ]
        return Relation(relation_id, schema, table, replica_identity, (*columns,))

    def message(self) -> Message:
        flags, lsn, prefix = self.number(1), self.number(8), self.text()
        return Message(bool(flags), lsn, prefix, self.value(self.number(4)))


def relations(payloads: Iterable[bytes]) -> Iterator[Relation]:
    """Yield the announced relations."""
    for payload in payloads:
        fields = _Fields(payload[25:])
        if payload[:1] == b"w" and fields.take(1) == b"R":
            yield fields.relation()


def messages(payloads: Iterable[bytes]) -> Iterator[Message]:
    """Yield the logical messages."""
    for payload in payloads:
        fields = _Fields(payload[25:])
        if payload[:1] == b"w" and fields.take(1) == b"M":
            yield fields.message()


def decode(payloads: Iterable[bytes], start: int, end: int) -> list[dict[str, Any]]:
    """Return the expected rows of a window, as dictionaries of the Arrow batch's columns."""
    rows: list[dict[str, Any]] = []
    known: dict[int, tuple[str, str, int]] = {}
    announced = 0
    transaction: dict[str, Any] = {}
    is_open = False
    for payload in payloads:
        if payload[:1] == b"k":
            if not is_open and int.from_bytes(payload[1:9], "big") >= end:
                break
            continue
        fields = _Fields(payload[25:])
        action = fields.take(1).decode()
        row: dict[str, Any] = {"op": action, "old_kind": None, "old": None, "new": None}
        row["unchanged"] = None
        affected: list[int | None] = []
        if action == "B":
            lsn, microseconds = fields.number(8), fields.number(8)
            if lsn >= end:
                break
            is_open = True
            transaction = {
                "commit_lsn": lsn,
                "commit_ts": _POSTGRES_EPOCH + dt.timedelta(microseconds=microseconds),
                "xid": fields.number(4),
                "origin": None,
                "ordinal": 0,
            }
        elif action == "C":
            is_open = False
        elif action == "O":
            fields.take(8)
            transaction["origin"] = fields.text()
        elif action == "R":
            announced += 1
            relation = fields.relation()
            known[relation.relation_id] = (relation.schema, relation.table, announced)
        elif action == "T":
            count = fields.number(4)
            fields.take(1)
            affected = [fields.number(4) for _ in range(count)]
        elif action == "M":
            message = fields.message()
            if message.is_transactional:
                row["new"] = [message.prefix, message.content]
                affected = [None]
        elif action in "IUD":
            affected = [fields.number(4)]
            marker = fields.take(1).decode()
            if marker in "KO":
                row["old_kind"] = marker
                row["old"], _ = fields.tuple()
                marker = fields.take(1).decode() if action == "U" else ""
            if marker == "N":
                row["new"], unchanged = fields.tuple()
                row["unchanged"] = unchanged or None
        for affected_id in affected:
            schema, table, version = known.get(affected_id or 0, (None, None, None))
            if transaction["commit_lsn"] >= start:
                rows.append(
                    {
                        **row,
                        **transaction,
                        "relation_id": affected_id,
                        "relation_version": version,
                        "schema": schema,
                        "table": table,
                    }
                )
            transaction["ordinal"] += 1
    return rows
