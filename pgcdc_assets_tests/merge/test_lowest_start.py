"""From where on the windows of an epoch are read for the plans of all tables."""

from __future__ import annotations

import pytest

from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.merge.opened_table import lowest_start
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.table_name import TableName

A, B = TableName("shop", "a"), TableName("shop", "b")
SNAPSHOTS = [
    Snapshot(epoch, Lsn(lsn), *table, relation_version=1, row_count=1)
    for epoch, lsn, table in ((1, 500, A), (1, 900, A), (1, 700, B), (2, 5000, A), (2, 6000, B))
]


def _at(epoch: int, lsn: int) -> Position:
    return Position(epoch, Lsn(lsn))


@pytest.mark.parametrize(
    ("a", "b", "epoch", "start"),
    [
        (None, None, 1, 500),
        (_at(1, 800), None, 1, 700),
        (_at(1, 800), _at(1, 1200), 1, 800),
        (_at(1, 800), None, 2, 5000),
        (_at(2, 5500), _at(1, 1200), 2, 5500),
        (_at(2, 5500), _at(2, 6500), 1, None),
        (_at(2, 5500), _at(1, 1200), 1, 1200),
        (None, None, 3, None),
    ],
)
def test_windows_before_the_watermarks_and_snapshots_of_an_epoch_are_not_read(
    a: Position | None, b: Position | None, epoch: int, start: int | None
) -> None:
    assert lowest_start([(A, a), (B, b)], SNAPSHOTS, epoch) == start
