"""Merges that another merge overtakes: they write nothing, whatever the kind of table.

The other merge runs at the worst moments: right before Spark is asked to write, and while Spark
writes.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.errors import TransientError
from pgcdc_assets.merge import (
    MergeFailure,
    MergeReport,
    TableTarget,
    lasting,
    merge_tables,
    watermark,
)
from pgcdc_assets.merge.one_table import IDLE_WINDOWS
from pgcdc_assets.merge.sql import delta_table
from pgcdc_assets.merge.watermark import read_watermark, table_path
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.rebuild import rebuild_table
from pgcdc_assets_tests.merge.history import (
    Change,
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from pgcdc_assets_tests.merge.one_table import merge

pytestmark = pytest.mark.spark

_COPIED = [["1", "a"], ["2", "b"], ["3", "c"]]


@dataclass(frozen=True)
class _Race:
    """A table, two windows after its copy, and what it holds then.

    Attributes:
        columns: that are compared.
        identity: the replica identity; under FULL the table has no key.
        operation: how the overtaken merge writes.
    """

    target: TableTarget
    columns: str
    first: Sequence[Change]
    second: Sequence[Change]
    outcome: Sequence[tuple[Any, ...]]
    identity: str = "d"
    operation: str = "MERGE"

    def land_copy(self, zone: RawZone) -> Landing:
        """Land the copy."""
        keys = () if self.identity == "f" else ("id",)
        described = relation(column("id"), column("v", "text"), key=keys, identity=self.identity)
        landing = Landing(zone, [described])
        landing.begin(_COPIED)
        landing.land([])
        return landing

    def contents(self, spark: SparkSession, path: str) -> list[tuple[Any, ...]]:
        """What the table holds."""
        names = self.columns.split(", ")
        rows = spark.read.format("delta").load(path).select(*names).collect()
        return sorted(tuple(row) for row in rows)


_UPDATED = [update("1", "A"), delete("2", None), insert("2", "again")]
_GONE = [update("1", "AA"), insert("4", "d"), delete("3", None)]
_VERSIONS = [
    *[(1, "A", False), (1, "AA", True), (1, "a", False), (2, "again", True), (2, "b", False)],
    *[(3, "c", False), (4, "d", True)],
]
_ITEMS = TableTarget("shop", "items")
_HISTORY = TableTarget("shop", "items", scd=(2,))
_BAG = _Race(
    _ITEMS,
    "id, v",
    [insert("3", "c"), delete("2", "b", old_kind="O")],
    [insert("4", "d"), delete("1", "a", old_kind="O")],
    [(3, "c"), (3, "c"), (4, "d")],
    identity="f",
)

_RACES = {
    # The row moves and keeps its TOASTed value, and another row takes its old key.
    "current_image": _Race(
        _ITEMS,
        "id, v",
        [update("5", None, old=["1", None], unchanged=(1,)), insert("1", "another")],
        [update("5", None, unchanged=(1,))],
        [(1, "another"), (2, "b"), (3, "c"), (5, "a")],
    ),
    "whole_table": _Race(
        _ITEMS, "id, v", _UPDATED, _GONE, [(1, "AA"), (2, "again"), (4, "d")], operation="WRITE"
    ),
    "truncated": _Race(
        _ITEMS, "id, v", _UPDATED, [truncate(), insert("9", "z")], [(9, "z")], operation="WRITE"
    ),
    "soft_deletes": _Race(
        TableTarget("shop", "items", soft_deletes=True),
        "id, v, _deleted",
        _UPDATED,
        _GONE,
        [(1, "AA", False), (2, "again", False), (3, "c", True), (4, "d", False)],
    ),
    "history": _Race(_HISTORY, "id, v, _is_current", _UPDATED, _GONE, _VERSIONS),
    "range_of_history": _Race(
        _HISTORY, "id, v, _is_current", _UPDATED, _GONE, _VERSIONS, operation="WRITE"
    ),
    "bag": _BAG,
    "log": _Race(
        TableTarget("shop", "items", without_key="log"),
        "id, v, _op",
        _BAG.first,
        _BAG.second,
        [
            *[(1, "a", "D"), (1, "a", "S"), (2, "b", "D"), (2, "b", "S")],
            *[(3, "c", "I"), (3, "c", "S"), (4, "d", "I")],
        ],
        identity="f",
        operation="WRITE",
    ),
}
_each_kind = pytest.mark.parametrize("race", _RACES.values(), ids=_RACES)


@pytest.fixture(autouse=True)
def as_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a history be written as the race says."""
    race = request.node.callspec.params.get("race", _BAG)
    most = 1_000_000 if race.operation == "WRITE" else 0
    monkeypatch.setattr(lasting, "REPLACED_PER_CHANGE", most)


