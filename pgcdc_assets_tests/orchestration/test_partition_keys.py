"""Partition keys: the keys to prune, and the snapshots of one run."""

from __future__ import annotations

from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.orchestration.partitions import find_surplus_keys, group_neighbours

WINDOWS = [LsnWindow.of(1, start, start + 10) for start in range(0, 50, 10)]


def test_the_oldest_keys_above_the_number_to_keep_are_pruned() -> None:
    merged = Position(1, Lsn(50))
    assert find_surplus_keys(WINDOWS[::-1], 3, merged) == [w.key for w in WINDOWS[:2]]


def test_a_key_that_a_table_has_not_merged_is_kept() -> None:
    assert find_surplus_keys(WINDOWS, 1, Position(1, Lsn(20))) == [w.key for w in WINDOWS[:2]]
    assert find_surplus_keys(WINDOWS, 1, None) == []


def test_nothing_is_pruned_below_the_number_to_keep() -> None:
    assert find_surplus_keys(WINDOWS, 5, Position(9, Lsn(0))) == []


def test_snapshots_of_neighbouring_tables_are_one_run() -> None:
    order = ["a", "b", "c", "d", "e"]
    assert group_neighbours(order, order) == [("a", "e")]
    assert group_neighbours(order, ["a", "c", "d"]) == [("a", "a"), ("c", "d")]
    assert group_neighbours(order, ["e"]) == [("e", "e")]
    assert group_neighbours(order, []) == []
