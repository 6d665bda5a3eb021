"""An error of one small table does not stop the others, and keeps its kind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables
from pgcdc_assets.merge.batch import run
from pgcdc_assets.merge.batch.casts import Casts
from pgcdc_assets.merge.batch.spark_fallback import CommitConflict
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_together, merges_by_spark

pytestmark = pytest.mark.spark

_ITEMS, _NOTES = CdcTable("shop", "items"), CdcTable("shop", "notes")
_NOTES_ID = 4_711


@pytest.fixture
def landing(spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch) -> Landing:
    """Two merged tables, each with a change that waits."""
    merge_together(monkeypatch)
    items = relation(column("id"), column("v", "text"))
    landing = Landing(zone, [items, replace(items, relation_id=_NOTES_ID, table="notes")])
    landing.begin([["1", "a"]])
    landing.land([replace(insert("5", "e"), relation_id=_NOTES_ID)])
    for _ in merge_tables(spark, zone, [_ITEMS, _NOTES], landing.windows[-1]):
        pass
    landing.land([update("1", "b"), replace(insert("6", "f"), relation_id=_NOTES_ID)])
    return landing


def _merge_both(
    spark: SparkSession, landing: Landing
) -> tuple[MergeReport | MergeFailure, MergeReport | MergeFailure]:
    found = {
        outcome.table: outcome
        for outcome in merge_tables(spark, landing.zone, [_ITEMS, _NOTES], landing.windows[-1])
    }
    return found["items"], found["notes"]


def _fails_for_items(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, by_path: Callable[..., str]
) -> None:
    """Let a function of `run` fail if its arguments belong to the first table."""
    real = getattr(run, name)

    def fail(*args: Any, **more: Any) -> Any:
        if by_path(*args).endswith("items"):
            raise error
        return real(*args, **more)

    monkeypatch.setattr(run, name, fail)


def test_an_error_of_this_package_keeps_its_kind(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ConfigurationError(reason="the credentials have expired")
    _fails_for_items(monkeypatch, "replace_rows", error, lambda zone, state, *_: state.path)
    items, notes = _merge_both(spark, landing)
    assert isinstance(items, MergeFailure)
    assert items.error is error
    assert isinstance(notes, MergeReport)


def test_a_defect_of_one_table_is_logged_and_spark_merges_the_table(
    spark: SparkSession,
    landing: Landing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = IndexError("the value of a row")
    _fails_for_items(monkeypatch, "replace_rows", error, lambda zone, state, *_: state.path)
    with caplog.at_level(logging.WARNING):
        items, notes = _merge_both(spark, landing)
    assert isinstance(items, MergeReport)
    assert isinstance(notes, MergeReport)
    assert (merges_by_spark(items.path) > 0, merges_by_spark(notes.path)) == (True, 0)
    assert "items: IndexError, so Spark merges it" in caplog.text
    assert "the value of a row" not in caplog.text


def test_a_table_whose_log_cannot_be_read_after_a_conflict_does_not_stop_the_others(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is read to find out who has committed."""
    with monkeypatch.context() as patch:
        _fails_for_items(
            patch, "replace_rows", CommitConflict(), lambda zone, state, *_: state.path
        )
        _fails_for_items(patch, "open_table", DeltaError("no answer"), lambda lake, path: path)
        items, notes = _merge_both(spark, landing)
    assert isinstance(items, MergeReport)
    assert isinstance(notes, MergeReport)
    assert (merges_by_spark(items.path) > 0, merges_by_spark(notes.path)) == (True, 0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "error", [ConfigurationError(reason="no answer"), DeltaError("no answer"), OSError("no answer")]
)
def test_changes_that_cannot_be_read_together_are_read_by_spark(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(run, "read_input", fail)
    items, notes = _merge_both(spark, landing)
    assert isinstance(items, MergeReport)
    assert isinstance(notes, MergeReport)
    assert min(merges_by_spark(items.path), merges_by_spark(notes.path)) > 0


def test_changes_that_were_not_read_completely_are_read_by_spark(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is lost between the two reads of the raw zone would be lost in the table."""

    def lose_one(*args: Any, **more: Any) -> Iterator[pa.RecordBatch]:
        for batch in scan_changes(*args, **more):
            yield batch.slice(1)

    monkeypatch.setattr("pgcdc_assets.merge.batch.input.scan_changes", lose_one)
    for report in _merge_both(spark, landing):
        assert isinstance(report, MergeReport), report
        assert report.spark_reason.endswith("are not those that were counted")
        assert report.row_count == (1 if report.table == "items" else 2)
        assert report.rows_inserted + report.rows_updated == 1


def test_the_casts_are_exact_in_several_projections(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of a projection counts the texts that pad its columns."""
    merge_together(monkeypatch)
    kinds = ["int8", "date", "float8", "bool", "int2"]
    columns = [column(f"c{number}", kind) for number, kind in enumerate(kinds)]
    landing = Landing(zone, [relation(column("id"), *columns)])
    landing.begin([["1", "9", "2020-01-01", "0.5", "t", None]])
    landing.land([insert("2", "8", None, "NaN", "f", "3")])
    monkeypatch.setattr("pgcdc_assets.merge.batch.casts.MOST_TEXTS", 4)
    projections: list[int] = []
    real = Casts._project

    def project(casts: Any, spark: SparkSession, by_expression: Any) -> Any:
        projections.append(len(by_expression))
        return real(casts, spark, by_expression)

    monkeypatch.setattr(Casts, "_project", project)
    report = merge(spark, landing, CdcTable("shop", "items"))
    assert merges_by_spark(report.path) == 0
    assert len(projections) > 1
    assert sum(projections) == len(kinds) + 1
    found = spark.read.format("delta").load(report.path).drop("_commit_ts").collect()
    assert sorted(str(tuple(row)[:6]) for row in found) == [
        "(1, 9, datetime.date(2020, 1, 1), 0.5, True, None)",
        "(2, 8, None, nan, False, 3)",
    ]
