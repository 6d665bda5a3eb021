"""The columns of decoded rows, and the build of one Arrow batch from these columns.

All arrays have one entry per row, in stream order. Table names repeat for thousands of rows:
`take` gathers the names from the few announced relations, without a Python string per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.protocol.frames import Positions
from pgcdc_assets.protocol.relation import Relation, ReplicaIdentity
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

# The kind of an old tuple that lacks a value of the table's key.
NO_KEY = "N"


@dataclass(frozen=True, slots=True)
class Announced:
    """One version of a relation, announced by the stream and completed from the catalog.

    Attributes:
        relation: the relation.
        version: its version number.
        number: position of the announcement among the announcements of the stream.
    """

    relation: Relation
    version: int
    number: int = 0


@dataclass(slots=True)
class Transactions:
    """The transactions of one batch. Entry 0 is the transaction open at the start of the batch.

    Attributes:
        commit_lsns: `final_lsn` of the Begin messages.
        commit_times: microseconds since 1970.
        xids: transaction ids.
        origins: names of replication origins; None for a transaction of this server.
    """

    commit_lsns: Positions
    commit_times: Positions
    xids: Positions
    origins: list[str | None]


@dataclass(slots=True)
class Rows:
    """The rows of one batch as numpy and Arrow columns, one entry per row.

    Attributes:
        transaction: index into Transactions.
        ordinals: position in the transaction, from 0.
        operations: the action byte: I, U, D, T or M.
        relations: index into the announced relations, or NO_RELATION.
        old_kinds: K, O, or 0 without an old tuple.
        old: texts of the old tuple, of type TEXTS_TYPE.
        new: texts of the new tuple, of type TEXTS_TYPE.
        unchanged: positions of unchanged TOAST values in `new`, of type UNCHANGED_TYPE.
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
    """Build the Arrow batch of the schema `DECODED`, one Arrow row per entry of `rows`.

    Args:
        rows: the rows.
        transactions: the transactions that `rows.transaction` indexes.
        announced: the relation versions that `rows.relations` indexes.
    """
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
            _letters(_kinds_of_old(rows, announced)),
            rows.old,
            rows.new,
            rows.unchanged,
        ],
        schema=DECODED,
    )


def _kinds_of_old(rows: Rows, announced: Sequence[Announced]) -> npt.NDArray[np.uint8]:
    """Return the kinds of the old tuples: K if a tuple has the key only, N if it lacks the key.

    The kind of a message is that of the root, and the old tuple that of the partition with the row
    (`logicalrep_write_delete` in Postgres's src/backend/replication/logical/proto.c). If the root
    has REPLICA IDENTITY FULL and the partition has not, the old tuple has NULL outside the key. If
    the partition's identity is an index of other columns, the key is NULL. The key of an index may
    also be NULL in rows that are older than a NOT NULL constraint that is NOT VALID.
    """
    kinds = rows.old_kinds
    for index, each in enumerate(announced):
        relation = each.relation
        is_index = relation.replica_identity is ReplicaIdentity.INDEX
        if not relation.row_key or not (relation.is_partitioned or is_index):
            continue
        chosen = np.flatnonzero((rows.relations == index) & (kinds != 0))
        if not len(chosen):
            continue
        is_null = pc.is_null(pc.list_flatten(rows.old.take(pa.array(chosen))))
        by_row = is_null.to_numpy(zero_copy_only=False).reshape(len(chosen), -1)
        of_key = np.array([column.name in relation.row_key for column in relation.columns])
        kinds = kinds.copy()
        if relation.has_full_identity and not of_key.all():
            kinds[chosen[by_row[:, ~of_key].all(axis=1)]] = ord("K")
        kinds[chosen[by_row[:, of_key].any(axis=1)]] = ord(NO_KEY)
    return kinds


def _letters(codes: npt.NDArray[np.uint8]) -> pa.StringArray:
    """Convert ASCII codes to strings of one letter, and code 0 to NULL."""
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