@contextmanager
def _right_before_the_write(spark: SparkSession, act: Callable[[], Any]) -> Iterator[None]:
    """Act once, right before Spark is asked to commit: no code of ours runs between."""
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
def _during_the_write(spark: SparkSession, folder: Path, act: Callable[[], Any]) -> Iterator[None]:
    """Act once Spark works on the rows that are written; it goes on when that is done."""
    begun, done, is_over = str(folder / "begun"), str(folder / "done"), threading.Event()

    def wait(_: Any) -> bool:
        Path(begun).touch()
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

    kind = type(spark.range(0))
    write, view = kind.write.fget, kind.createOrReplaceTempView
    waits = F.udf(wait, "boolean")(F.lit(1))
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


def _fails(spark: SparkSession, landing: Landing, target: TableTarget) -> None:
    """The next merge must fail as one that may be tried again, and write nothing."""
    (failure,) = merge_tables(spark, landing.zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TransientError), failure.error


def _position(landing: Landing, target: TableTarget) -> tuple[int, int] | None:
    zone = landing.zone
    return read_watermark(zone.lake, zone.name, target.schema, target.table, target.scd[0])


def _forget_fence(path: str) -> None:
    """Take out of a table's log what earlier releases did not write."""
    for entry in sorted(Path(path, "_delta_log").glob("*.json")):
        lines = entry.read_text().splitlines()
        kept = [line for line in lines if ":fence" not in line and ":settled" not in line]
        entry.write_text("\n".join(kept) + "\n")
        entry.with_name(f".{entry.name}.crc").unlink(missing_ok=True)
        entry.with_suffix(".crc").unlink(missing_ok=True)


@_each_kind
def test_a_merge_that_another_overtakes_right_before_its_write_writes_nothing(
    spark: SparkSession, zone: RawZone, race: _Race
) -> None:
    landing = race.land_copy(zone)
    path = merge(spark, landing, race.target).path
    first = landing.land(race.first)
    last = landing.land(race.second)
    with _right_before_the_write(spark, lambda: merge(spark, landing, race.target, first)):
        _fails(spark, landing, race.target)
    assert _position(landing, race.target) == (1, first.end)
    merge(spark, landing, race.target)
    assert race.contents(spark, path) == race.outcome
    assert _position(landing, race.target) == (1, last.end)


@pytest.mark.parametrize(
    "race",
    [
        pytest.param(_RACES[name], id=name, marks=() if name == "bag" else pytest.mark.soak)
        for name in ("current_image", "whole_table", "range_of_history", "bag")
    ],
)
def test_a_merge_that_another_overtakes_during_its_write_writes_nothing(
    spark: SparkSession, zone: RawZone, tmp_path: Path, race: _Race
) -> None:
    landing = race.land_copy(zone)
    path = merge(spark, landing, race.target).path
    first = landing.land(race.first)
    landing.land(race.second)
    with _during_the_write(spark, tmp_path, lambda: merge(spark, landing, race.target, first)):
        _fails(spark, landing, race.target)
    assert _position(landing, race.target) == (1, first.end)
    merge(spark, landing, race.target)
    assert race.contents(spark, path) == race.outcome


