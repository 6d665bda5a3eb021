"""Commits of small tables: overtaken merges, deaths between the steps, and Spark's part."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.merge.batch import commit as module
from pgcdc_assets.raw.delta.newest_versions import NewestVersions
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables import state
from pgcdc_assets.tables.state import ScdState, read_scd_state, read_watermark
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import assert_overtaken, merge
from pgcdc_assets_tests.support.merge.races import RACES, Race
from pgcdc_assets_tests.support.merge.small_tables import (
    merge_by_spark,
    merge_together,
    merges_by_spark,
)

pytestmark = pytest.mark.spark

_POINTS = [failpoints.BEFORE_BATCH_COMMIT, failpoints.AFTER_BATCH_COMMIT]
_KEYED = ("current_image", "whole_table", "truncated", "history")
_each_race = pytest.mark.parametrize("race", [RACES[name] for name in _KEYED], ids=_KEYED)


class _Killed(BaseException):
    """An end like that by SIGKILL: no handler of the package catches it."""


def _at(monkeypatch: pytest.MonkeyPatch, point: str, act: Callable[[], object]) -> None:
    """Act once, at a failpoint."""
    acts = [act]

    def reach(name: str) -> None:
        if name == point and acts:
            acts.pop()()

    monkeypatch.setattr(failpoints, "reach", reach)


def _overtake(monkeypatch: pytest.MonkeyPatch, merge: Callable[[], object], by_spark: bool) -> None:
    """Run another merge right before the commit of a merge of small tables."""

    def overtake() -> None:
        with pytest.MonkeyPatch.context() as patched:
            if by_spark:
                merge_by_spark(patched)
            merge()

    _at(monkeypatch, failpoints.BEFORE_BATCH_COMMIT, overtake)


def _die() -> None:
    raise _Killed


@pytest.fixture(autouse=True)
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    merge_together(monkeypatch)


@pytest.fixture(
    params=[
        pytest.param(False, id="by another"),
        pytest.param(True, id="by spark", marks=pytest.mark.soak),
    ]
)
def by_spark(request: pytest.FixtureRequest) -> bool:
    """Whether Spark is the faster merge."""
    return bool(request.param)


@pytest.mark.sampled
@_each_race
def test_a_merge_that_is_overtaken_before_its_commit_writes_nothing(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    race: Race,
    by_spark: bool,
) -> None:
    landing = race.land_snapshot(zone)
    path = merge(spark, landing, race.target).path
    first = landing.land(race.first)
    last = landing.land(race.second)

    _overtake(monkeypatch, lambda: merge(spark, landing, race.target, first), by_spark)
    assert_overtaken(spark, landing, race.target)
    assert _position(landing, race.target) == (1, first.end)
    assert _orphans(path) == 0
    merge(spark, landing, race.target)
    assert race.contents(spark, path) == race.outcome
    assert _position(landing, race.target) == (1, last.end)


@pytest.mark.sampled
def test_one_of_two_merges_creates_the_table(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, by_spark: bool
) -> None:
    race = RACES["whole_table"]
    landing = race.land_snapshot(zone)
    first = landing.land(race.first)
    landing.land(race.second)

    _overtake(monkeypatch, lambda: merge(spark, landing, race.target, first), by_spark)
    assert_overtaken(spark, landing, race.target)
    report = merge(spark, landing, race.target)
    assert race.contents(spark, report.path) == race.outcome


@pytest.mark.sampled
@pytest.mark.parametrize("point", _POINTS)
@_each_race
def test_a_merge_that_dies_is_continued(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    race: Race,
    point: str,
) -> None:
    """Neither the first commit of the table nor a later one is lost or repeated."""
    landing = race.land_snapshot(zone)
    for changes in ([], race.first, race.second):
        landing.land(changes)
        with monkeypatch.context() as patched:
            _at(patched, point, _die)
            with pytest.raises(_Killed):
                merge(spark, landing, race.target)
        report = merge(spark, landing, race.target)
        assert (report.changes_read == 0) == (point == failpoints.AFTER_BATCH_COMMIT or not changes)
    assert race.contents(spark, report.path) == race.outcome
    assert merges_by_spark(report.path) == 0


@pytest.mark.sampled
def test_another_commit_that_is_not_a_merge_leaves_the_table_to_spark(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = RACES["whole_table"]
    landing = race.land_snapshot(zone)
    path = merge(spark, landing, race.target).path
    landing.land([*race.first, *race.second])
    change = f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES ('mine' = 'x')"
    _at(monkeypatch, failpoints.BEFORE_BATCH_COMMIT, lambda: spark.sql(change))
    merge(spark, landing, race.target)
    assert race.contents(spark, path) == race.outcome
    assert merges_by_spark(path) == 2


@pytest.mark.sampled
def test_an_emptied_table_has_no_file_and_is_filled_again(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = RACES["whole_table"].land_snapshot(zone)
    target = CdcTable("shop", "items")
    path = merge(spark, landing, target).path
    landing.land([truncate()])
    report = merge(spark, landing, target)
    assert (report.rows_deleted, report.row_count) == (3, 0)
    assert spark.read.format("delta").load(path).count() == 0
    landing.land([insert("7", "g"), delete("8", None)])
    report = merge(spark, landing, target)
    assert (report.rows_inserted, report.row_count) == (1, 1)
    landing.land([delete("7", None)])
    assert merge(spark, landing, target).row_count == 0
    assert merges_by_spark(path) == 0


@pytest.mark.parametrize("identity", ["d", "f"])
def test_changes_of_which_a_truncate_leaves_none_empty_the_table(
    spark: SparkSession, zone: RawZone, identity: str
) -> None:
    landing = Landing(zone, [relation(column("id"), column("v", "text"), identity=identity)])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    target = CdcTable("shop", "items")
    path = merge(spark, landing, target).path
    old = ("1", "a") if identity == "f" else None
    landing.land([update("1", "c", old=old, old_kind="O" if old else None), truncate()])
    report = merge(spark, landing, target)
    assert (report.rows_deleted, report.row_count) == (2, 0)
    landing.land([insert("3", "d")])
    assert merge(spark, landing, target).row_count == 1
    assert merges_by_spark(path) == 0


def test_rows_that_a_step_adds_and_removes_again_change_nothing(
    spark: SparkSession, zone: RawZone
) -> None:
    """A queue under REPLICA IDENTITY FULL. The watermark moves."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"), identity="f")])
    landing.begin([["1", "a"]])
    landing.land([])
    target = CdcTable("shop", "items")
    path = merge(spark, landing, target).path
    landing.land([insert("2", "b"), delete("2", "b", old_kind="O")])
    report = merge(spark, landing, target)
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (0, 0, 0)
    assert (report.row_count, report.changes_read) == (1, 2)
    landing.land([insert("3", "c")])
    report = merge(spark, landing, target)
    assert (report.row_count, report.watermark_before) == (2, landing.windows[-2].end)
    assert merges_by_spark(path) == 0


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
def test_the_state_after_a_commit_is_kept_as_it_would_be_read(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, scd: int
) -> None:
    """Also after a rescued value, without a row, and for the third version after a checkpoint."""
    landing = Landing(zone, [relation(column("id"), column("v", "date"))])
    landing.begin([["1", "2020-01-01"], ["2", None]])
    landing.land([])
    target = CdcTable("shop", "items", scd=(scd,))
    path = merge(spark, landing, target).path
    # Spark merges a TRUNCATE of a history.
    empties = [truncate()] if scd == 1 else [delete(number, None) for number in "13"]
    steps = [[insert("3", "infinity")], [update("1", "infinity"), delete("2", None)], empties]
    steps += [[insert(str(number), "2020-01-01")] for number in range(4, 14)]
    for step in steps:
        landing.land(step)
        merge(spark, landing, target)
        with monkeypatch.context() as patched:
            patched.setattr(state, "open_table", None)
            kept = read_scd_state(zone.lake, zone.name, path)
        with monkeypatch.context() as patched:
            patched.setattr(state, "STATES", NewestVersions[ScdState](1))
            read = read_scd_state(zone.lake, zone.name, path)
        assert kept is not None
        assert read is not None
        # delta-rs writes the metadata of a column in any order.
        assert replace(kept, schema="") == replace(read, schema="")
        assert json.loads(kept.schema) == json.loads(read.schema)
        names = sorted(kept.files.column_names)
        assert names == sorted(read.files.column_names)
        assert kept.files.select(names) == read.files.select(names)
        assert kept.rescued == read.rescued
        assert kept.table.version() == kept.version == read.version
    assert merges_by_spark(path) == 0


