"""Merges of a raw zone that the tests write: names, keys, new columns, missing values."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from pgcdc_assets.errors import MergeConflict, PgcdcError, SchemaChangeError, WatermarkGap
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables, run
from pgcdc_assets.merge.run import merge_table
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import read_watermark, table_path
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

pytestmark = pytest.mark.spark

ITEMS = CdcTable("shop", "items")


def _merge(
    spark: SparkSession, zone: RawZone, through: LsnWindow, target: CdcTable = ITEMS
) -> MergeReport:
    (report,) = merge_tables(spark, zone, [target], through)
    assert isinstance(report, MergeReport), report
    return report


def _refused(spark: SparkSession, zone: RawZone, through: LsnWindow) -> PgcdcError:
    (failure,) = merge_tables(spark, zone, [ITEMS], through)
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, PgcdcError)
    return failure.error


def _rows(spark: SparkSession, report: MergeReport, *names: str) -> list[tuple[Any, ...]]:
    frame = spark.read.format("delta").load(report.path)
    quoted = ["`" + name.replace("`", "``") + "`" for name in names]
    return sorted((tuple(row) for row in frame.select(*quoted).collect()), key=repr)


@pytest.mark.sampled
def test_columns_and_tables_may_have_any_name(spark: SparkSession, lake: Lake) -> None:
    names = ["Key Part", "a.b", "a,b;c=(d)", "back`tick", "quo\"te's", "ключ😀", "new\nline"]
    made = relation(
        *(column(name, "text") for name in names),
        column("n", "date"),
        key=("Key Part", "back`tick"),
        table='Items / 100% "x" *[é]..',
    )
    zone = RawZone(lake, "test")
    landing = Landing(zone, [made])
    first = [f"{name} 1" for name in names]
    landing.begin([[*first, "2024-01-01"], [*(f"{name} 2" for name in names), "infinity"]])
    changed = [*first[:-1], "changed"]
    window = landing.land(
        [update(*changed, "0044-03-15 BC"), insert(*(f"{name} 3" for name in names), None)],
        [delete(*(f"{name} 3" if i in (0, 3) else None for i, name in enumerate(names)), None)],
    )
    target = CdcTable("shop", made.table)
    report = _merge(spark, zone, window, target)
    assert Path(report.path).is_dir()
    assert Path(report.path).parent == Path(lake.path("test", "scd1", "shop"))
    rows = _rows(spark, report, *names, "_rescued")
    assert [row[-2] for row in rows] == ["changed", "new\nline 2"]
    assert [row[-1] for row in rows] == [{"n": "0044-03-15 BC"}, {"n": "infinity"}]


@pytest.mark.sampled
def test_an_added_column_is_null_in_older_rows_and_filled_in_newer_ones(
    spark: SparkSession, zone: RawZone
) -> None:
    """F1: earlier and later rows are in one range, or the table exists before."""
    before = relation(column("id"), column("v", "text"))
    after = relation(column("id"), column("v", "text"), column("odd, name", "numeric"))
    landing = Landing(zone, [before, after])
    landing.begin([("1", "a"), ("2", "b")])
    _merge(spark, zone, landing.land([insert("3", "c")]))
    window = landing.land(
        [update("1", "before")],
        [update("2", "after", "2.50", version=2)],
        [delete("3", None, None, version=2)],
    )
    report = _merge(spark, zone, window)
    assert _rows(spark, report, "id", "v", "odd, name") == [
        (1, "before", None),
        (2, "after", "2.50"),
    ]
    names = spark.read.format("delta").load(report.path).columns
    assert names[:3] == ["id", "v", "odd, name"]
    report = _merge(spark, zone, landing.land([insert("4", "d", "1", version=2)]))
    assert report.row_count == 3


@pytest.mark.sampled
@pytest.mark.parametrize("scd", [1, 2])
def test_a_wide_table_has_statistics_of_system_columns(
    spark: SparkSession, zone: RawZone, scd: int
) -> None:
    """The system columns are last, and Delta has statistics of the first 32 columns by default."""
    columns = [column("id"), *(column(f"v{i}", "text") for i in range(40))]
    landing = Landing(zone, [relation(*columns)])
    landing.begin([("1", *["a"] * 40)])
    window = landing.land([update("1", *["b"] * 40)])
    report = _merge(spark, zone, window, CdcTable("shop", "items", scd=(scd,)))
    lsn = {1: "_lsn", 2: "_valid_from_lsn"}[scd]
    adds = pyarrow.table(DeltaTable(report.path).get_add_actions(flatten=True)).to_pylist()
    assert all(isinstance(add[f"min.{lsn}"], int) for add in adds)
    assert max(add[f"max.{lsn}"] for add in adds) == int(window.start)


def test_a_change_of_columns_that_cannot_be_replayed_is_refused(
    spark: SparkSession, zone: RawZone
) -> None:
    after = relation(column("id"), column("v", "int4", type="integer"))
    landing = Landing(zone, [relation(column("id"), column("v", "text")), after])
    landing.begin([("1", "a")])
    _merge(spark, zone, landing.land([insert("2", "b")]))
    error = _refused(spark, zone, landing.land([insert("3", "1", version=2)]))
    assert isinstance(error, SchemaChangeError)
    assert "shop.items" in str(error) and "type changed" in str(error)
    assert _watermark(zone) == landing.windows[0].end


@pytest.mark.sampled
def test_a_history_reports_the_changes_that_a_snapshot_replaces(
    spark: SparkSession, zone: RawZone
) -> None:
    history = replace(ITEMS, scd=(2,))
    after = relation(column("id"), column("w", "text"))
    # The catalog was read too late to tell whether v was renamed or dropped.
    unknown = replace(after, columns=tuple(replace(c, attnum=None) for c in after.columns))
    landing = Landing(zone, [relation(column("id"), column("v", "text")), unknown, after])
    landing.begin([("1", "a")])
    first = landing.land([insert("2", "b")])
    assert _merge(spark, zone, first, history).left_out == ""
    landing.land([insert("3", "c", version=2), update("3", "d", version=2)])
    landing.copy([("1", "x"), ("2", "x"), ("3", "d")], version=3)
    report = _merge(spark, zone, landing.land([insert("4", "e", version=3)]), history)
    assert f"The changes from {first.end} to {report.snapshot_lsn}" in report.left_out
    assert report.left_out.endswith("no longer tells whether it was renamed or dropped.")
    assert _rows(spark, report, "id", "w", "_op") == [
        (1, "a", "S"),
        (1, "x", "S"),
        (2, "b", "I"),
        (2, "x", "S"),
        (3, "d", "S"),
        (4, "e", "I"),
    ]


def test_a_recreated_table_needs_a_snapshot(spark: SparkSession, zone: RawZone) -> None:
    made = relation(column("id"), column("v", "text"))
    landing = Landing(zone, [made, replace(made, relation_id=2000)])
    landing.begin([("1", "a")])
    _merge(spark, zone, landing.land([insert("2", "b")]))
    error = _refused(spark, zone, landing.land([insert("1", "b", relation_id=2000)]))
    assert isinstance(error, SchemaChangeError)
    assert "created again" in str(error)


@pytest.mark.sampled
def test_keys_that_their_type_cannot_hold_are_distinguished_by_their_texts(
    spark: SparkSession, zone: RawZone
) -> None:
    """C8: the key has infinity and BC dates."""
    landing = Landing(zone, [relation(column("id", "date"), column("v", "text"))])
    landing.begin([("infinity", "a"), ("-infinity", "b"), ("2024-01-01", "c")])
    window = landing.land(
        [update("infinity", "changed"), insert("0001-01-01 BC", "bc")],
        [delete("-infinity", None), update("2024-01-02", "moved", old=("2024-01-01", None))],
    )
    report = _merge(spark, zone, window)
    rows = _rows(spark, report, "v", "_rescued")
    assert rows == [
        ("bc", {"id": "0001-01-01 BC"}),
        ("changed", {"id": "infinity"}),
        ("moved", None),
    ]


@pytest.mark.sampled
def test_a_missing_unchanged_value_stops_the_table(spark: SparkSession, zone: RawZone) -> None:
    """An unknown value never becomes NULL, by a MERGE or in an empty table."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin()
    error = _refused(spark, zone, landing.land([update("1", None, unchanged=(1,))]))
    assert isinstance(error, MergeConflict)
    landing.copy([("1", "a")], at=landing.lsn)
    report = _merge(spark, zone, landing.land([update("1", None, unchanged=(1,))]))
    assert _rows(spark, report, "id", "v") == [(1, "a")]
    error = _refused(spark, zone, landing.land([update("2", None, unchanged=(1,))]))
    assert isinstance(error, MergeConflict)
    moved = update("4", None, old=("3", None), unchanged=(1,))
    error = _refused(spark, zone, landing.land([moved]))
    assert isinstance(error, MergeConflict)
    assert _watermark(zone) == landing.windows[1].end


