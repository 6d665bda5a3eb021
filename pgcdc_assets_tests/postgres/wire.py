"""pgoutput read the simplest way, through SQL and byte by byte: the oracle for what copies must
equal."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from pgcdc_assets.protocol.relation import Column, Relation


class Reader:
    """Takes a message apart from left to right."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.at = 0

    def take(self, form: str) -> Any:
        value = struct.unpack_from("!" + form, self.message, self.at)[0]
        self.at += struct.calcsize("!" + form)
        return value

    def text(self) -> str:
        end = self.message.index(0, self.at)
        value = self.message[self.at : end].decode()
        self.at = end + 1
        return value

    def tuple(self) -> list[str | None]:
        texts: list[str | None] = []
        for _ in range(self.take("h")):
            kind = self.take("c")
            assert kind in b"nt", kind
            if kind == b"n":
                texts.append(None)
            else:
                length = self.take("i")
                texts.append(self.message[self.at : self.at + length].decode())
                self.at += length
        return texts


@dataclass
class Captured:
    """What a slot holds: announced relations and inserted rows by `schema.table`."""

    relations: dict[str, Relation] = field(default_factory=dict)
    rows: dict[str, list[list[str | None]]] = field(default_factory=dict)


def peek(conn: Any, slot: str, publication: str) -> Captured:
    """Read all inserts that a pgoutput slot holds, without moving it."""
    captured = Captured()
    names: dict[int, str] = {}
    with conn.cursor() as cursor:
        # Test servers commit asynchronously, and decoding ends at the WAL that is flushed.
        cursor.execute("set synchronous_commit = on; select pg_logical_emit_message(true, '', '')")
        cursor.execute(
            "select data from pg_logical_slot_peek_binary_changes(%s, null, null, "
            "'proto_version', '1', 'publication_names', %s)",
            (slot, publication),
        )
        for (data,) in cursor.fetchall():
            reader = Reader(bytes(data))
            kind = reader.take("c")
            if kind == b"R":
                oid, schema, table = reader.take("I"), reader.text(), reader.text()
                identity = reader.take("c").decode()
                columns = []
                for _ in range(reader.take("h")):
                    is_key = bool(reader.take("B"))
                    name = reader.text()
                    columns.append(Column(name, reader.take("I"), reader.take("i"), is_key))
                relation = Relation(oid, schema, table, identity, tuple(columns))
                captured.relations[relation.qualified_name] = relation
                names[oid] = relation.qualified_name
            elif kind == b"I":
                oid = reader.take("I")
                assert reader.take("c") == b"N"
                captured.rows.setdefault(names[oid], []).append(reader.tuple())
    return captured
