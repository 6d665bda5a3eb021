"""The content of a slot, read by SQL and decoded by the reference decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.protocol import reference
from pgcdc_assets_tests.support.protocol.encoding import stream

# The mark of an unchanged TOAST value. No text of Postgres contains its first character.
UNCHANGED = "\0unchanged"
_END = 2**64


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


def peek_messages(conn: Any, slot: str, publication: str, **options: str) -> list[bytes]:
    """Read the messages of a pgoutput slot without advancing the slot.

    Args:
        options: further options of the plugin, and other values of its options.
    """
    chosen = {
        "proto_version": "1",
        "publication_names": publication,
        "messages": "true",
        **options,
    }
    texts = [text for pair in chosen.items() for text in pair]
    with conn.cursor() as cursor:
        cursor.execute(
            "select data from pg_logical_slot_peek_binary_changes"
            f"(%s, null, null{', %s' * len(texts)})",
            (slot, *texts),
        )
        return [bytes(data) for (data,) in cursor.fetchall()]


def peek(conn: Any, slot: str, publication: str) -> Captured:
    """Read all row changes of a pgoutput slot without advancing the slot."""
    with conn.cursor() as cursor:
        # Test servers commit asynchronously, and decoding ends at the flushed position.
        cursor.execute("set synchronous_commit = on; select pg_logical_emit_message(true, '', '')")
    payloads = stream(peek_messages(conn, slot, publication))
    relations = map(_relation, reference.relations(payloads))
    rows = reference.decode(payloads, 0, _END)
    return Captured(
        {relation.qualified_name: relation for relation in relations},
        [_change(row) for row in rows if row["op"] in "IUD"],
    )


def _relation(announced: reference.Relation) -> Relation:
    columns = [Column(c.name, c.type_oid, c.typmod, c.is_key) for c in announced.columns]
    identity = ReplicaIdentity(announced.replica_identity)
    return Relation(announced.relation_id, announced.schema, announced.table, identity, (*columns,))


def _change(row: dict[str, Any]) -> Change:
    new = row["new"]
    for column in row["unchanged"] or ():
        new[column] = UNCHANGED
    table = TableName(row["schema"], row["table"])
    return Change(Lsn(row["commit_lsn"]), row["op"], str(table), row["old"], new)
