"""A simple reader of pgoutput through SQL, byte by byte, as the reference for snapshots."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity

# The mark of an unchanged TOAST value. No text of Postgres contains its first character.
UNCHANGED = "\0unchanged"


class Reader:
    """Reads the fields of a message from left to right."""

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

    def relation(self) -> Relation:
        oid, schema, table = self.take("I"), self.text(), self.text()
        identity = self.take("c").decode()
        columns = []
        for _ in range(self.take("h")):
            is_key = bool(self.take("B"))
            columns.append(Column(self.text(), self.take("I"), self.take("i"), is_key))
        return Relation(oid, schema, table, ReplicaIdentity(identity), (*columns,))

    def tuple(self) -> list[str | None]:
        texts: list[str | None] = []
        for _ in range(self.take("h")):
            kind = self.take("c")
            assert kind in b"ntu", kind
            if kind != b"t":
                texts.append(UNCHANGED if kind == b"u" else None)
            else:
                length = self.take("i")
                texts.append(self.message[self.at : self.at + length].decode())
                self.at += length
        return texts


class Change(NamedTuple):
    """One row change; the key is None if an update did not change the key."""

    commit_lsn: Lsn
    op: str
    table: str
    key: list[str | None] | None
    new: list[str | None] | None


@dataclass
class Captured:
    """The content of a slot: announced relations, and row changes in order."""

    relations: dict[str, Relation] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    @property
    def rows(self) -> dict[str, list[list[str | None]]]:
        """Return the inserted rows by `schema.table`."""
        rows: dict[str, list[list[str | None]]] = {}
        for change in self.changes:
            if change.op == "I" and change.new is not None:
                rows.setdefault(change.table, []).append(change.new)
        return rows


def peek(conn: Any, slot: str, publication: str) -> Captured:
    """Read all row changes of a pgoutput slot without advancing the slot."""
    captured = Captured()
    names: dict[int, str] = {}
    commit_lsn = Lsn(0)
    with conn.cursor() as cursor:
        # Test servers commit asynchronously, and decoding ends at the flushed position.
        cursor.execute("set synchronous_commit = on; select pg_logical_emit_message(true, '', '')")
        cursor.execute(
            "select data from pg_logical_slot_peek_binary_changes(%s, null, null, "
            "'proto_version', '1', 'publication_names', %s)",
            (slot, publication),
        )
        for (data,) in cursor.fetchall():
            reader = Reader(bytes(data))
            kind = reader.take("c").decode()
            if kind == "B":
                commit_lsn = Lsn(reader.take("Q"))
            elif kind == "R":
                relation = reader.relation()
                captured.relations[relation.qualified_name] = relation
                names[relation.relation_id] = relation.qualified_name
            elif kind in "IUD":
                table = names[reader.take("I")]
                tuples: dict[str, list[str | None]] = {}
                while reader.at < len(reader.message):
                    tuple_kind = reader.take("c").decode()
                    tuples[tuple_kind] = reader.tuple()
                key = tuples.get("K", tuples.get("O"))
                captured.changes.append(Change(commit_lsn, kind, table, key, tuples.get("N")))
    return captured
