"""A slow and simple reference decoder: one message after the other, field by field.

The decoder follows
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html line by line, and
shares no code with the package.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any

_POSTGRES_EPOCH = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)


class _Fields:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        taken, self.data = self.data[:count], self.data[count:]
        assert len(taken) == count
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def text(self) -> str:
        taken, _, self.data = self.data.partition(b"\0")
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
            if kind == b"t":
                values.append(self.value(self.number(4)))
            else:
                values.append(None)
                if kind == b"u":
                    unchanged.append(column)
        return values, unchanged


def decode(payloads: Iterable[bytes], start: int, end: int) -> list[dict[str, Any]]:
    """Return the expected rows of a window, as dictionaries of the Arrow batch's columns."""
    rows: list[dict[str, Any]] = []
    relations: dict[int, tuple[str, str, int]] = {}
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
            relation_id = fields.number(4)
            relations[relation_id] = (fields.text() or "pg_catalog", fields.text(), announced)
        elif action == "T":
            count = fields.number(4)
            fields.take(1)
            affected = [fields.number(4) for _ in range(count)]
        elif action == "M":
            if fields.number(1):
                fields.take(8)
                prefix = fields.text()
                row["new"] = [prefix, fields.value(fields.number(4))]
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
            schema, table, version = relations.get(affected_id or 0, (None, None, None))
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
