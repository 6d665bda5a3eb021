"""Random histories, cut at random into windows and runs: SCD2 against a reference fold."""

from __future__ import annotations

import random

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    Versions,
    column,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import log_of
from pgcdc_assets_tests.support.merge.random_history import (
    RandomHistory,
    bound_merges,
    cases,
    cuts,
    described_version,
    merge_as_if_large,
    merge_random_history,
    random_relation,
    stored_versions,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.sampled
@cuts("some")
@cases("default-plain-large", "full-truncate-small", "part-plain-small")
@pytest.mark.parametrize(
    "tracked",
    [
        pytest.param(None, id="all columns"),
        pytest.param(("doc", "number"), id="two columns", marks=pytest.mark.soak),
    ],
)
def test_the_versions_are_exact_for_any_cut_into_windows_and_runs(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
    identity: str,
    truncates: bool,
    is_large: bool,
    pieces: tuple[int, int],
    tracked: tuple[str, ...] | None,
) -> None:
    """D1 to D6, D9, D12, D14, H1, H3: hundreds of histories against a reference fold."""
    merge_as_if_large(monkeypatch, is_large)
    monkeypatch.setattr("pgcdc_assets.merge.kinds.history.REPLACED_PER_CHANGE", -1)
    _try_histories(spark, zone, rng, identity, truncates, pieces, tracked)


def test_versions_of_whole_old_rows_have_the_positions_and_operations_of_their_changes(
    spark: SparkSession, zone: RawZone, rng: random.Random
) -> None:
    """REPLICA IDENTITY FULL, with TRUNCATE, in each run: versions by position, ordinal and op."""
    _try_histories(spark, zone, rng, "f", True, (2, 1), None)


@pytest.mark.parametrize(
    ("identity", "tracked"),
    [
        pytest.param("d", None, id="default", marks=pytest.mark.soak),
        pytest.param("d", ("doc", "number"), id="two columns", marks=pytest.mark.soak),
        pytest.param("f", None, id="full", marks=pytest.mark.soak),
        pytest.param("f", ("doc", "number"), id="full, two columns", marks=pytest.mark.soak),
    ],
)
def test_a_rewrite_of_the_range_of_the_changes_has_the_same_versions(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
    identity: str,
    tracked: tuple[str, ...] | None,
) -> None:
    """Large merges with changes in a narrow key range have the same versions."""
    bound_merges(monkeypatch)
    monkeypatch.setattr("pgcdc_assets.merge.kinds.history.REPLACED_PER_CHANGE", 1_000_000)
    report = _try_histories(spark, zone, rng, identity, False, (3, 3), tracked)
    log = log_of(report.path)
    assert [entry["operation"] for entry in reversed(log)][1:] == ["WRITE"] * 3


def _try_histories(
    spark: SparkSession,
    zone: RawZone,
    rng: random.Random,
    identity: str,
    truncates: bool,
    pieces: tuple[int, int],
    tracked: tuple[str, ...] | None,
) -> MergeReport:
    expected = Versions(key=(0, 1), tracked=None if tracked is None else (0, 1, 2, 3))
    target = CdcTable("shop", "items", scd=(2,), tracked=tracked)
    report = merge_random_history(spark, zone, rng, target, expected, identity, pieces, truncates)
    wanted = sorted(map(described_version, expected.all))
    assert stored_versions(spark, report.path) == wanted
    assert report.row_count == len(wanted)
    return report


def test_an_update_of_an_untracked_column_opens_no_version_and_is_kept(
    spark: SparkSession, zone: RawZone
) -> None:
    """D12: the current version has the newest value of every column."""
    landing = Landing(zone, [random_relation("d")])
    landing.begin([["1", "1", "a", "1.00", "x"], ["1", "2", "a", "1.00", "x"]])
    landing.land(
        [update("1", "1", "a", "1.00", "y")],
        [update("1", "1", "a", "1.00", "z"), update("1", "2", "b", "1.00", "y")],
        [update("1", "2", "b", "1.00", "z")],
    )
    target = CdcTable("shop", "items", scd=(2,), tracked=("doc",))
    (report,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(report, MergeReport), report.error
    rows = spark.read.format("delta").load(report.path).orderBy("id", "_valid_from_lsn").collect()
    assert [(r.id, r.doc, r.note, r._is_current) for r in rows] == [
        (1, "a", "z", True),
        (2, "a", "x", False),
        (2, "b", "z", True),
    ]
    # One change of a row of the table.
    landing.land([update("1", "1", "a", "1.00", "w")])
    (report,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(report, MergeReport), report.error
    rows = spark.read.format("delta").load(report.path).where("id = 1").collect()
    assert [(r.doc, r.note, r._is_current) for r in rows] == [("a", "w", True)]


def test_a_row_whose_tracked_column_is_null_has_a_version(
    spark: SparkSession, zone: RawZone
) -> None:
    """Nothing is before the row, so it is not the same as before."""
    landing = Landing(zone, [relation(column("id", "text"), column("v", "text"))])
    landing.begin([["1", None]])
    landing.land([insert("2", None)])
    target = CdcTable("shop", "items", scd=(2,), tracked=("v",))
    (report,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(report, MergeReport), report.error
    rows = spark.read.format("delta").load(report.path).collect()
    assert sorted((row["id"], row["v"]) for row in rows) == [("1", None), ("2", None)]


@pytest.mark.sampled
def test_a_new_snapshot_adds_only_its_differences(
    spark: SparkSession, zone: RawZone, rng: random.Random
) -> None:
    """The snapshot may be in the middle of the changes of one run."""
    history = RandomHistory(rng, "d", histories=60)
    copied = history.copied()
    landing = Landing(zone, [random_relation("d")])
    landing.begin(copied)
    expected = Versions(key=(0, 1))
    expected.copy(copied, landing.lsn)

    def work() -> None:
        transaction = history.transaction()
        expected.apply(transaction, landing.lsn)
        landing.land(transaction)

    work()
    # Simulate a missed change, which the snapshot corrects.
    changed = [list(row) for rows in history.rows.values() for row in rows]
    changed[0][2] = "missed"
    del changed[1]
    by_key = {(row[0], row[1]): row for row in changed}
    history.rows = {
        number: [by_key[row[0], row[1]] for row in rows if (row[0], row[1]) in by_key]
        for number, rows in history.rows.items()
    }
    landing.copy(changed)
    expected.copy(changed, landing.lsn)
    work()
    target = CdcTable("shop", "items", scd=(2,))
    (report,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(report, MergeReport), report.error.__cause__ or report.error
    assert stored_versions(spark, report.path) == sorted(map(described_version, expected.all))
    assert report.watermark_after == Lsn(landing.lsn)
