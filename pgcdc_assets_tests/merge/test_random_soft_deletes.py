"""SCD1 with soft deletes: random histories with random cuts against a reference fold."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    Version,
    Versions,
    delete,
    insert,
    truncate,
)
from pgcdc_assets_tests.support.merge.random_history import (
    cases,
    comparable_row,
    cuts,
    merge_as_if_large,
    merge_random_history,
    random_relation,
    stored_row,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_SOFT = CdcTable("shop", "items", soft_deletes=True)


@pytest.mark.sampled
@cuts("some")
@cases("default-plain-large", "part-plain-small")
def test_each_key_has_its_newest_state_for_any_cut(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
    identity: str,
    truncates: bool,
    is_large: bool,
    pieces: tuple[int, int],
) -> None:
    """D1 to D6, H1, H3 with soft deletes: hundreds of histories."""
    merge_as_if_large(monkeypatch, is_large)
    expected = Versions(key=(0, 1))
    report = merge_random_history(spark, zone, rng, _SOFT, expected, identity, pieces, truncates)
    assert _found(spark, report.path) == sorted(map(_described, expected.last_of_each_key))


@pytest.mark.soak
def test_a_new_snapshot_deletes_rows_that_it_does_not_contain(
    spark: SparkSession, zone: RawZone
) -> None:
    landing = Landing(zone, [random_relation("d")])
    landing.begin([["1", "1", "a", "1.00", "x"], ["1", "2", "b", "2.00", "y"]])
    landing.land([delete("1", "1", None, None, None)])
    landing.copy([["1", "3", "c", "3.00", "z"]])
    snapshot_at = landing.lsn
    landing.land([insert("1", "1", "again", None, None)])
    (report,) = merge_tables(spark, zone, [_SOFT], landing.windows[-1])
    assert isinstance(report, MergeReport), report.error.__cause__ or report.error
    rows = spark.read.format("delta").load(report.path).orderBy("id").collect()
    assert [(r.id, r.doc, r._deleted, r._deleted_at_lsn) for r in rows] == [
        (1, "again", False, None),
        (2, "b", True, snapshot_at),
        (3, "c", False, None),
    ]
    assert rows[2]._ordinal == -1 and rows[2]._commit_ts is None


@pytest.mark.sampled
def test_a_truncate_marks_every_row_in_place(spark: SparkSession, zone: RawZone) -> None:
    landing = Landing(zone, [random_relation("d")])
    landing.begin([["1", "1", "a", "1.00", "x"], ["1", "2", "b", "2.00", "y"]])
    landing.land([delete("1", "1", None, None, None)])
    merge_all = [_SOFT]
    list(merge_tables(spark, zone, merge_all, landing.windows[-1]))
    landing.land([truncate()])
    (report,) = merge_tables(spark, zone, merge_all, landing.windows[-1])
    assert isinstance(report, MergeReport), report.error
    rows = spark.read.format("delta").load(report.path).orderBy("id").collect()
    assert [(r.id, r._deleted, r._deleted_at_lsn) for r in rows] == [
        (1, True, landing.windows[0].start),
        (2, True, landing.windows[1].start),
    ]
    assert report.rows_updated == 1


@pytest.mark.parametrize("was_soft", [False, True])
def test_a_table_of_another_kind_is_refused_with_the_remedy(
    spark: SparkSession, zone: RawZone, was_soft: bool
) -> None:
    landing = Landing(zone, [random_relation("d")])
    landing.begin([["1", "1", "a", "1.00", "x"]])
    plain = CdcTable("shop", "items")
    for target, is_first in ((_SOFT, was_soft), (plain, not was_soft)):
        if is_first:
            landing.land([delete("1", "1", None, None, None)])
            (report,) = merge_tables(spark, zone, [target], landing.windows[-1])
            assert isinstance(report, MergeReport), report.error
    landing.land([insert("1", "1", "a", None, None)])
    (failure,) = merge_tables(spark, zone, [plain if was_soft else _SOFT], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, ConfigurationError)
    assert "soft deletes" in str(failure.error) and "pgcdc rebuild" in str(failure.error)


def _described(version: Version) -> tuple[Any, ...]:
    return (*comparable_row(version.row), version.end is not None, version.end or 0)


def _found(spark: SparkSession, path: str) -> list[tuple[Any, ...]]:
    rows = spark.read.format("delta").load(path).collect()
    return sorted((*stored_row(r), r._deleted, r._deleted_at_lsn or 0) for r in rows)


@pytest.mark.soak
def test_an_epoch_at_lower_lsns_is_merged(spark: SparkSession, zone: RawZone) -> None:
    """H11: after a move to another cluster, LSNs are lower than those of existing rows."""
    relations = [random_relation("d")]
    first = Landing(zone, relations, lsn=0x9000)
    first.begin([["1", str(i), "a", "1.00", "x"] for i in (1, 2, 3)])
    first.land([delete("1", "3", None, None, None)])
    _merge(spark, first)
    second = Landing(zone, relations, epoch=2, lsn=0x1000)
    second.begin([["1", "1", "new", "1.00", "x"], ["1", "3", "back", "1.00", "x"]])
    deleted = delete("1", "1", None, None, None)
    second.land([deleted, insert("1", "1", "again", None, None)])
    rows = spark.read.format("delta").load(_merge(spark, second)).orderBy("id").collect()
    assert [(r.id, r.doc, r._deleted) for r in rows] == [
        (1, "again", False),
        (2, "a", True),
        (3, "back", False),
    ]


def _merge(spark: SparkSession, landing: Landing) -> str:
    (report,) = merge_tables(spark, landing.zone, [_SOFT], landing.windows[-1])
    assert isinstance(report, MergeReport), report.error.__cause__ or report.error
    return report.path
