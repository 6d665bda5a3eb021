"""A raw zone of order tables, landed without a Postgres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.orders import Changes, OrderBook, raw_batches, relation
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw import epochs

CAPTURE = "bench"
EPOCH = 1

_START = 0x1000_0000
_TRANSACTION_ROWS = 1_000
# WAL bytes of one transaction.
_LSN_STEP = 0x4_0000
_FIRST_RELATION_ID = 1_000


class RawOrders:
    """A raw zone in a folder or a lake, with snapshots of tables and windows of changes."""

    def __init__(self, place: Path | Lake, books: Mapping[str, OrderBook]) -> None:
        lake = place if isinstance(place, Lake) else Lake(str(place))
        self.zone = RawZone(lake, CAPTURE)
        self._end: int = _START
        self._relations = {
            table: relation(table, _FIRST_RELATION_ID + number)
            for number, table in enumerate(books)
        }
        self._begin()
        for table, book in books.items():
            described = self._relations[table]
            self.zone.snapshots.land_snapshot(EPOCH, Lsn(_START), described, 1, book.copied())

    def land(self, parts: Sequence[tuple[str, Changes]]) -> LsnWindow:
        """Land the next window, with the changes of one table after the other."""
        firsts, end = [], self._end
        for _, changes in parts:
            firsts.append(end)
            end += -(-len(changes) // _TRANSACTION_ROWS) * _LSN_STEP
        window = LsnWindow.of(EPOCH, self._end, end + _LSN_STEP)
        batches = (
            batch
            for (table, changes), first in zip(parts, firsts, strict=True)
            for batch in raw_batches(
                changes, self._relations[table], first, _LSN_STEP, _TRANSACTION_ROWS
            )
        )
        self.zone.changes.land(window, batches)
        self._end = window.end
        return window

    def _begin(self) -> None:
        self.zone.epochs.append(replace(epochs.EPOCH, epoch=EPOCH, start_lsn=Lsn(_START)))
        for described in self._relations.values():
            self.zone.relations.register(EPOCH, described, Lsn(_START))
        self.zone.relations.flush()
