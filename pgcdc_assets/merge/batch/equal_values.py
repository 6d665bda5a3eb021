"""Whether two values are equal: those that Postgres prints alike (`comparable_sql` in Spark)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Flags = npt.NDArray[np.bool_]
_Bounds = npt.NDArray[np.int64]


def is_same(left: pa.Array, right: pa.Array) -> Flags:
    """Return for each pair of values whether they are equal. NULL equals NULL, and -0 is not 0.

    Args:
        left: values of a type of `column_types.py`.
        right: as many values of the same type.
    """
    kind = left.type
    both_null = _flags(pc.and_(pc.is_null(left), pc.is_null(right)))
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        return both_null | _is_same_list(left, right)
    if pa.types.is_floating(kind):
        return both_null | _is_same_float(left, right)
    return both_null | _flags(pc.fill_null(pc.equal(left, right), False))


def _is_same_list(left: pa.Array, right: pa.Array) -> Flags:
    both = _flags(pc.and_(pc.is_valid(left), pc.is_valid(right)))
    found = np.zeros(len(left), np.bool_)
    pairs = np.flatnonzero(both)
    before, after = left.take(pa.array(pairs)), right.take(pa.array(pairs))
    begins, sizes = _bounds(before)
    others, other_sizes = _bounds(after)
    found[pairs] = sizes == other_sizes
    is_compared = (sizes == other_sizes) & (sizes > 0)
    pairs, sizes = pairs[is_compared], sizes[is_compared]
    if not len(pairs):
        return found
    mine = pa.array(_elements(begins[is_compared], sizes))
    theirs = pa.array(_elements(others[is_compared], sizes))
    same = np.ones(len(mine), np.bool_)
    for part, other in zip(_parts(before), _parts(after), strict=True):
        same &= is_same(part.take(mine), other.take(theirs))
    found[pairs] = np.logical_and.reduceat(same, np.cumsum(sizes) - sizes)
    return found


def _bounds(lists: pa.Array) -> tuple[_Bounds, _Bounds]:
    """Return where the elements of each list begin, and their number."""
    offsets = lists.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    return offsets[:-1], np.diff(offsets)


def _elements(begins: _Bounds, sizes: _Bounds) -> _Bounds:
    """Return the places of all elements of lists, list by list."""
    shift = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    places: _Bounds = np.arange(int(sizes.sum())) + shift
    return places


def _parts(lists: pa.Array) -> list[pa.Array]:
    return [lists.keys, lists.items] if pa.types.is_map(lists.type) else [lists.values]


def _is_same_float(left: pa.Array, right: pa.Array) -> Flags:
    both = _flags(pc.and_(pc.is_valid(left), pc.is_valid(right)))
    before, after = (side.fill_null(0.0).to_numpy(zero_copy_only=False) for side in (left, right))
    same = (before == after) & (np.signbit(before) == np.signbit(after))
    found: Flags = both & (same | (np.isnan(before) & np.isnan(after)))
    return found


def _flags(values: pa.Array) -> Flags:
    found: Flags = values.to_numpy(zero_copy_only=False)
    return found
