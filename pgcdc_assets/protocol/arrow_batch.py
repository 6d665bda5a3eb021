"""The columns of decoded rows, and how they become one Arrow batch.

All arrays here have one entry per row, in stream order. Names of tables repeat for thousands of
rows, so they are gathered from the few relations that were announced and never made one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc_assets.protocol.frames import Positions
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.tuples import TEXTS_TYPE, UNCHANGED_TYPE

DECODED = pa.schema(
    [
        pa.field("commit_lsn", pa.int64(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("origin", pa.string()),
        pa.field("op", pa.string(), nullable=False),
        pa.field("relation_id", pa.int64()),
        pa.field("relation_version", pa.int32()),
        pa.field("schema", pa.string()),
        pa.field("table", pa.string()),
        pa.field("old_kind", pa.string()),
        pa.field("old", TEXTS_TYPE),
        pa.field("new", TEXTS_TYPE),
        pa.field("unchanged", UNCHANGED_TYPE),
    ]
)

NO_RELATION = -1


@dataclass(frozen=True, slots=True)
class Announced:
    """A relation that the stream announced and the catalog completed, with its version."""

    relation: Relation
    version: int


@dataclass(slots=True)
class Transactions:
    """The transactions of one batch; entry 0 is the one that was open when it began.

    Attributes:
        commit_times: microseconds since 1970.
        origins: names of replication origins; None for a transaction that began here.
    """

    commit_lsns: Positions
    commit_times: Positions
    xids: Positions
    origins: list[str | None]


@dataclass(slots=True)
class Rows:
    """One batch's rows before they become Arrow.

    Attributes:
        transaction: index into Transactions.
        ordinals: position in the transaction.
        operations: the action byte.
        relations: index into the announced relations, or NO_RELATION.
        old_kinds: K, O, or 0 without an old tuple.
    """

    transaction: Positions
    ordinals: Positions
    operations: npt.NDArray[np.uint8]
    relations: Positions
    old_kinds: npt.NDArray[np.uint8]
    old: pa.Array
    new: pa.Array
    unchanged: pa.Array


def build(rows: Rows, transactions: Transactions, announced: Sequence[Announced]) -> pa.RecordBatch:
    """Make the Arrow batch, with the columns of `DECODED`."""
    row_count = len(rows.operations)
    has_relation = rows.relations != NO_RELATION
    relations = pa.array(rows.relations, mask=None if has_relation.all() else ~has_relation)

    def of_relation(values: Sequence[object], kind: pa.DataType) -> pa.Array:
        return pa.array(values, kind).take(relations)

    if any(origin is not None for origin in transactions.origins):
        origins = pa.array(transactions.origins, pa.string()).take(pa.array(rows.transaction))
    else:
        origins = pa.nulls(row_count, pa.string())
    return pa.RecordBatch.from_arrays(
        [
            pa.array(transactions.commit_lsns[rows.transaction]),
            pa.array(rows.ordinals),
            pa.array(transactions.xids[rows.transaction]),
            pa.array(transactions.commit_times[rows.transaction]).cast(
                pa.timestamp("us", tz="UTC")
            ),
            origins,
            _letters(rows.operations),
            of_relation([a.relation.relation_id for a in announced], pa.int64()),
            of_relation([a.version for a in announced], pa.int32()),
            of_relation([a.relation.schema for a in announced], pa.string()),
            of_relation([a.relation.table for a in announced], pa.string()),
            _letters(rows.old_kinds),
            rows.old,
            rows.new,
            rows.unchanged,
        ],
        schema=DECODED,
    )


def _letters(codes: npt.NDArray[np.uint8]) -> pa.StringArray:
    """Make one-letter strings of ASCII codes, and NULL of 0."""
    is_set = codes != 0
    if not is_set.any():
        return pa.nulls(len(codes), pa.string())
    bitmap = None if is_set.all() else pa.py_buffer(np.packbits(is_set, bitorder="little"))
    if bitmap is None:
        offsets = np.arange(len(codes) + 1, dtype=np.int32)
    else:
        offsets = np.zeros(len(codes) + 1, np.int32)
        np.cumsum(is_set, out=offsets[1:])
    letters = np.ascontiguousarray(codes[is_set])
    return pa.StringArray.from_buffers(
        len(codes), pa.py_buffer(offsets), pa.py_buffer(letters), bitmap
    )
