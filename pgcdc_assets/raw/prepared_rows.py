"""The rows of `raw/prepared`, made from prepared transactions and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.protocol.open_transaction import SPOOLED, StreamedRelation
from pgcdc_assets.protocol.prepared_transactions import PreparedKey, PreparedTransaction
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.raw.delta.files import FileWriter
from pgcdc_assets.raw.delta.row_groups import gathered
from pgcdc_assets.raw.schema import PREPARED

# Values of `op` of rows that are not changes.
PREPARE, RELATION, ENDED, UNKNOWN = "prepare", "relation", "ended", "unknown"


def key_row(key: PreparedKey) -> dict[str, Any]:
    """Return the columns of a transaction's identity."""
    return {"prepare_lsn": int(key.lsn), "xid": key.xid, "gid": key.gid}


def fact_rows(epoch: int, prepared: PreparedTransaction) -> Iterator[dict[str, Any]]:
    """Yield the rows of a transaction before its changes."""
    key = {"epoch": epoch, **key_row(prepared.key)}
    used: set[int] = set()
    row_count = 0
    for batch in prepared.read():
        kept = prepared.transaction.without_aborted(batch)
        used.update(pc.unique(kept.column("announcement")).to_pylist())
        row_count += kept.num_rows
    transaction = prepared.transaction
    yield {
        **key,
        "op": PREPARE,
        "prepared_at": prepared.time_us,
        "origin": transaction.origin,
        "row_count": row_count,
    }
    # The order of the own announcements shows the partitions of a root (decision 71).
    own = set(transaction.own_announcements())
    for index in sorted(used | own):
        if index >= 0:
            text = _format_relation(index, transaction.announced[index], is_own=index in own)
            yield {**key, "op": RELATION, "new": [text]}


def write_changes(writer: FileWriter, epoch: int, prepared: PreparedTransaction) -> None:
    """Write the changes of a transaction, without those of aborted subtransactions."""

    def batches() -> Iterator[pa.RecordBatch]:
        count = 0
        for spooled in prepared.read():
            kept = prepared.transaction.without_aborted(spooled)
            yield _to_stored(kept, epoch, prepared, count)
            count += kept.num_rows

    for rows in gathered(batches()):
        writer.write(rows)


def _to_stored(
    spooled: pa.RecordBatch, epoch: int, prepared: PreparedTransaction, first: int
) -> pa.RecordBatch:
    count, key = spooled.num_rows, prepared.key
    relations = spooled.column("announcement")
    names = [each.relation for each in prepared.transaction.announced]
    taken = pc.if_else(pc.less(relations, 0), None, relations)
    arrays = {
        "epoch": pa.repeat(pa.scalar(epoch, pa.int32()), count),
        "prepare_lsn": pa.repeat(pa.scalar(int(key.lsn), pa.int64()), count),
        "xid": pa.repeat(pa.scalar(key.xid, pa.int64()), count),
        "gid": pa.repeat(pa.scalar(key.gid, pa.string()), count),
        "ordinal": pa.array(np.arange(first, first + count)),
        "op": _letters(spooled.column("op")),
        "relation": relations.cast(pa.int32()),
        "schema": pa.array([each.schema for each in names], pa.string()).take(taken),
        "table": pa.array([each.table for each in names], pa.string()).take(taken),
        "old_kind": _letters(spooled.column("old_kind")),
        "old": spooled.column("old"),
        "new": spooled.column("new"),
        "unchanged": spooled.column("unchanged"),
    }
    return pa.RecordBatch.from_arrays(
        [arrays.get(f.name, pa.nulls(count, f.type)) for f in PREPARED], schema=PREPARED
    )


def to_spooled(batch: pa.RecordBatch, xid: int) -> pa.RecordBatch:
    """Return rows of changes in the schema `SPOOLED`."""
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(xid, pa.int64()), batch.num_rows),
            _codes(batch.column("op")),
            batch.column("relation").cast(pa.int64()),
            _codes(batch.column("old_kind")),
            batch.column("old"),
            batch.column("new"),
            batch.column("unchanged"),
        ],
        schema=SPOOLED,
    )


@cache
def _all_letters() -> pa.Array:
    """Return the letters of operations and kinds of old tuples by their codes; 0 is NULL.

    `pa.array` imports pandas, which would delay the start of each capture.
    """
    return pa.array([chr(code) if code else None for code in range(128)], pa.string())


def _letters(codes: pa.Array) -> pa.Array:
    return _all_letters().take(codes.cast(pa.int64()))


def _codes(letters: pa.Array) -> pa.Array:
    return pc.index_in(letters, _all_letters()).cast(pa.uint8())


def _format_relation(index: int, announced: StreamedRelation, *, is_own: bool) -> str:
    relation = announced.relation.as_announced()
    return json.dumps(
        {
            "index": index,
            "version": announced.version,
            "is_own": is_own,
            "is_for_row": announced.is_for_row,
            "relation_id": relation.relation_id,
            "schema": relation.schema,
            "table": relation.table,
            "replica_identity": relation.replica_identity.value,
            "columns": [[c.name, c.type_oid, c.typmod, c.is_key] for c in relation.columns],
        }
    )


def parse_streamed_relation(text: str, xid: int) -> tuple[int, StreamedRelation]:
    """Return the index and the relation of a row with op `relation`.

    Args:
        text: the relation as JSON. Earlier releases did not write whether it is an own one.
        xid: id of the top-level transaction.
    """
    facts = json.loads(text)
    relation = Relation(
        facts["relation_id"],
        facts["schema"],
        facts["table"],
        ReplicaIdentity(facts["replica_identity"]),
        tuple(Column(*column) for column in facts["columns"]),
    )
    # An announcement of an earlier stream: no announcement of this stream has the number 0.
    announced_by = xid if facts.get("is_own") else 0
    is_for_row = facts.get("is_for_row", True)
    return facts["index"], StreamedRelation(relation, announced_by, 0, facts["version"], is_for_row)