def test_a_commit_of_another_process_after_the_own_one_is_read(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = RACES["whole_table"].land_snapshot(zone)
    target = CdcTable("shop", "items")
    path = merge(spark, landing, target).path
    landing.land([update("1", "x")])

    def commit(*_: object) -> None:
        table = DeltaTable(path)
        table.create_write_transaction([], "append", table.schema())

    monkeypatch.setattr(module, "keep_checkpoints", commit)
    merge(spark, landing, target)
    found = read_scd_state(zone.lake, zone.name, path)
    assert found is not None
    assert found.version == DeltaTable(path).version() == found.table.version()


@pytest.mark.sampled
def test_many_versions_have_checkpoints_that_spark_reads(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = RACES["whole_table"].land_snapshot(zone)
    target = CdcTable("shop", "items")
    for number in range(25):
        landing.land([update("1", f"v{number}")])
        report = merge(spark, landing, target)
    assert len(list(Path(report.path, "_delta_log").glob("*.checkpoint.parquet"))) >= 1
    found = spark.read.format("delta").load(report.path).where("id = 1").collect()
    assert [row["v"] for row in found] == ["v24"]


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
def test_a_new_table_is_described_as_spark_describes_it(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, scd: int
) -> None:
    """Types, comments, the source's columns, properties and features are those of Spark."""
    columns = [
        column("id", "int8"),
        *(column(name, name) for name in _TYPES),
        column("price", "numeric", (10 << 16 | 2) + 4),
        column("names", "_text", element_type="text"),
    ]
    landing = Landing(zone, [relation(*columns)])
    values = (*_TYPES.values(), "12.50", '{a,"b,c",NULL}')
    landing.begin([["1", *values], ["2", *[None] * len(values)], ["3", *_ODD]])
    landing.land([])
    target = CdcTable("shop", "items", scd=(scd,))
    found = []
    for root in ("together", "by spark"):
        with monkeypatch.context() as patched:
            if root == "by spark":
                merge_by_spark(patched)
            place = f"{zone.lake.uri}/{root}"
            (report,) = merge_tables(spark, zone, [target], landing.windows[-1], root=place)
        assert isinstance(report, MergeReport), report
        table = DeltaTable(report.path)
        metadata, protocol = table.metadata(), table.protocol()
        rows = spark.read.format("delta").load(report.path)
        found.append(
            (
                json.loads(table.schema().to_json()),
                metadata.configuration,
                metadata.description,
                metadata.partition_columns,
                set(protocol.writer_features or ()),
                set(protocol.reader_features or ()),
                sorted(map(repr, rows.collect())),
                report.rows_rescued,
                report.rows_inserted,
            )
        )
    assert found[0] == found[1]


_TYPES = {
    "bool": "t",
    "int2": "-7",
    "int4": "7",
    "float4": "1.5",
    "float8": "-0",
    "date": "2024-02-29",
    "timestamp": "2024-02-29 12:00:00.123456",
    "timestamptz": "2024-02-29 12:00:00.123456+00",
    "bytea": r"\x00ff",
    "uuid": "6ecd8c99-4036-403d-bf84-cf8400f67836",
    "text": "x" * 100,
}
_ODD = (
    *("f", "32767", "-2147483648", "NaN", "Infinity", "infinity", "0044-03-15 00:00:00 BC"),
    *("-infinity", r"\x", "6ecd8c99-4036-403d-bf84-cf8400f67836", "\u00e4\n'", "NaN", "{{a},{b}}"),
)


def _position(landing: Landing, target: CdcTable) -> tuple[int, int] | None:
    zone, (scd,) = landing.zone, target.scd
    return read_watermark(zone.lake, zone.name, target.schema, target.table, scd)


def _orphans(path: str) -> int:
    """Count the data files that no version of the table names."""
    named = set()
    for entry in Path(path, "_delta_log").glob("*.json"):
        named |= {part for part in entry.read_text().split('"') if part.endswith(".parquet")}
    files = Path(path).rglob("*.parquet")
    return len(
        {str(file.relative_to(path)) for file in files if "_delta_log" not in str(file)} - named
    )
