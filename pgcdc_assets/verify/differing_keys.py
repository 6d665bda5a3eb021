"""Comparison of two streams of digests, in the order of the digests of keys."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from pgcdc_assets.verify.report import DifferenceKind

# The digest of a row, and whether a row that only the target has is a kept row of a detached
# partition.
_TargetRow = tuple[str, bool]

_Row = TypeVar("_Row", tuple[str, str], tuple[str, str, bool])


def find_differing_keys(
    source: Iterable[tuple[str, str]], target: Iterable[tuple[str, str, bool]]
) -> Iterator[tuple[DifferenceKind, str]]:
    """Compare two streams in key order, and yield each difference with the digest of its key.

    Rows may share a key.

    Args:
        source: digests of key and row.
        target: digests of key and row, and whether the row may be a kept row of a detached
            partition, if only the target has the row.
    """
    ours = ((key, [digest for _, digest in rows]) for key, rows in _runs(source))
    theirs = ((key, [(digest, old) for _, digest, old in rows]) for key, rows in _runs(target))
    mine, other = next(ours, None), next(theirs, None)
    while mine is not None or other is not None:
        if other is None or (mine is not None and mine[0] < other[0]):
            assert mine is not None
            yield from itertools.repeat((DifferenceKind.MISSING, mine[0]), len(mine[1]))
            mine = next(ours, None)
        elif mine is None or other[0] < mine[0]:
            yield from _only_in_target(other[0], [old for _, old in other[1]])
            other = next(theirs, None)
        else:
            yield from _of_one_key(mine[0], mine[1], other[1])
            mine, other = next(ours, None), next(theirs, None)


def _of_one_key(
    key: str, mine: list[str], other: list[_TargetRow]
) -> Iterator[tuple[DifferenceKind, str]]:
    digests = [digest for digest, _ in other]
    if mine == digests:
        return
    only_mine, only_other = Counter(mine) - Counter(digests), Counter(digests) - Counter(mine)
    pairs = min(only_mine.total(), only_other.total())
    yield from itertools.repeat((DifferenceKind.DIFFERS, key), pairs)
    yield from itertools.repeat((DifferenceKind.MISSING, key), only_mine.total() - pairs)
    old = sorted((old for digest, old in other if digest in only_other), reverse=True)
    yield from _only_in_target(key, old[: only_other.total() - pairs])


def _only_in_target(key: str, old: Sequence[bool]) -> Iterator[tuple[DifferenceKind, str]]:
    for is_old in old:
        yield DifferenceKind.KEPT if is_old else DifferenceKind.EXTRA, key


def _runs(rows: Iterable[_Row]) -> Iterator[tuple[str, list[_Row]]]:
    for key, group in itertools.groupby(rows, key=lambda row: row[0]):
        yield key, list(group)
