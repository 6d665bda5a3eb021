"""Two sorted streams of digests: missing keys, extra keys, and keys with another row."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest

from pgcdc_assets.verify.compare_digests import _grouped
from pgcdc_assets.verify.differing_keys import find_differing_keys
from pgcdc_assets.verify.report import DifferenceKind

M, E, D = DifferenceKind.MISSING, DifferenceKind.EXTRA, DifferenceKind.DIFFERS
K = DifferenceKind.KEPT


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        ([], [], []),
        (["a1", "b1"], ["a1", "b1"], []),
        (["a1", "b1"], ["b1"], [(M, "a")]),
        (["b1"], ["a1", "b1", "c1"], [(E, "a"), (E, "c")]),
        (["a1", "b1"], ["a1", "b2"], [(D, "b")]),
        (["a1"], ["a1", "a1"], [(E, "a")]),
        (["a1", "a1"], ["a1"], [(M, "a")]),
        (["a1", "a2"], ["a2", "a1"], []),
        (["a1", "a2"], ["a2", "a3", "a4"], [(D, "a"), (E, "a")]),
        ([], ["a1"], [(E, "a")]),
        (["a1", "a1", "a1", "a2"], ["a3", "a4"], [(D, "a"), (D, "a"), (M, "a"), (M, "a")]),
        # A star marks a row from before the partition was detached.
        (["b1"], ["a1*", "b1*", "c1"], [(K, "a"), (E, "c")]),
        (["a1", "b1"], ["a2*"], [(D, "a"), (M, "b")]),
        (["a1"], ["a1*", "a1*"], [(K, "a")]),
        (["a1"], ["a1", "a2*", "a3"], [(K, "a"), (E, "a")]),
        (["a1"], ["a1", "a1*", "a1"], [(K, "a"), (E, "a")]),
    ],
)
def test_rows_are_compared_by_key_and_counted(
    source: list[str], target: list[str], found: list[tuple[DifferenceKind, str]]
) -> None:
    ours, theirs = Counter(source), Counter(row[:2] for row in target)
    old = Counter(row[:2] for row in target if row.endswith("*"))
    differing = find_differing_keys(
        [(row[0], row[1], count) for row, count in sorted(ours.items())],
        [(row[0], row[1], count, old[row]) for row, count in sorted(theirs.items())],
    )
    assert [(kind, key) for kind, key, count in differing for _ in range(count)] == found


def test_the_rows_of_one_key_need_no_memory() -> None:
    """A key of the settings that identifies no row of the source."""
    rows = (("a", f"{number:06}", 1) for number in range(200_000))
    tracemalloc.start()
    try:
        found = list(find_differing_keys(rows, [("a", "000000", 1, 0)]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [(M, "a", 199_999)]
    assert peak < 1_000_000


def test_buckets_are_grouped_up_to_a_number_of_rows() -> None:
    sizes = {"a": 300_000, "b": 300_000, "c": 100_000, "d": 900_000, "e": 1}
    assert list(_grouped(sizes)) == [["a"], ["b", "c"], ["d"], ["e"]]
