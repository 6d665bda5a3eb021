"""The disk space of nine small tables during merges of forty windows.

In this benchmark, a merge deletes replaced files without a minimum age if they exceed the size of
the table. In production, a table also uses the space of files that are replaced within the
retention.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.orders import OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.results import Result
from benchmarks.scale import roomy_folder, scaled
from benchmarks.side_by_side import OURS, SideBySide, path_of
from benchmarks.source import log
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.tables.state import open_table
from pgcdc_assets.tables.vacuum import vacuum_after_merge

TABLES = 9
ROWS = scaled(60_000, least=1_000)
CHANGES = 20
MERGES = scaled(40, least=2)


def run() -> Iterator[Result]:
    """Measure the used bytes, and the share of the deletion in the time of a merge."""
    with roomy_folder("disk", 1) as folder:
        books = {f"orders_{number}": OrderBook(ROWS, number) for number in range(TABLES)}
        raw = RawOrders(folder, books)
        spark = spark_session("pgcdc benchmark")
        looks, merges, ratios = [], [], []
        deleted = 0
        try:
            sides = SideBySide(spark, raw, books, recipes=())
            sides.copy()
            for _ in range(MERGES):
                window = sides.land(lambda book: book.versions(CHANGES, 1, ROWS))
                merges.append(sides.fold(window, 0)[OURS])
                began = time.perf_counter()
                for table in books:
                    path = path_of(raw, table)
                    deleted += vacuum_after_merge(raw.zone.lake, path, 0, 1.0).deleted_bytes
                looks.append(time.perf_counter() - began)
                used, live = _disk_and_live(raw, books)
                ratios.append(used / live)
        finally:
            spark.stop()
    log(f"{live / 1e6:.1f} MB live, {used / 1e6:.1f} MB on disk, {deleted / 1e6:.1f} MB deleted")
    yield Result.of("disk_after_40_merges_vs_kept", [used / 1e6], [(used + deleted) / 1e6], "MB")
    yield Result.against_limit("disk_to_live_bytes_at_most", ratios, 4, "times", value=max(ratios))
    yield Result.of("vacuum_after_merge_vs_merge", looks, merges, "s for nine tables")


def _disk_and_live(raw: RawOrders, books: dict[str, OrderBook]) -> tuple[int, int]:
    """Return the size of all files of the tables, and of the files of their newest versions."""
    used = live = 0
    for table in books:
        path = path_of(raw, table)
        used += sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        opened = open_table(raw.zone.lake, path)
        assert opened is not None
        live += sum(opened.get_add_actions().column("size_bytes").to_pylist())
    return used, live
