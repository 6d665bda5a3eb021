"""Random histories of SCD2 tables, cut at random into windows and runs, without Spark's MERGE."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.merge.batch import scope
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import read_scd_state
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    Versions,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.random_history import (
    TRANSACTIONS,
    RandomHistory,
    cuts,
    described_version,
    merge_random_history,
    random_relation,
    stored_versions,
)
from pgcdc_assets_tests.support.merge.small_tables import (
    merge_by_spark,
    merge_together,
    merges_by_spark,
)

pytestmark = pytest.mark.spark

_TARGET = CdcTable("shop", "items", scd=(2,))


@pytest.mark.sampled
@cuts("some", "many")
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("identity", ["d", "p"], ids=["default", "part"])
def test_the_versions_are_exact_for_any_cut_into_windows_and_runs(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
    pieces: tuple[int, int],
    identity: str,
    number: int,
) -> None:
    """D1 to D6, D9, H1, H3: changed and reused keys, TOAST and rescued values."""
    merge_together(monkeypatch)
    rng.seed(rng.random() + number)
    expected = Versions(key=(0, 1))
    report = merge_random_history(spark, zone, rng, _TARGET, expected, identity, pieces)
    assert stored_versions(spark, report.path) == sorted(map(described_version, expected.all))
    assert report.row_count == len(expected.all)
    assert merges_by_spark(report.path) == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("identity", "truncates"),
    [("d", True), ("f", False), ("f", True)],
    ids=["truncate", "full", "full, truncate"],
)
def test_the_versions_that_are_left_to_spark_are_exact_too(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
    identity: str,
    truncates: bool,
) -> None:
    """D6, D14: a TRUNCATE, and whole old rows."""
    merge_together(monkeypatch)
    expected = Versions(key=(0, 1))
    pieces = (6, 4)
    report = merge_random_history(spark, zone, rng, _TARGET, expected, identity, pieces, truncates)
    assert stored_versions(spark, report.path) == sorted(map(described_version, expected.all))
    assert merges_by_spark(report.path) > 0


@pytest.mark.sampled
def test_both_ways_in_turns_have_the_same_rows_and_counts(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """Each column has equal values, and each report equal numbers, whichever way is first."""
    history = RandomHistory(rng, "d", histories=60)
    landing = Landing(zone, [random_relation("d")])
    landing.begin(history.copied())
    roots = [f"{zone.lake.uri}/{name}" for name in ("first", "second")]
    for number in range(TRANSACTIONS // 2):
        landing.land(history.transaction(), history.transaction())
        reports = []
        for place, root in enumerate(roots):
            (merge_by_spark if (number + place) % 2 else merge_together)(monkeypatch)
            (report,) = merge_tables(spark, zone, [_TARGET], landing.windows[-1], root=root)
            assert isinstance(report, MergeReport), report.error.__cause__ or report.error
            # The versions of the Delta table differ: Spark makes two commits.
            reports.append(replace(report, path="", seconds=0.0, version=0, spark_reason=""))
        assert reports[0] == reports[1]
        assert reports[0].rows_updated > 0
    found = [
        sorted(map(repr, spark.read.format("delta").load(f"{root}/scd2/shop/items").collect()))
        for root in roots
    ]
    assert found[0] == found[1]
    for root in roots:
        assert merges_by_spark(f"{root}/scd2/shop/items") > 0


def test_a_value_is_compared_by_its_text(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-0 and 0, NaN, lists and rescued values: a version begins only if a text differs."""
    merge_together(monkeypatch)
    columns = [
        column("f", "float8"),
        column("d", "date"),
        column("l", "_float4", element_type="float4"),
    ]
    landing = Landing(zone, [relation(column("id"), *columns)])
    landing.begin([["1", "0", "infinity", "{0,NaN}"]])
    rows = [
        ("0", "infinity", "{0,NaN}"),
        ("-0", "infinity", "{0,NaN}"),
        ("-0", "-infinity", "{0,NaN}"),
        ("-0", "-infinity", "{-0,NaN}"),
        ("-0", "-infinity", "{-0,NaN}"),
        ("NaN", "-infinity", "{-0,NaN}"),
        ("NaN", "-infinity", "{-0,NaN}"),
        ("NaN", None, None),
        ("NaN", None, "{}"),
        ("NaN", None, "{NULL}"),
    ]
    landing.land(*[[update("1", *row)] for row in rows])
    path = merge(spark, landing, _TARGET).path
    begun = 1 + sum(row != before for before, row in zip([rows[0], *rows], rows, strict=False))
    assert spark.read.format("delta").load(path).count() == begun
    # The last row again, against the version of the table.
    landing.land([update("1", *rows[-1])])
    report = merge(spark, landing, _TARGET)
    assert (report.rows_inserted, report.rows_updated, report.row_count) == (0, 0, begun)
    assert merges_by_spark(path) == 0


