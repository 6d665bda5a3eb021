"""Orders and their changes in bulk, as the raw zone's texts, made by numpy without a Postgres.

    create table orders (
        id bigint primary key, customer_id bigint, status text, amount numeric(12,2),
        note text, updated_at timestamptz
    );

A note has about 60 characters. The values of an order follow from its id and a revision: 0 in the
snapshot, and later the number of the change. Every update therefore changes values, and every run
has the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.raw import schema

SCHEMA = "public"
BATCH_ROWS = 50_000

INSERT, UPDATE, DELETE = 0, 1, 2

Numbers = np.ndarray

_TEXT = pa.large_string()
_TUPLE = schema.CHANGES.field("new").type
# Orders whose number is a multiple of this are never updated, so that they can be deleted.
_DELETED_OF = 4

_FIRST_ORDER = np.datetime64("2024-01-01", "us").astype(np.int64)
_FIRST_CHANGE = np.datetime64("2026-01-01", "us").astype(np.int64)

_STATUSES = pa.array(["new", "paid", "packed", "shipped", "delivered"], _TEXT)
_PLACES = pa.array(
    [
        "left at the back door",
        "ring the upper bell",
        "give to the neighbour",
        "second yard, stairs B",
        "at the reception desk",
        "behind the bicycle shed",
        "call on arrival",
        "the shop on the corner",
    ],
    _TEXT,
)
_TIMES = pa.array(
    [
        "before noon only",
        "after six o'clock",
        "not on a Wednesday",
        "with the next order",
        "as soon as possible",
        "any time this week",
        "on the first of May",
        "during office hours",
    ],
    _TEXT,
)
_TWO_DIGITS = pa.array([f"{number:02d}" for number in range(100)], _TEXT)


def relation(table: str, relation_id: int) -> Relation:
    """Return a table of orders as the catalog describes it."""
    described = (
        ("id", "bigint", 20, "int8", -1),
        ("customer_id", "bigint", 20, "int8", -1),
        ("status", "text", 25, "text", -1),
        ("amount", "numeric", 1700, "numeric", (12 << 16 | 2) + 4),
        ("note", "text", 25, "text", -1),
        ("updated_at", "timestamp with time zone", 1184, "timestamptz", -1),
    )
    columns = tuple(
        Column(
            name=name,
            type_oid=oid,
            typmod=typmod,
            is_key=name == "id",
            attnum=number,
            type=shown,
            base_type=base_type,
            base_typmod=typmod,
        )
        for number, (name, shown, oid, base_type, typmod) in enumerate(described, 1)
    )
    return Relation(relation_id, SCHEMA, table, ReplicaIdentity.DEFAULT, columns, ("id",))


@dataclass(frozen=True)
class Changes:
    """Changes of orders in stream order."""

    ops: Numbers
    ids: Numbers
    revisions: Numbers

    def __len__(self) -> int:
        return len(self.ids)


class OrderBook:
    """The orders 1 to `rows` of a snapshot, and the later changes."""

    def __init__(self, rows: int, seed: int = 1) -> None:
        self.copied_rows = self.row_count = rows
        self._chance = np.random.default_rng(seed)
        self._next_id = rows + 1
        self._next_revision = 1
        self._is_deleted = np.zeros(rows // _DELETED_OF + 1, dtype=bool)

    def copied(self) -> Iterator[pa.RecordBatch]:
        """Return the snapshot's rows in the order of their ids."""
        for first in range(1, self.copied_rows + 1, BATCH_ROWS):
            ids = np.arange(first, min(first + BATCH_ROWS, self.copied_rows + 1))
            rows = _texts(ids, np.zeros_like(ids))
            yield pa.RecordBatch.from_arrays([_tuples(rows, np.ones(len(ids), bool))], ["new"])

    def mixed(self, count: int, recent: int | None = None) -> Changes:
        """Return changes of the book: of 20 changes 18 are updates, one an insert and one a delete.

        Args:
            recent: number of last orders of the snapshot for updates and deletes; None: all orders.
        """
        inserted = deleted = count // 20
        ops = np.full(count, UPDATE, dtype=np.int8)
        ops[:inserted] = INSERT
        ops[inserted : inserted + deleted] = DELETE
        self._chance.shuffle(ops)
        first = 1 if recent is None else max(1, self.copied_rows - recent + 1)
        ids = np.empty(count, dtype=np.int64)
        ids[ops == INSERT] = np.arange(self._next_id, self._next_id + inserted)
        ids[ops == UPDATE] = self._some_to_update(first, count - inserted - deleted)
        ids[ops == DELETE] = self._some_to_delete(first, deleted)
        self._next_id += inserted
        self.row_count += inserted - deleted
        return self._numbered(ops, ids)

    def versions(self, count: int, each: int, recent: int) -> Changes:
        """Return several updates of each of the last orders of the snapshot, in turns."""
        last = np.arange(max(1, self.copied_rows - recent + 1), self.copied_rows + 1)
        kept = last[last % _DELETED_OF != 0]
        ids = np.tile(self._chance.choice(kept, count // each, replace=False), each)
        return self._numbered(np.full(len(ids), UPDATE, dtype=np.int8), ids)

    def _numbered(self, ops: Numbers, ids: Numbers) -> Changes:
        revisions = np.arange(self._next_revision, self._next_revision + len(ids))
        self._next_revision += len(ids)
        return Changes(ops, ids, revisions)

    def _some_to_update(self, first: int, count: int) -> Numbers:
        ids = self._chance.integers(first, self.copied_rows + 1, size=count)
        # An order that is deleted later is replaced by its neighbour.
        ids[ids % _DELETED_OF == 0] -= 1
        return ids

    def _some_to_delete(self, first: int, count: int) -> Numbers:
        slots = np.arange(-(-first // _DELETED_OF), self.copied_rows // _DELETED_OF + 1)
        left = slots[~self._is_deleted[slots]]
        chosen = self._chance.choice(left, count, replace=False)
        self._is_deleted[chosen] = True
        return chosen * _DELETED_OF


def raw_batches(
    changes: Changes,
    described: Relation,
    first_lsn: int,
    lsn_step: int,
    transaction_rows: int,
) -> Iterator[pa.RecordBatch]:
    """Return changes as rows of raw/changes, in transactions of equal size."""
    names = [field.name for field in schema.CHANGES if field.name not in ("epoch", "window")]
    for first in range(0, len(changes), BATCH_ROWS):
        part = slice(first, first + BATCH_ROWS)
        columns = _narrow_columns(changes, described, part, first_lsn, lsn_step, transaction_rows)
        ids, is_deleted = changes.ids[part], changes.ops[part] == DELETE
        rows = _texts(ids[~is_deleted], changes.revisions[part][~is_deleted])
        columns["new"] = _tuples(rows, ~is_deleted)
        keys = _digits(ids[is_deleted])
        empty = pa.nulls(len(keys), _TEXT)
        columns["old"] = _tuples([keys, *[empty] * (len(rows) - 1)], is_deleted)
        yield pa.RecordBatch.from_arrays([columns[name] for name in names], names)


def _narrow_columns(
    changes: Changes,
    described: Relation,
    part: slice,
    first_lsn: int,
    lsn_step: int,
    transaction_rows: int,
) -> dict[str, pa.Array]:
    ops, revisions = changes.ops[part], changes.revisions[part]
    count = len(ops)
    positions = np.arange(part.start, part.start + count)
    transactions = positions // transaction_rows
    lsns = first_lsn + transactions * lsn_step
    last = (transactions + 1) * transaction_rows - 1
    committed = _changed_at(changes.revisions[np.minimum(last, len(changes) - 1)])
    same = {
        "origin": pa.scalar(None, pa.string()),
        "relation_id": pa.scalar(described.relation_id, pa.int64()),
        "relation_version": pa.scalar(1, pa.int32()),
        "schema": pa.scalar(described.schema, pa.string()),
        "table": pa.scalar(described.table, pa.string()),
        "unchanged": pa.scalar(None, schema.CHANGES.field("unchanged").type),
    }
    return {
        **{name: pa.repeat(value, count) for name, value in same.items()},
        "commit_lsn": pa.array(lsns),
        "ordinal": pa.array(positions % transaction_rows),
        "xid": pa.array(revisions[0] // transaction_rows + transactions),
        "commit_ts": pa.array(committed).cast(pa.timestamp("us", tz="UTC")),
        "op": pa.array(["I", "U", "D"]).take(pa.array(ops)),
        "old_kind": pa.array(["K"]).take(pa.array(np.zeros(count, np.int8), mask=ops != DELETE)),
    }


def _texts(ids: Numbers, revisions: Numbers) -> list[pa.Array]:
    """Return the columns of orders as Postgres prints them."""
    noise = _noise(ids, revisions)
    cents = (noise >> 20) % 10_000_000
    amount = pc.binary_join_element_wise(
        _digits(cents // 100), _TWO_DIGITS.take(pa.array(cents % 100)), pa.scalar(".", _TEXT)
    )
    note = pc.binary_join_element_wise(
        _PLACES.take(pa.array(noise % 8)),
        _TIMES.take(pa.array((noise >> 3) % 8)),
        _digits(noise >> 10),
        pa.scalar(", ", _TEXT),
    )
    at = np.where(revisions == 0, _FIRST_ORDER + ids * 1_000_000, _changed_at(revisions))
    updated_at = pc.binary_join_element_wise(
        pa.array(at).cast(pa.timestamp("us")).cast(_TEXT),
        pa.scalar("+00", _TEXT),
        pa.scalar("", _TEXT),
    )
    return [
        _digits(ids),
        _digits(1 + ids * 7919 % 500_000),
        _STATUSES.take(pa.array((noise >> 6) % len(_STATUSES))),
        amount,
        note,
        updated_at,
    ]


def _noise(ids: Numbers, revisions: Numbers) -> Numbers:
    """Return 63 pseudo-random bits of two numbers (the finalizer of splitmix64)."""
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += revisions.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ mixed >> np.uint64(31)) >> np.uint64(1)).astype(np.int64)


def _changed_at(revisions: Numbers) -> Numbers:
    return _FIRST_CHANGE + revisions * 1_000


def _digits(numbers: Numbers) -> pa.Array:
    return pa.array(numbers).cast(_TEXT)


def _tuples(columns: list[pa.Array], is_there: Numbers) -> pa.Array:
    """Return one array of texts per row; NULL for a row without a tuple."""
    width, count = len(columns), len(columns[0])
    order = np.arange(width * count).reshape(width, count).T.ravel()
    values = pa.concat_arrays(columns).take(pa.array(order))
    ends = np.cumsum(np.concatenate([[0], np.where(is_there, width, 0)]))
    offsets = pa.array(ends.astype(np.int32), mask=np.append(~is_there, False))
    return pa.ListArray.from_arrays(offsets, values, type=_TUPLE)
