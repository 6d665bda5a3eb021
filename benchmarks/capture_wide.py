"""Capture of a table of 800 columns beside one of 8: the peak memory for as many bytes.

One column of sixteen has an integer, the others are NULL, as in many tables of hundreds of columns.
On the wire, a NULL is one byte, and a decoded value is many times that. A batch is therefore
bounded by its number of values as well as by its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import psycopg2.extensions

from benchmarks import workload
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.source import CaptureUsage, log, source
from benchmarks.turns import in_turns

REPETITIONS = 3
# By number of columns: rows that the server sends as about 51 MB.
ROWS = {800: scaled(40_000), 8: scaled(900_000)}
_WIDE, _NARROW = ROWS
_TRANSACTION_ROWS = 1_000


def run() -> Iterator[Result]:
    """Measure both tables, each on a server of its own."""
    sides = {}
    with ExitStack() as stack:
        for columns in ROWS:
            server = stack.enter_context(source(partial(_insert_rows, columns=columns)))
            sides[f"{columns} columns"] = server.capture
        peaks: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(REPETITIONS):
            taken: dict[str, CaptureUsage] = in_turns(sides, number)
            for side, usage in taken.items():
                peaks[side].append(usage.peak_mb)
            log("; ".join(f"{side} {usage}" for side, usage in taken.items()))
    wide, narrow = peaks.values()
    yield Result.of("capture_wide_table_memory", wide, narrow, "MB")


def _insert_rows(conn: psycopg2.extensions.connection, columns: int) -> int:
    """Commit the rows of a table of `columns` columns, and return their number."""
    names = [f"c{number}" for number in range(1, columns)]
    values = ["i" if number % 16 == 0 else "null" for number in range(1, columns)]
    rows = ROWS[columns]
    with conn.cursor() as cursor:
        cursor.execute(
            f"create table wide (id bigint primary key, {', '.join(f'{n} int' for n in names)})"
        )
        cursor.execute(f"alter publication {workload.PUBLICATION} set table wide")
        for first in range(1, rows + 1, _TRANSACTION_ROWS):
            last = min(first + _TRANSACTION_ROWS - 1, rows)
            cursor.execute(
                f"insert into wide select i, {', '.join(values)} from generate_series({first}, "
                f"{last}) i"
            )
    return rows