def test_of_two_merges_that_make_a_table_one_does(spark: SparkSession, zone: RawZone) -> None:
    landing = _BAG.land_copy(zone)
    first = landing.land(_BAG.first)
    landing.land(_BAG.second)
    with _right_before_the_write(spark, lambda: merge(spark, landing, _BAG.target, first)):
        _fails(spark, landing, _BAG.target)
    assert _position(landing, _BAG.target) == (1, first.end)
    report = merge(spark, landing, _BAG.target)
    assert _BAG.contents(spark, report.path) == _BAG.outcome


def test_a_newer_copy_that_another_merge_has_applied_is_not_applied_again(
    spark: SparkSession, zone: RawZone
) -> None:
    """Its rows would take the place of changes that the other merge folded."""
    landing = _BAG.land_copy(zone)
    landing.land([insert("7", "old")])
    path = merge(spark, landing, _BAG.target).path
    landing.land([])
    landing.copy(_COPIED)
    first = landing.land(_BAG.first)
    landing.land(_BAG.second)
    with _right_before_the_write(spark, lambda: merge(spark, landing, _BAG.target, first)):
        _fails(spark, landing, _BAG.target)
    assert _position(landing, _BAG.target) == (1, first.end)
    merge(spark, landing, _BAG.target)
    assert _BAG.contents(spark, path) == _BAG.outcome