def test_an_empty_snapshot_creates_an_empty_table_with_its_columns(
    spark: SparkSession, zone: RawZone
) -> None:
    """C6."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin()
    report = _merge(spark, zone, landing.land())
    assert report.row_count == 0
    kinds = dict(spark.read.format("delta").load(report.path).dtypes)
    assert kinds == {
        "id": "int",
        "v": "string",
        "_lsn": "bigint",
        "_ordinal": "bigint",
        "_commit_ts": "timestamp",
        "_rescued": "map<string,string>",
    }
    assert _watermark(zone) == landing.windows[0].end


def test_the_watermark_is_in_the_commit_of_the_rows(spark: SparkSession, zone: RawZone) -> None:
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([("1", "a")])
    for changes in ([insert("2", "b")], [truncate(), insert("1", "c")]):
        report = _merge(spark, zone, landing.land(changes))
        logs = sorted((Path(report.path) / "_delta_log").glob("*.json"))
        commits = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
        written = [c for c in commits if any("add" in action for action in c)][-1]
        (info,) = [action["commitInfo"] for action in written if "commitInfo" in action]
        recorded = json.loads(info["userMetadata"])["pgcdc"]
        assert (recorded["epoch"], Lsn.parse(recorded["watermark"])) == (1, landing.windows[-1].end)
        versions = {a["txn"]["appId"]: a["txn"]["version"] for a in commits[-1] if "txn" in a}
        assert versions[zone.app_id(1)] == landing.windows[-1].end


@pytest.mark.sampled
def test_tables_merged_in_parallel_have_separate_watermarks(
    spark: SparkSession, zone: RawZone
) -> None:
    one = relation(column("id"), column("v", "text"))
    two = relation(column("id"), column("v", "text"), table="other", relation_id=2000)
    landing = Landing(zone, [one, two])
    landing.begin([("1", "a")])
    first = landing.land([insert("2", "b"), insert("7", "x", relation_id=2000)])
    _merge(spark, zone, first)
    second = landing.land([insert("3", "c"), insert("8", "y", relation_id=2000)])
    other = CdcTable("shop", "other")
    reports = {r.table: r for r in merge_tables(spark, zone, [ITEMS, other], second)}
    assert isinstance(reports["items"], MergeReport)
    assert isinstance(reports["other"], MergeReport)
    assert reports["items"].windows_folded == 1
    assert reports["other"].windows_folded == 2
    assert _rows(spark, reports["other"], "id", "v") == [(7, "x"), (8, "y")]
    assert _watermark(zone) == _watermark(zone, "other") == second.end


@pytest.mark.sampled
def test_an_abandoned_merge_ends_within_seconds(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens after Ctrl-C during a query that takes hours."""
    merge_by_spark(monkeypatch)
    described = relation(column("id"))
    landing = Landing(zone, [described, replace(described, relation_id=1001, table="other")])
    landing.begin([("1",)])
    window = landing.land([insert("2")])
    started = threading.Event()

    def merge_slowly(session: SparkSession, zone: RawZone, task: MergeTask) -> MergeReport:
        if task.plan.target.table == "other":
            started.set()
            session.sql("SELECT max(hash(id)) FROM range(0, 1000000000000, 1, 1)").collect()
        assert started.wait(60)
        return merge_table(session, zone, task)

    monkeypatch.setattr(run, "merge_table", merge_slowly)
    reports = merge_tables(spark, zone, [ITEMS, CdcTable("shop", "other")], window)
    assert isinstance(next(reports), MergeReport)
    began = time.monotonic()
    assert isinstance(reports, Generator)
    reports.close()
    assert time.monotonic() - began < 20
    assert read_watermark(zone.lake, zone.name, "shop", "other", 1) is None


