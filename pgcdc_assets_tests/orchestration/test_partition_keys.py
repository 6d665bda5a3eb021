"""Partition keys: the keys to prune, and the snapshots of one run."""

from __future__ import annotations

from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.orchestration.partitions import (
    build_range_tags,
    build_shown_range_tags,
    find_surplus_keys,
    group_neighbours,
)

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


def test_a_run_of_a_range_has_no_other_keys_than_its_windows() -> None:
    """A range follows the order in which the keys were added."""
    first, second, third = WINDOWS[:3]
    keys = [window.key for window in WINDOWS]
    whole, newest = build_range_tags(first.key, third.key), build_range_tags(third.key, third.key)
    assert build_shown_range_tags(keys, [first, second, third]) == whole
    assert build_shown_range_tags([keys[1], *keys[:1], *keys[2:]], WINDOWS[:3]) == newest
    assert build_shown_range_tags([keys[0], "typed", *keys[1:]], WINDOWS[:3]) == newest