def test_a_merge_that_a_rebuild_overtakes_writes_nothing(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = _BAG.land_copy(zone)
    path = merge(spark, landing, _BAG.target).path
    first = landing.land(_BAG.first)
    landing.land(_BAG.second)

    def rebuild() -> None:
        rebuild_table(spark, zone, _BAG.target, 1, first.end)

    with _right_before_the_write(spark, rebuild):
        _fails(spark, landing, _BAG.target)
    assert _position(landing, _BAG.target) == (1, first.end)
    merge(spark, landing, _BAG.target)
    assert _BAG.contents(spark, path) == _BAG.outcome


def test_a_merge_prepared_before_an_idle_watermark_moved_writes_nothing(
    spark: SparkSession, zone: RawZone
) -> None:
    """The watermark of a table without changes moves by a commit without rows, fenced as others."""
    landing = _BAG.land_copy(zone)
    path = merge(spark, landing, _BAG.target).path
    for _ in range(IDLE_WINDOWS):
        idle = landing.land([])
    landing.land(_BAG.first + _BAG.second)
    with _right_before_the_write(spark, lambda: merge(spark, landing, _BAG.target, idle)):
        _fails(spark, landing, _BAG.target)
    assert _position(landing, _BAG.target) == (1, idle.end)
    merge(spark, landing, _BAG.target)
    assert _BAG.contents(spark, path) == _BAG.outcome


def test_a_merge_that_ends_before_it_records_its_watermark_is_not_repeated(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of the rows has the watermark; the next run records it for other readers."""
    landing = _BAG.land_copy(zone)
    path = merge(spark, landing, _BAG.target).path
    landing.land(_BAG.first)
    last = landing.land(_BAG.second)
    with monkeypatch.context() as killed:
        killed.setattr(watermark, "settle", lambda *_: None)
        merge(spark, landing, _BAG.target)
    recorded = zone.app_id(1)
    assert DeltaTable(path).transaction_version(recorded) < last.end
    assert _position(landing, _BAG.target) == (1, last.end)
    assert merge(spark, landing, _BAG.target).changes_read == 0
    assert DeltaTable(path).transaction_version(recorded) == last.end
    assert _BAG.contents(spark, path) == _BAG.outcome


def test_a_table_without_a_fence_is_merged_on(spark: SparkSession, zone: RawZone) -> None:
    """Tables of earlier releases have the watermark as an application transaction alone."""
    landing = _BAG.land_copy(zone)
    path = merge(spark, landing, _BAG.target).path
    _forget_fence(path)
    landing.land(_BAG.first)
    last = landing.land(_BAG.second)
    merge(spark, landing, _BAG.target)
    assert _BAG.contents(spark, path) == _BAG.outcome
    assert _position(landing, _BAG.target) == (1, last.end)


def test_a_merge_adds_one_commit_without_rows_to_the_log(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = _BAG.land_copy(zone)
    path = merge(spark, landing, _BAG.target).path
    before = DeltaTable(path).version()
    landing.land(_BAG.first)
    merge(spark, landing, _BAG.target)
    assert DeltaTable(path).version() == before + 2


def test_a_log_whose_merges_take_the_odd_versions_gets_checkpoints(
    spark: SparkSession, zone: RawZone, tmp_path: Path
) -> None:
    """Spark writes a checkpoint for its own commits alone; deletion vectors are in ours too."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin(_COPIED)
    landing.land([])
    table = delta_table(path := merge(spark, landing, _ITEMS).path)
    spark.sql(f"DELETE FROM {table} WHERE id = 2")
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.checkpointInterval' = '2')")
    assert DeltaTable(path).version() % 2 == 0
    landing.land([update("3", "C", unchanged=()), update("1", None, unchanged=(1,))])
    merge(spark, landing, _ITEMS)
    version = DeltaTable(path).version()
    assert Path(path, "_delta_log", f"{version:020d}.checkpoint.parquet").exists()
    copied = shutil.copytree(path, tmp_path / "copied")
    for entry in Path(copied, "_delta_log").glob("*.json"):
        if int(entry.stem) < version:
            entry.unlink()
    rows = spark.read.format("delta").load(str(copied)).select("id", "v").collect()
    assert sorted(map(tuple, rows)) == [(1, "a"), (3, "C")]
    assert read_watermark(zone.lake, "test", "shop", "items", 1) == (1, landing.windows[-1].end)


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3, 4))])
def test_two_processes_that_merge_the_same_tables_leave_what_the_changes_say(
    spark: SparkSession, zone: RawZone, seed: int
) -> None:
    """Each takes tables and windows at random, until all is merged; keys are counted by a plain
    loop.
    """
    rng = random.Random(seed)
    landing = Landing(zone, [relation(column("id"), column("v", "text"), key=(), identity="f")])
    held = Counter((str(n % 3), "a") for n in range(6))
    landing.begin([list(row) for row in held.elements()])
    logged = held.total()
    for _ in range(6):
        changes = []
        for _ in range(rng.randint(1, 3)):
            if held and rng.random() < 0.4:
                gone = rng.choice(sorted(held.elements()))
                held -= Counter([gone])
                changes.append(delete(*gone, old_kind="O"))
            else:
                row = str(rng.randint(0, 3)), rng.choice("ab")
                held[row] += 1
                changes.append(insert(*row))
        logged += len(changes)
        landing.land(changes)
    targets = [TableTarget("shop", "items"), TableTarget("shop", "items", without_key="log")]
    roots = [f"{zone.lake.uri}/bag", f"{zone.lake.uri}/log"]

    def work(number: int) -> None:
        mine = random.Random(seed * 10 + number)
        reached = [0, 0]
        while min(reached) < len(landing.windows):
            which = mine.randrange(2)
            window = mine.randint(min(reached[which], 5), 5)
            (report,) = merge_tables(
                spark, zone, [targets[which]], landing.windows[window], root=roots[which]
            )
            if isinstance(report, MergeReport):
                reached[which] = max(reached[which], window + 1)
            else:
                assert isinstance(report.error, TransientError), report.error

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, number) for number in range(2)]:
            done.result()
    bag, log = (
        spark.read.format("delta").load(table_path(zone.lake, "test", "shop", "items", 1, root))
        for root in roots
    )
    assert Counter((str(r.id), r.v) for r in bag.collect()) == held
    assert log.count() == logged
