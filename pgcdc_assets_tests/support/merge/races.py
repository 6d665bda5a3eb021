"""Races of two merges of a table: the tables, and the times of the other merge."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import (
    Change,
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

COPIED = [["1", "a"], ["2", "b"], ["3", "c"]]


@dataclass(frozen=True)
class Race:
    """A table, two windows after its snapshot, and the expected content.

    Attributes:
        columns: the compared columns.
        identity: the replica identity; with FULL the table has no key.
        operation: the operation of the overtaken merge.
    """

    target: CdcTable
    columns: str
    first: Sequence[Change]
    second: Sequence[Change]
    outcome: Sequence[tuple[Any, ...]]
    identity: str = "d"
    operation: str = "MERGE"

    def land_snapshot(self, zone: RawZone) -> Landing:
        """Land the snapshot."""
        keys = () if self.identity == "f" else ("id",)
        described = relation(column("id"), column("v", "text"), key=keys, identity=self.identity)
        landing = Landing(zone, [described])
        landing.begin(COPIED)
        landing.land([])
        return landing

    def contents(self, spark: SparkSession, path: str) -> list[tuple[Any, ...]]:
        """Return the content of the table."""
        names = self.columns.split(", ")
        rows = spark.read.format("delta").load(path).select(*names).collect()
        return sorted(tuple(row) for row in rows)


UPDATED = [update("1", "A"), delete("2", None), insert("2", "again")]
GONE = [update("1", "AA"), insert("4", "d"), delete("3", None)]
VERSIONS = [
    *[(1, "A", False), (1, "AA", True), (1, "a", False), (2, "again", True), (2, "b", False)],
    *[(3, "c", False), (4, "d", True)],
]
ITEMS = CdcTable("shop", "items")
HISTORY = CdcTable("shop", "items", scd=(2,))
BAG = Race(
    ITEMS,
    "id, v",
    [insert("3", "c"), delete("2", "b", old_kind="O")],
    [insert("4", "d"), delete("1", "a", old_kind="O")],
    [(3, "c"), (3, "c"), (4, "d")],
    identity="f",
)

RACES = {
    # The row gets another key and keeps its TOASTed value, and another row gets the old key.
    "current_image": Race(
        ITEMS,
        "id, v",
        [update("5", None, old=["1", None], unchanged=(1,)), insert("1", "another")],
        [update("5", None, unchanged=(1,))],
        [(1, "another"), (2, "b"), (3, "c"), (5, "a")],
    ),
    "whole_table": Race(
        ITEMS, "id, v", UPDATED, GONE, [(1, "AA"), (2, "again"), (4, "d")], operation="WRITE"
    ),
    "truncated": Race(
        ITEMS, "id, v", UPDATED, [truncate(), insert("9", "z")], [(9, "z")], operation="WRITE"
    ),
    "soft_deletes": Race(
        CdcTable("shop", "items", soft_deletes=True),
        "id, v, _deleted",
        UPDATED,
        GONE,
        [(1, "AA", False), (2, "again", False), (3, "c", True), (4, "d", False)],
    ),
    "history": Race(HISTORY, "id, v, _is_current", UPDATED, GONE, VERSIONS),
    "range_of_history": Race(
        HISTORY, "id, v, _is_current", UPDATED, GONE, VERSIONS, operation="WRITE"
    ),
    "bag": BAG,
    "log": Race(
        CdcTable("shop", "items", without_key="log"),
        "id, v, _op",
        BAG.first,
        BAG.second,
        [
            *[(1, "a", "D"), (1, "a", "S"), (2, "b", "D"), (2, "b", "S")],
            *[(3, "c", "I"), (3, "c", "S"), (4, "d", "I")],
        ],
        identity="f",
        operation="WRITE",
    ),
}


def write_as_asked(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Spark write, and let the race choose the operation that writes a history."""
    merge_by_spark(monkeypatch)
    most = 1_000_000 if race.operation == "WRITE" else 0
    monkeypatch.setattr("pgcdc_assets.merge.kinds.history.REPLACED_PER_CHANGE", most)


# The other kinds are written by the same operations.
_IN_SHORT_RUN = ("current_image", "whole_table", "history", "range_of_history", "bag")
each_kind = pytest.mark.parametrize(
    "race",
    [
        pytest.param(race, id=name, marks=() if name in _IN_SHORT_RUN else pytest.mark.soak)
        for name, race in RACES.items()
    ],
)


@contextmanager
def right_before_the_write(spark: SparkSession, act: Callable[[], Any]) -> Iterator[None]:
    """Act once, directly before Spark's commit, without code of the package in between."""
    acts = [act]
    nothing = spark.range(0)

    def patch(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def late(*args: Any, **more: Any) -> Any:
            if acts and (name != "sql" or args[1].startswith("MERGE")):
                acts.pop()()
            return real(*args, **more)

        patched.setattr(owner, name, late)

    with pytest.MonkeyPatch.context() as patched:
        patch(type(nothing.write), "save")
        patch(type(nothing.writeTo("t")), "createOrReplace")
        patch(type(spark), "sql")
        yield
    assert not acts


@contextmanager
def during_the_write(spark: SparkSession, folder: Path, act: Callable[[], Any]) -> Iterator[None]:
    """Act while Spark computes the written rows. Spark continues after the action.

    One task waits for the action. The others continue, because the action needs their task slots.
    """
    begun, done, is_over = str(folder / "begun"), str(folder / "done"), threading.Event()

    def wait(_: Any) -> bool:
        try:
            Path(begun).touch(exist_ok=False)
        except FileExistsError:
            return True
        for _ in range(1_200):
            if Path(done).exists():
                return True
            time.sleep(0.05)
        return False

    def interfere() -> None:
        while not Path(begun).exists() and not is_over.is_set():
            time.sleep(0.02)
        patched.undo()
        try:
            act()
        finally:
            Path(done).touch()

    kind: Any = type(spark.range(0))
    write, view = kind.write.fget, kind.createOrReplaceTempView
    waits = F.udf(wait, "boolean", useArrow=True)(F.lit(1))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kind, "write", property(lambda rows: write(rows.where(waits))))
        patched.setattr(
            kind, "createOrReplaceTempView", lambda rows, name: view(rows.where(waits), name)
        )
        thread = threading.Thread(target=interfere)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
