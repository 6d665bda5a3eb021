"""Which rows share a row group: those of one relation, as far as memory allows.

Batches come in stream order with the tables mixed. They are sorted by relation one by one (a stable
`take`, no copy when a batch has one relation only) and kept as slices per relation until the budget
is full; then each relation's slices become one row group. Small neighbours share a group, so that a
publication of a thousand quiet tables does not make a thousand groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

BUDGET_BYTES = 48 * 1024 * 1024
SMALL_GROUP_BYTES = 1024 * 1024
LONG_RUN_ROWS = 256

# Rows without a relation (logical messages) sort before all tables.
_NO_RELATION = -1


class RelationGroups:
    """Collects batches and gives them back as row groups of one relation each."""

    def __init__(
        self, budget_bytes: int = BUDGET_BYTES, small_group_bytes: int = SMALL_GROUP_BYTES
    ) -> None:
        self._budget_bytes = budget_bytes
        self._small_group_bytes = small_group_bytes
        self._slices: dict[int, list[pa.RecordBatch]] = {}
        self._held_bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.Table]:
        """Take a batch; yield row groups when the budget is full."""
        if batch.num_rows == 0:
            return
        for relation_id, rows in _split(batch):
            self._slices.setdefault(relation_id, []).append(rows)
        self._held_bytes += batch.nbytes
        if self._held_bytes >= self._budget_bytes:
            yield from self.drain()

    def drain(self) -> Iterator[pa.Table]:
        """Yield what is left."""
        shared: list[pa.RecordBatch] = []
        shared_bytes = 0
        for relation_id in sorted(self._slices):
            rows = self._slices.pop(relation_id)
            size = sum(piece.nbytes for piece in rows)
            if size >= self._small_group_bytes:
                yield pa.Table.from_batches(rows)
                continue
            shared += rows
            shared_bytes += size
            if shared_bytes >= self._small_group_bytes:
                yield pa.Table.from_batches(shared)
                shared, shared_bytes = [], 0
        if shared:
            yield pa.Table.from_batches(shared)
        self._held_bytes = 0


def gathered(
    batches: Iterable[pa.RecordBatch], budget_bytes: int = BUDGET_BYTES
) -> Iterator[pa.Table]:
    """Put batches of one kind together to row groups of about the budget's size."""
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for batch in batches:
        held.append(batch)
        held_bytes += batch.nbytes
        if held_bytes >= budget_bytes:
            yield pa.Table.from_batches(held)
            held, held_bytes = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _split(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut a batch into slices of one relation each, a relation's rows staying in stream order."""
    ids = batch.column("relation_id").fill_null(_NO_RELATION).to_numpy(zero_copy_only=False)
    starts = _run_starts(ids)
    if len(ids) < len(starts) * LONG_RUN_ROWS:
        order = np.argsort(ids, kind="stable")
        batch = batch.take(pa.array(order))
        ids = ids[order]
        starts = _run_starts(ids)
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield int(ids[start]), batch.slice(start, end - start)


def _run_starts(ids: np.ndarray[Any, Any]) -> list[int]:
    changed: list[int] = (np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist()
    return [0, *changed]
