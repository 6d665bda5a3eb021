"""One action for many tables of a lake.

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
AT_A_TIME = 16


def map_tables(lake: Lake, tables: Sequence[T], act: Callable[[T], R]) -> Iterator[R]:
    """Yield the result of an action for each table, in order; in an object store several at a time.

    Args:
        act: a function that threads may call. Its first error ends the iteration.
    """
    if lake.is_local or len(tables) < 2:
        yield from map(act, tables)
        return
    with ThreadPoolExecutor(min(AT_A_TIME, len(tables)), "pgcdc-tables") as pool:
        yield from pool.map(act, tables)
