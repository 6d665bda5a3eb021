"""A merge that another merge overtakes writes nothing, for every kind of table.

The other merge runs at the critical times: directly before and during the write of Spark.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables
from pgcdc_assets.merge.idle_tables import IDLE_WINDOWS
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables import state
from pgcdc_assets.tables.state import read_watermark, table_path
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.races import (
    BAG,
    COPIED,
    ITEMS,
    RACES,
    Race,
    during_the_write,
    each_kind,
    right_before_the_write,
    write_as_asked,
)

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def as_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    write_as_asked(request.node.callspec.params.get("race", BAG), monkeypatch)


def _fails(spark: SparkSession, landing: Landing, target: CdcTable) -> None:
    """Check that the next merge fails with a transient error and writes nothing."""
    (failure,) = merge_tables(spark, landing.zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, TransientError), failure.error


def _position(landing: Landing, target: CdcTable) -> tuple[int, int] | None:
    zone = landing.zone
    return read_watermark(zone.lake, zone.name, target.schema, target.table, target.scd[0])


def _forget_fence(path: str) -> None:
    """Remove from a table's log the entries that early releases did not write."""
    for entry in sorted(Path(path, "_delta_log").glob("*.json")):
        lines = entry.read_text().splitlines()
        kept = [line for line in lines if ":fence" not in line and ":settled" not in line]
        entry.write_text("\n".join(kept) + "\n")
        entry.with_name(f".{entry.name}.crc").unlink(missing_ok=True)
        entry.with_suffix(".crc").unlink(missing_ok=True)


@pytest.mark.sampled
@each_kind
def test_a_merge_that_is_overtaken_before_its_write_writes_nothing(
    spark: SparkSession, zone: RawZone, race: Race
) -> None:
    """Delta skips a duplicate transaction, and counts of its rows never arrive."""
    landing = race.land_snapshot(zone)
    path = merge(spark, landing, race.target).path
    first = landing.land(race.first)
    last = landing.land(race.second)
    with right_before_the_write(spark, lambda: merge(spark, landing, race.target, first)):
        _fails(spark, landing, race.target)
    assert _position(landing, race.target) == (1, first.end)
    merge(spark, landing, race.target)
    assert race.contents(spark, path) == race.outcome
    assert _position(landing, race.target) == (1, last.end)


@pytest.mark.parametrize(
    "race",
    [
        pytest.param(RACES[name], id=name, marks=pytest.mark.soak)
        for name in ("current_image", "whole_table", "range_of_history", "bag")
    ],
)
def test_a_merge_that_is_overtaken_during_its_write_writes_nothing(
    spark: SparkSession, zone: RawZone, tmp_path: Path, race: Race
) -> None:
    landing = race.land_snapshot(zone)
    path = merge(spark, landing, race.target).path
    first = landing.land(race.first)
    landing.land(race.second)
    with during_the_write(spark, tmp_path, lambda: merge(spark, landing, race.target, first)):
        _fails(spark, landing, race.target)
    assert _position(landing, race.target) == (1, first.end)
    merge(spark, landing, race.target)
    assert race.contents(spark, path) == race.outcome


@pytest.mark.sampled
def test_one_of_two_merges_creates_the_table(spark: SparkSession, zone: RawZone) -> None:
    landing = BAG.land_snapshot(zone)
    first = landing.land(BAG.first)
    landing.land(BAG.second)
    with right_before_the_write(spark, lambda: merge(spark, landing, BAG.target, first)):
        _fails(spark, landing, BAG.target)
    assert _position(landing, BAG.target) == (1, first.end)
    report = merge(spark, landing, BAG.target)
    assert BAG.contents(spark, report.path) == BAG.outcome


@pytest.mark.sampled
def test_a_snapshot_that_another_merge_applied_is_not_applied_again(
    spark: SparkSession, zone: RawZone
) -> None:
    """The rows of the snapshot would replace changes that the other merge folded."""
    landing = BAG.land_snapshot(zone)
    landing.land([insert("7", "old")])
    path = merge(spark, landing, BAG.target).path
    landing.land([])
    landing.copy(COPIED)
    first = landing.land(BAG.first)
    landing.land(BAG.second)
    with right_before_the_write(spark, lambda: merge(spark, landing, BAG.target, first)):
        _fails(spark, landing, BAG.target)
    assert _position(landing, BAG.target) == (1, first.end)
    merge(spark, landing, BAG.target)
    assert BAG.contents(spark, path) == BAG.outcome


