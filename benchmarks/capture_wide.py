"""Peak memory of the capture of a table with 800 columns and of a table with 8 columns.

The stream of both tables has the same size. One column of sixteen has an integer, and the other
columns are NULL, as in many tables with hundreds of columns. In the stream, a NULL has one byte. A
decoded value needs many times as much. A batch is therefore bounded by its values and by its bytes.
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
# Number of rows by number of columns, for about 51 MB of stream.
ROWS = {800: scaled(40_000), 8: scaled(900_000)}
_WIDE, _NARROW = ROWS
_TRANSACTION_ROWS = 1_000


def run() -> Iterator[Result]:
    """Measure both tables, each on a separate server."""
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
