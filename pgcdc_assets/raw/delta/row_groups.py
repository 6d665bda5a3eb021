"""Assignment of rows to row groups: one relation per row group, within a memory budget.

Batches arrive in stream order and contain rows of many tables. Each batch is sorted by relation (a
stable `take`, without a copy for a batch of one relation) and kept as slices per relation. If the
budget is reached, the slices of each relation become one row group. Small relations share a row
group, so a publication of a thousand quiet tables does not produce a thousand row groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

BUDGET_BYTES = 48 * 1024 * 1024
SMALL_GROUP_BYTES = 1024 * 1024
LONG_RUN_ROWS = 256

# Relation id of rows without a relation (logical messages), below all OIDs.
_NO_RELATION = -1


class RelationGroups:
    """Buffer that regroups batches to row groups of one relation each.

    Args:
        budget_bytes: bytes in memory at which row groups are written.
        small_group_bytes: relations with fewer bytes share a row group.
    """

    def __init__(
        self, budget_bytes: int = BUDGET_BYTES, small_group_bytes: int = SMALL_GROUP_BYTES
    ) -> None:
        self._budget_bytes = budget_bytes
        self._small_group_bytes = small_group_bytes
        self._slices: dict[int, list[pa.RecordBatch]] = {}
        self._held_bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.Table]:
        """Add a batch, and yield row groups if the budget is reached."""
        if batch.num_rows == 0:
            return
        for relation_id, rows in _split(batch):
            self._slices.setdefault(relation_id, []).append(rows)
        self._held_bytes += batch.nbytes
        if self._held_bytes >= self._budget_bytes:
            yield from self.drain()

    def drain(self) -> Iterator[pa.Table]:
        """Yield the remaining row groups."""
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


def by_relation(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows of batches as row groups of one relation each."""
    groups = RelationGroups()
    for batch in batches:
        yield from groups.add(batch)
    yield from groups.drain()


def gathered(
    batches: Iterable[pa.RecordBatch], budget_bytes: int = BUDGET_BYTES
) -> Iterator[pa.Table]:
    """Yield the batches joined to row groups of about `budget_bytes`."""
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
    """Yield slices of one relation each. The rows of a relation stay in stream order."""
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