def test_the_error_names_a_gap_between_watermark_and_windows(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = Landing(zone, [relation(column("id"))])
    landing.begin([("1",)])
    window = landing.land([insert("2")])
    later = LsnWindow.of(1, window.end + 16, window.end + 32)
    error = _refused(spark, zone, later)
    assert isinstance(error, WatermarkGap)
    assert (error.expected, error.found) == (window.end, later.end)


def test_the_table_is_readable_by_delta_rs(spark: SparkSession, zone: RawZone) -> None:
    landing = Landing(zone, [relation(column("id"), column("at", "timestamptz"))])
    landing.begin([(str(i), "0001-01-01 00:00:00+00") for i in range(10)])
    report = _merge(spark, zone, landing.land([delete("3", None), update("4", None)]))
    builder = QueryBuilder().register("items", DeltaTable(report.path))
    found = builder.execute("select count(*) as rows, count(at) as known from items").read_all()
    assert [column.to_pylist() for column in found.columns] == [[9], [8]]


def _watermark(zone: RawZone, table: str = "items") -> Lsn:
    mark = read_watermark(zone.lake, zone.name, "shop", table, 1)
    assert mark is not None
    return mark[1]


def test_a_folder_has_the_name_of_its_table(lake: Lake) -> None:
    assert table_path(lake, "n", "public", "Orders_1", 1) == lake.path(
        "n", "scd1", "public", "Orders_1"
    )
    odd = {table_path(lake, "n", "s", name, 1) for name in ("a/b", "a~2f~b", "a b", "..", ".")}
    assert len(odd) == 5
    assert all(Path(path).parent == Path(lake.path("n", "scd1", "s")) for path in odd)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("target", "comes"),
    [
        pytest.param(replace(ITEMS, key=("v",)), "copied", id="1-copied"),
        pytest.param(replace(ITEMS, key=("v",), scd=(2,)), "inserted", id="2-inserted"),
    ],
)
def test_a_null_in_a_configured_key_is_refused(
    spark: SparkSession, zone: RawZone, target: CdcTable, comes: str
) -> None:
    """H8: rows with NULL keys would be one row, or each update would add a row."""
    made = relation(column("id"), column("v", "text"), key=("id",), identity="f")
    landing = Landing(zone, [made])
    landing.begin([["1", "a"], ["2", None if comes == "copied" else "b"]])
    landing.land([insert("3", None if comes == "inserted" else "c")])
    (failure,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, MergeConflict), failure.error
    assert 'alter table "shop"."items" alter column "v" set not null' in str(failure.error)
    landing.copy([["1", "a"], ["2", "b"], ["3", "c"]])
    assert _merge(spark, zone, landing.land([insert("4", "d")]), target).row_count == 4
