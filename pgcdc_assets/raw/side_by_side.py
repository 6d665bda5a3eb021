"""Readings of many tables of a lake.

In an object store, a table's newest commit costs requests that take tens of milliseconds each. One
after the other, the tables of a publication of 500 would take longer than the interval of a sensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pgcdc_assets.raw.lake import Lake

T = TypeVar("T")
R = TypeVar("R")

# Arrow's client of S3 has 25 connections.
READERS = 16


def read_each(lake: Lake, items: Sequence[T], read: Callable[[T], R]) -> Iterator[R]:
    """Yield what a function reads for each item, in order; in an object store several at a time.

    Args:
        read: a function that threads may call. Its first error ends the iteration.
    """
    if lake.is_local or len(items) < 2:
        yield from map(read, items)
        return
    with ThreadPoolExecutor(min(READERS, len(items)), "pgcdc-read") as pool:
        yield from pool.map(read, items)
