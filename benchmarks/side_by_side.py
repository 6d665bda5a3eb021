"""The package's merge and recipes over the same raw zone, each with its own tables.

Every repetition folds a new window into the tables, which grow with each repetition. Nothing is
reset between repetitions. At the end, all tables must have the same rows.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import SparkSession

from benchmarks.orders import SCHEMA, Changes, OrderBook
from benchmarks.raw_orders import RawOrders
from benchmarks.recipe import Recipe
from benchmarks.scale import roomy_folder
from benchmarks.source import log
from benchmarks.turns import in_turns
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import MergeFailure, merge_tables
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.state import table_path

OURS = "ours"
COLUMNS = ("id", "customer_id", "status", "amount", "note", "updated_at")

Contents = tuple[int, int]


def timed(action: Callable[[], None]) -> float:
    """Return the seconds of an action."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


def merge_ours(
    spark: SparkSession,
    raw: RawOrders,
    tables: Sequence[str],
    through: LsnWindow,
    scd: int = 1,
    root: str | None = None,
) -> None:
    """Fold tables through a window's end. A failed table ends the benchmark.

    Args:
        root: as in `merge_tables`.
    """
    targets = [CdcTable(SCHEMA, table, scd=(scd,)) for table in tables]
    for report in merge_tables(spark, raw.zone, targets, through, root=root):
        if isinstance(report, MergeFailure):
            raise SystemExit(f"{report.table} was not merged: {report.error}")


def path_of(raw: RawOrders, table: str, scd: int = 1, root: str | None = None) -> str:
    """Return the path of a table of the package."""
    return table_path(raw.zone.lake, raw.zone.name, SCHEMA, table, scd, root)


def contents(spark: SparkSession, path: str, condition: str = "true") -> Contents:
    """Return a table's row count, and the sum of the hashes of its source columns."""
    (row,) = spark.sql(
        f"SELECT count(*) AS n, sum(CAST(xxhash64({', '.join(COLUMNS)}) AS DECIMAL(38, 0))) AS h "
        f"FROM {delta_table(path)} WHERE {condition}"
    ).collect()
    return int(row["n"]), int(row["h"] or 0)


@contextmanager
def landed_orders(
    name: str, gigabytes: float, rows: int, table: str
) -> Iterator[tuple[SparkSession, RawOrders, OrderBook]]:
    """Land one table of orders for the block, and open an embedded session.

    Args:
        name: of the folder that is deleted at the end.
        gigabytes: that the folder needs.
    """
    with roomy_folder(name, gigabytes) as folder:
        book = OrderBook(rows)
        raw = RawOrders(folder, {table: book})
        log(f"{rows:,} rows landed")
        spark = spark_session("pgcdc benchmark")
        try:
            yield spark, raw, book
        finally:
            spark.stop()


def current_contents(spark: SparkSession, raw: RawOrders, table: str) -> Contents:
    """Return the contents of a current image, and check that a history's current rows are equal."""
    image = contents(spark, path_of(raw, table))
    current = contents(spark, path_of(raw, table, 2), "_is_current")
    if image != current:
        raise SystemExit(
            f"SCD1 has {image}, SCD2's current rows are {current} (rows, sum of hashes)"
        )
    return image


@dataclass
class SideBySide:
    """The tables of some order books, with a table per side.

    Attributes:
        recipes: names of `recipe.RECIPES`.
    """

    spark: SparkSession
    raw: RawOrders
    books: Mapping[str, OrderBook]
    recipes: Sequence[str] = ("recipe",)
    _first: LsnWindow = field(init=False)

    def __post_init__(self) -> None:
        self._recipes = {name: Recipe(self.spark, self.raw.zone, name) for name in self.recipes}
        self._first = self.raw.land([])

    def land(self, change: Callable[[OrderBook], Changes]) -> LsnWindow:
        """Land a window with changes of every table."""
        return self.raw.land([(table, change(book)) for table, book in self.books.items()])

    def copy(self) -> None:
        """Create the package's tables by the first merge, and a recipe's by a plain write."""
        taken = {OURS: timed(lambda: self._merge_ours(self._first))}
        for name, recipe in self._recipes.items():
            taken[name] = timed(partial(self._for_each, recipe.write_copy))
        rows = sum(book.copied_rows for book in self.books.values())
        log(f"{rows:,} rows copied: {shown(taken)}")

    def fold(self, window: LsnWindow, number: int) -> dict[str, float]:
        """Fold a window by all sides, and return the seconds of each side.

        Args:
            number: number of the repetition, which determines the first side.
        """
        merges: dict[str, Callable[[], None]] = {OURS: partial(self._merge_ours, window)}
        for name, recipe in self._recipes.items():
            merge = partial(recipe.merge, window=window)
            merges[name] = partial(self._for_each, merge)
        return in_turns({name: partial(timed, merge) for name, merge in merges.items()}, number)

    def check(self, most: int | None = None) -> None:
        """Check that all tables have the rows and the values of the books.

        Args:
            most: the number of tables to check; None: all.
        """
        for table, book in list(self.books.items())[:most]:
            found = {OURS: contents(self.spark, path_of(self.raw, table))}
            for name, recipe in self._recipes.items():
                found[name] = contents(self.spark, recipe.path(table))
            if len(set(found.values())) > 1 or found[OURS][0] != book.row_count:
                raise SystemExit(
                    f"{table} should have {book.row_count} rows; (rows, sum of hashes): {found}"
                )

    def _merge_ours(self, window: LsnWindow) -> None:
        merge_ours(self.spark, self.raw, list(self.books), window)

    def _for_each(self, action: Callable[[str], None]) -> None:
        for table in self.books:
            action(table)


def fold_each(
    fold: Callable[[LsnWindow, int], dict[str, float]],
    windows: Sequence[LsnWindow],
    warm_up: int,
    label: str,
) -> dict[str, list[float]]:
    """Fold windows, and return the seconds of each side after the first windows.

    Args:
        fold: `SideBySide.fold`.
        warm_up: number of the first windows.
        label: the first words of the lines of the log.
    """
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for number, window in enumerate(windows):
        taken = fold(window, number)
        log(f"{label}: {shown(taken)}")
        if number >= warm_up:
            for side, each in taken.items():
                seconds[side].append(each)
    return seconds


def shown(taken: Mapping[str, float]) -> str:
    """Return the seconds of each side as text."""
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in taken.items())
