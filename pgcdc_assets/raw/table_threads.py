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
    count = min(thread_count(lake, 1), len(tables))
    if count < 2:
        yield from map(act, tables)
        return
    with ThreadPoolExecutor(count, "pgcdc-tables") as pool:
        yield from pool.map(act, tables)


def thread_count(lake: Lake, local: int, most: int = AT_A_TIME) -> int:
    """Return the number of threads for work on several tables that waits for the lake.

    Args:
        local: the number for a local lake, and the least number for an object store.
        most: the number for an object store.
    """
    return local if lake.is_local else max(local, min(most, AT_A_TIME))