@pytest.mark.sampled
def test_a_merge_that_is_overtaken_by_a_rebuild_writes_nothing(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = BAG.land_snapshot(zone)
    path = merge(spark, landing, BAG.target).path
    first = landing.land(BAG.first)
    landing.land(BAG.second)

    def rebuild() -> None:
        rebuild_table(spark, zone, BAG.target, 1, first.end)

    with right_before_the_write(spark, rebuild):
        _fails(spark, landing, BAG.target)
    assert _position(landing, BAG.target) == (1, first.end)
    merge(spark, landing, BAG.target)
    assert BAG.contents(spark, path) == BAG.outcome


@pytest.mark.sampled
def test_a_merge_planned_before_an_idle_watermark_advanced_writes_nothing(
    spark: SparkSession, zone: RawZone
) -> None:
    """A commit without rows, with the fence, advances the watermark of a table without changes."""
    landing = BAG.land_snapshot(zone)
    path = merge(spark, landing, BAG.target).path
    for _ in range(IDLE_WINDOWS):
        idle = landing.land([])
    landing.land([*BAG.first, *BAG.second])
    with right_before_the_write(spark, lambda: merge(spark, landing, BAG.target, idle)):
        _fails(spark, landing, BAG.target)
    assert _position(landing, BAG.target) == (1, idle.end)
    merge(spark, landing, BAG.target)
    assert BAG.contents(spark, path) == BAG.outcome


@pytest.mark.sampled
def test_a_merge_that_is_killed_before_it_records_its_watermark_is_not_repeated(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of the rows has the watermark, and the next run records it for other readers."""
    landing = BAG.land_snapshot(zone)
    path = merge(spark, landing, BAG.target).path
    landing.land(BAG.first)
    last = landing.land(BAG.second)
    with monkeypatch.context() as killed:
        killed.setattr(state, "_record_watermark", lambda zone, path, table: table)
        merge(spark, landing, BAG.target)
    recorded = zone.app_id(1)
    before = DeltaTable(path).transaction_version(recorded)
    assert before is not None and before < last.end
    assert _position(landing, BAG.target) == (1, last.end)
    assert merge(spark, landing, BAG.target).changes_read == 0
    assert DeltaTable(path).transaction_version(recorded) == last.end
    assert BAG.contents(spark, path) == BAG.outcome


@pytest.mark.soak
def test_a_table_without_a_fence_is_merged(spark: SparkSession, zone: RawZone) -> None:
    """Tables of early releases have the watermark as an application transaction only."""
    landing = BAG.land_snapshot(zone)
    path = merge(spark, landing, BAG.target).path
    _forget_fence(path)
    landing.land(BAG.first)
    last = landing.land(BAG.second)
    merge(spark, landing, BAG.target)
    assert BAG.contents(spark, path) == BAG.outcome
    assert _position(landing, BAG.target) == (1, last.end)


@pytest.mark.sampled
def test_a_merge_adds_one_commit_without_rows_to_the_log(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = BAG.land_snapshot(zone)
    path = merge(spark, landing, BAG.target).path
    before = DeltaTable(path).version()
    landing.land(BAG.first)
    merge(spark, landing, BAG.target)
    assert DeltaTable(path).version() == before + 2


@pytest.mark.soak
def test_a_log_with_merges_in_odd_versions_gets_checkpoints(
    spark: SparkSession, zone: RawZone, tmp_path: Path
) -> None:
    """Spark writes checkpoints only for its own commits. Both kinds have deletion vectors."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin(COPIED)
    landing.land([])
    table = delta_table(path := merge(spark, landing, ITEMS).path)
    spark.sql(f"DELETE FROM {table} WHERE id = 2")
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.checkpointInterval' = '2')")
    assert DeltaTable(path).version() % 2 == 0
    landing.land([update("3", "C", unchanged=()), update("1", None, unchanged=(1,))])
    merge(spark, landing, ITEMS)
    version = DeltaTable(path).version()
    assert Path(path, "_delta_log", f"{version:020d}.checkpoint.parquet").exists()
    copied = shutil.copytree(path, tmp_path / "copied")
    for entry in Path(copied, "_delta_log").glob("*.json"):
        if int(entry.stem) < version:
            entry.unlink()
    rows = spark.read.format("delta").load(str(copied)).select("id", "v").collect()
    assert sorted(map(tuple, rows)) == [(1, "a"), (3, "C")]
    assert read_watermark(zone.lake, "test", "shop", "items", 1) == (1, landing.windows[-1].end)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "offset", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 3))]
)
def test_two_processes_that_merge_the_same_tables_have_exact_results(
    spark: SparkSession, zone: RawZone, seed: int, offset: int
) -> None:
    """Each process merges random tables and windows until all windows are merged."""
    rng = random.Random(f"{seed} {offset}")
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
    targets = [CdcTable("shop", "items"), CdcTable("shop", "items", without_key="log")]
    roots = [f"{zone.lake.uri}/bag", f"{zone.lake.uri}/log"]

    def work(number: int) -> None:
        mine = random.Random(f"{seed} {offset} {number}")
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