@pytest.mark.sampled
def test_many_files_of_ended_versions_are_compacted(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_together(monkeypatch)
    monkeypatch.setattr("pgcdc_assets.tables.compaction.MOST_SMALL_FILES", 5)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "v0"]])
    landing.land([])
    path = merge(spark, landing, _TARGET).path
    merged_by_spark = 0
    for number in range(1, 25):
        landing.land([update("1", f"v{number}")])
        before = merges_by_spark(path)
        assert merge(spark, landing, _TARGET).row_count == number + 1
        merged_by_spark += merges_by_spark(path) > before
        state = read_scd_state(zone.lake, zone.name, path)
        assert state is not None
        # One file of the current version, and fewer than ten of ended versions, by the path.
        assert state.files.num_rows <= 10
    assert 2 <= merged_by_spark <= 5
    rows = spark.read.format("delta").load(path).orderBy("_valid_from_lsn").collect()
    assert [row["v"] for row in rows] == [f"v{number}" for number in range(25)]


@pytest.mark.sampled
def test_only_the_current_versions_count_for_the_size(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_together(monkeypatch)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    rng = random.Random(5)
    landing.land([update("1", rng.randbytes(10_000).hex()), update("1", "b")])
    path = merge(spark, landing, _TARGET).path
    monkeypatch.setattr(scope, "MOST_TABLE_BYTES", 9_000)
    landing.land([update("1", rng.randbytes(10_000).hex())])
    merge(spark, landing, _TARGET)
    assert merges_by_spark(path) == 0
    landing.land([update("1", "c")])
    merge(spark, landing, _TARGET)
    assert merges_by_spark(path) > 0


@pytest.mark.sampled
def test_a_deleted_row_leaves_no_current_version_and_comes_again(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history without a current version has no file of current versions."""
    merge_together(monkeypatch)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([])
    landing.land([])
    path = merge(spark, landing, _TARGET).path
    assert spark.read.format("delta").load(path).count() == 0
    landing.land([insert("1", "a"), delete("1", None)])
    merge(spark, landing, _TARGET)
    landing.land([insert("1", "a")])
    merge(spark, landing, _TARGET)
    landing.land([delete("1", None)])
    report = merge(spark, landing, _TARGET)
    assert (report.rows_inserted, report.rows_updated, report.row_count) == (0, 1, 2)
    found = spark.read.format("delta").load(path).collect()
    assert [row["_is_current"] for row in found] == [False, False]
    assert merges_by_spark(path) == 0
    landing.land([insert("1", "b"), truncate(), insert("2", "c")])
    merge(spark, landing, _TARGET)
    rows = spark.read.format("delta").load(path).collect()
    assert sorted((row["id"], row["v"], row["_is_current"]) for row in rows) == [
        (1, "a", False),
        (1, "a", False),
        (1, "b", False),
        (2, "c", True),
    ]


def test_two_current_versions_of_a_key_are_left_to_spark(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks report them, and a merge does not hide them."""
    merge_together(monkeypatch)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["1", "b"], ["2", "c"]])
    landing.land([])
    path = merge(spark, landing, _TARGET).path
    landing.land([update("2", "d")])
    assert merge(spark, landing, _TARGET).row_count == 4
    assert merges_by_spark(path) > 0


@pytest.mark.parametrize("is_by_spark", [False, True], ids=["together", "by spark"])
def test_another_text_of_the_same_value_in_the_replica_identity_begins_no_version(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, is_by_spark: bool
) -> None:
    """An update from 1.0 to 1.00 has an old tuple, like an update of the key."""
    (merge_by_spark if is_by_spark else merge_together)(monkeypatch)
    columns = [column("id"), column("n", "numeric"), column("v", "text")]
    landing = Landing(zone, [relation(*columns, key=("id", "n"))])
    landing.begin([["1", "1.0", "a"], ["2", "1.0", "a"]])
    landing.land([])
    target = replace(_TARGET, key=("id",), types={"n": "DECIMAL(10,4)"})
    merge(spark, landing, target)
    landing.land(
        [update("1", "1.00", "a", old=("1", "1.0", None))],
        [update("2", "1.00", "b", old=("2", "1.0", None))],
    )
    report = merge(spark, landing, target)
    found = spark.read.format("delta").load(report.path).collect()
    versions = sorted((row["id"], row["v"], row["_is_current"]) for row in found)
    assert versions == [(1, "a", True), (2, "a", False), (2, "b", True)]
    assert bool(merges_by_spark(report.path)) == is_by_spark
