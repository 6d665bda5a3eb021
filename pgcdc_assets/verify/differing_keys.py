"""Comparison of two streams of digests, in the order of the digests of keys and rows."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from pgcdc_assets.verify.report import DifferenceKind

# The digests of key and row, the number of such rows in source and target, and the number of such
# rows of the target that may be kept rows of detached partitions.
_Rows = tuple[str, str, int, int, int]


def find_differing_keys(
    source: Iterable[tuple[str, str, int]], target: Iterable[tuple[str, str, int, int]]
) -> Iterator[tuple[DifferenceKind, str, int]]:
    """Compare two streams, and yield the differences: the digest of the key, and a number of rows.

    Rows may share a key. No more than one row of each side is in memory: a key may have any number
    of rows.

    Args:
        source: digests of key and row, and the number of such rows.
        target: the same, and the number of rows that may be kept rows of a detached partition, if
            only the target has the rows.
    """
    rows: Iterator[_Rows] = heapq.merge(
        ((key, row, count, 0, 0) for key, row, count in source),
        ((key, row, 0, count, old) for key, row, count, old in target),
    )
    for key, of_key in itertools.groupby(rows, key=itemgetter(0)):
        found = _OneSided()
        for _, equal in itertools.groupby(of_key, key=itemgetter(1)):
            found.add(equal)
        for kind, count in found.differences():
            if count:
                yield kind, key, count


@dataclass
class _OneSided:
    """The numbers of rows of one key that only one side has.

    Attributes:
        old: rows of `extra` that may be kept rows of a detached partition.
    """

    missing: int = 0
    extra: int = 0
    old: int = 0

    def add(self, equal: Iterable[_Rows]) -> None:
        """Add the rows of one digest."""
        ours = theirs = old = 0
        for _, _, in_source, in_target, may_be_old in equal:
            ours += in_source
            theirs += in_target
            old += may_be_old
        self.missing += max(0, ours - theirs)
        if theirs > ours:
            self.extra += theirs - ours
            self.old += old

    def differences(self) -> Iterator[tuple[DifferenceKind, int]]:
        """Yield the numbers by kind. A missing and an extra row of the key are one other row."""
        pairs = min(self.missing, self.extra)
        unpaired = self.extra - pairs
        kept = min(self.old, unpaired)
        yield DifferenceKind.DIFFERS, pairs
        yield DifferenceKind.MISSING, self.missing - pairs
        yield DifferenceKind.KEPT, kept
        yield DifferenceKind.EXTRA, unpaired - kept
