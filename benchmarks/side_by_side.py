"""Our merge and the recipe over the same raw zone, each with its own tables.

Every repetition folds a window that neither has seen into tables that grew by the ones before, so
nothing is copied or undone between them. In the end both must hold the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from benchmarks.orders import SCHEMA, Changes, OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.recipe import Recipe
from benchmarks.source import log
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import MergeFailure, TableTarget, merge_tables
from pgcdc_assets.merge.sql import delta_table
from pgcdc_assets.merge.watermark import table_path

COLUMNS = ("id", "customer_id", "status", "amount", "note", "updated_at")

Contents = tuple[int, int]


def timed(action: Callable[[], None]) -> float:
    """Give the seconds that an action takes."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


def merge_ours(
    spark: SparkSession,
    raw: RawOrders,
    tables: Sequence[str],
    through: LsnWindow,
    scd: int = 1,
) -> None:
    """Fold tables through a window's end; a table that is not merged ends the benchmark."""
    targets = [TableTarget(SCHEMA, table, scd=(scd,)) for table in tables]
    for report in merge_tables(spark, raw.zone, targets, through):
        if isinstance(report, MergeFailure):
            raise SystemExit(f"{report.table} was not merged: {report.error}")


def path_of(raw: RawOrders, table: str, scd: int = 1) -> str:
    """Say where one of our tables lies."""
    return table_path(raw.zone.lake, raw.zone.name, SCHEMA, table, scd)


def contents(spark: SparkSession, path: str, condition: str = "true") -> Contents:
    """Count a table's rows, and add up the hashes of what the source's columns hold."""
    (row,) = spark.sql(
        f"SELECT count(*) AS n, sum(CAST(xxhash64({', '.join(COLUMNS)}) AS DECIMAL(38, 0))) AS h "
        f"FROM {delta_table(path)} WHERE {condition}"
    ).collect()
    return int(row["n"]), int(row["h"] or 0)


@dataclass
class SideBySide:
    """The tables of some order books, kept by both."""

    spark: SparkSession
    raw: RawOrders
    books: Mapping[str, OrderBook]
    _first: LsnWindow = field(init=False)

    def __post_init__(self) -> None:
        self.recipe = Recipe(self.spark, self.raw.zone)
        self._first = self.raw.land([])

    def land(self, change: Callable[[OrderBook], Changes]) -> LsnWindow:
        """Land a window with changes of every table."""
        return self.raw.land([(table, change(book)) for table, book in self.books.items()])

    def copy(self) -> None:
        """Make the tables: ours by the first merge, the recipe's by a plain write."""
        tables = list(self.books)
        ours = timed(lambda: merge_ours(self.spark, self.raw, tables, self._first))
        theirs = timed(self._copy_by_recipe)
        rows = sum(book.copied_rows for book in self.books.values())
        log(f"{rows:,} rows copied: ours {ours:.1f} s, recipe {theirs:.1f} s")

    def fold(self, window: LsnWindow, *, ours_first: bool) -> tuple[float, float]:
        """Fold a window by both; give our seconds and the recipe's."""
        if ours_first:
            mine = timed(lambda: self._merge_ours(window))
            return mine, timed(lambda: self._merge_by_recipe(window))
        theirs = timed(lambda: self._merge_by_recipe(window))
        return timed(lambda: self._merge_ours(window)), theirs

    def check(self) -> None:
        """See that both hold the rows that the books have, and the same values in them."""
        for table, book in self.books.items():
            ours = contents(self.spark, path_of(self.raw, table))
            theirs = contents(self.spark, self.recipe.path(table))
            if not ours == theirs or ours[0] != book.row_count:
                raise SystemExit(
                    f"{table} should have {book.row_count} rows; ours has {ours}, the recipe's "
                    f"{theirs} (rows, sum of hashes)"
                )

    def _merge_ours(self, window: LsnWindow) -> None:
        merge_ours(self.spark, self.raw, list(self.books), window)

    def _merge_by_recipe(self, window: LsnWindow) -> None:
        for table in self.books:
            self.recipe.merge(table, window)

    def _copy_by_recipe(self) -> None:
        for table in self.books:
            known = DeltaTable(path_of(self.raw, table)).metadata().configuration
            delta = {name: value for name, value in known.items() if name.startswith("delta.")}
            self.recipe.write_copy(table, delta)
