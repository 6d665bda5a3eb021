"""Merges of windows whose rows another program has deleted, or has added to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.errors import RawZoneError, TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables, rebuild_table
from pgcdc_assets.merge.kinds.choose import choose_table_kind
from pgcdc_assets.raw.changes import ChangeLog
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import StepLimit
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.merge.history import Landing, delete, insert
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

pytestmark = pytest.mark.spark

_ITEMS = CdcTable("shop", "items", scd=(1, 2))
_ITEMS_1 = CdcTable("shop", "items")
_OTHER = CdcTable("shop", "other")


@pytest.fixture
def landing(zone: RawZone) -> Landing:
    return Landing.of_two_tables(zone)


def _delete(condition: str) -> Callable[[DeltaTable], None]:
    def run(table: DeltaTable) -> None:
        assert table.delete(condition)["num_deleted_rows"]

    return run


def _overwrite(table: DeltaTable) -> None:
    """Write the table of another time over the table, as a job of a person may."""
    rows = table.to_pyarrow_table()
    write_deltalake(table, rows.filter(pa.compute.field("commit_lsn") < 0x1010), mode="overwrite")


def _add_again(table: DeltaTable) -> None:
    rows = table.to_pyarrow_table()
    write_deltalake(table, rows.filter(pa.compute.field("ordinal") == 1), mode="append")


_DAMAGES: dict[str, tuple[Callable[[DeltaTable], None], int]] = {
    "one row": (_delete("ordinal = 1"), 2),
    "one of two transactions": (_delete("commit_lsn = 4112"), 1),
    "all rows": (_delete("relation_id = 1000"), 0),
    "a lost file": (_overwrite, 0),
    "a row twice": (_add_again, 4),
}


def _merge_all(
    spark: SparkSession, landing: Landing, *targets: CdcTable, limit: StepLimit | None = None
) -> tuple[list[MergeFailure], list[MergeReport]]:
    found = list(merge_tables(spark, landing.zone, targets, landing.windows[-1], limit=limit))
    failures = [each for each in found if isinstance(each, MergeFailure)]
    return failures, [each for each in found if isinstance(each, MergeReport)]


@pytest.mark.sampled
@pytest.mark.parametrize("damage", _DAMAGES)
def test_changes_that_another_program_has_altered_stop_their_table(
    spark: SparkSession, landing: Landing, damage: str
) -> None:
    """H8: the table keeps its rows and its watermark; a new snapshot replaces the changes."""
    zone = landing.zone
    failures, first = _merge_all(spark, landing, _ITEMS, _OTHER)
    assert not failures
    window = landing.land([insert("2", "b"), insert("3", "c")], [delete("1", None)])
    assert int(window.start) == 4112
    paths = [each.path for each in first if each.table == "items"]
    versions = [DeltaTable(path).version() for path in paths]
    alter, count = _DAMAGES[damage]
    alter(DeltaTable(zone.changes.table.uri))
    failures, others = _merge_all(spark, landing, _ITEMS, _OTHER)
    assert [(type(each.error), each.table) for each in failures] == [(RawZoneError, "items")] * 2
    text = str(failures[0].error)
    assert f"raw/changes: 3 changes of shop.items were landed between {window.start} and " in text
    assert f"but the files contain {count}, so another program has " in text
    assert "pgcdc resnapshot test shop.items" in text
    assert [each.table for each in others] == ["other"]
    assert [DeltaTable(path).version() for path in paths] == versions
    landing.copy([["2", "b"], ["3", "c"]])
    landing.land([insert("4", "d")])
    failures, reports = _merge_all(spark, landing, _ITEMS)
    assert not failures
    assert [report.row_count for report in reports] == [3, 4]


def test_steps_before_the_lost_changes_are_merged(spark: SparkSession, landing: Landing) -> None:
    merge(spark, landing, _ITEMS_1)
    for number in range(2, 5):
        landing.land([insert(str(number), "b")])
    lost = landing.windows[-2]
    _delete(f"commit_lsn = {int(lost.start)}")(DeltaTable(landing.zone.changes.table.uri))
    failures, reports = _merge_all(spark, landing, _ITEMS_1, limit=StepLimit(changes=1))
    assert (len(failures), len(reports)) == (1, 0)
    assert f"between {lost.start} and {lost.end}" in str(failures[0].error)
    path = table_path(landing.zone.lake, landing.zone.name, "shop", "items", 1)
    assert DeltaTable(path).count() == 2


@pytest.mark.sampled
def test_a_merge_that_begins_or_ends_within_a_window_counts_the_whole_window(
    spark: SparkSession, landing: Landing
) -> None:
    """A window that is merged in two parts, and one with a snapshot in the middle."""
    merge(spark, landing, _ITEMS_1)
    whole = landing.land(*([insert(str(number), "b")] for number in range(2, 8)))
    part = LsnWindow(1, whole.start, Lsn(whole.start + 0x20))
    assert merge(spark, landing, _ITEMS_1, part).changes_read == 2
    copied = [["1", "a"], *([str(number), "b"] for number in range(2, 6))]
    landing.copy(copied, at=int(whole.start) + 0x40)
    report = merge(spark, landing, _ITEMS_1)
    assert (report.changes_read, report.row_count) == (2, 7)
    landing.zone.changes.compact(2)
    # History of the same windows, from the first snapshot on.
    assert merge(spark, landing, CdcTable("shop", "items", scd=(2,))).row_count == 7
    _delete(f"commit_lsn < {int(whole.end)}")(DeltaTable(landing.zone.changes.table.uri))
    landing.land([insert("8", "b")])
    # Rows of windows that are merged may be deleted.
    assert merge(spark, landing, _ITEMS_1).row_count == 8


@pytest.mark.sampled
def test_a_rebuild_without_deleted_changes_counts_them(
    spark: SparkSession, landing: Landing
) -> None:
    """The rows may be personal data, which the table is not to have either."""
    landing.land([insert("2", "b"), insert("3", "c")])
    merge(spark, landing, _ITEMS_1)
    assert rebuild_table(spark, landing.zone, _ITEMS_1, 1).changes_missing == 0
    _delete("ordinal = 1")(DeltaTable(landing.zone.changes.table.uri))
    report = rebuild_table(spark, landing.zone, _ITEMS_1, 1)
    assert (report.changes_read, report.changes_missing, report.row_count) == (1, 1, 2)
    landing.land([insert("4", "d")])
    assert merge(spark, landing, _ITEMS_1).row_count == 3


@pytest.mark.parametrize("is_deleted", [True, False])
def test_files_that_change_after_the_count_are_counted_again(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    merge_by_spark(monkeypatch)
    merge(spark, landing, _ITEMS_1)
    landing.land([insert("2", "b"), insert("3", "c")])
    changes = landing.zone.changes

    def after_the_count(*arguments: Any) -> Any:
        if is_deleted:
            _delete("ordinal = 1")(DeltaTable(changes.table.uri))
        else:
            landing.land([insert("4", "d")])
            assert changes.compact(2)
        return choose_table_kind(*arguments)

    monkeypatch.setattr("pgcdc_assets.merge.run.choose_table_kind", after_the_count)
    failures, reports = _merge_all(spark, landing, _ITEMS_1)
    assert [type(each.error) for each in failures] == [RawZoneError] * is_deleted
    assert [each.row_count for each in reports] == [3] * (not is_deleted)


def test_windows_that_retention_removes_during_the_count_are_a_transient_error(
    spark: SparkSession, landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(spark, landing, _ITEMS_1)
    landing.land([insert("2", "b")])
    _delete("relation_id = 1000")(DeltaTable(landing.zone.changes.table.uri))
    monkeypatch.setattr(ChangeLog, "kept_from", lambda log, epoch: landing.windows[-1].end)
    failures, _ = _merge_all(spark, landing, _ITEMS_1)
    assert [type(each.error) for each in failures] == [TransientError]


@pytest.mark.sampled
@pytest.mark.parametrize("is_first", [True, False])
def test_a_snapshot_with_lost_rows_is_not_applied(
    spark: SparkSession, landing: Landing, is_first: bool
) -> None:
    """A later snapshot is applied instead, also to a history that has earlier versions."""
    if not is_first:
        _merge_all(spark, landing, _ITEMS)
        landing.land([insert("2", "b")])
    landing.copy([["1", "a"], ["2", "b"]])
    landing.land([])
    lost = landing.lsn - 0x10
    assert DeltaTable(landing.zone.snapshots.table.uri).delete(
        f"snapshot_lsn = {lost} AND new[1] = '2'"
    )["num_deleted_rows"]
    failures, reports = _merge_all(spark, landing, _ITEMS)
    assert [type(each.error) for each in failures] == [RawZoneError] * len(failures)
    # A new history begins with the first snapshot, and stops at the second one.
    assert len(failures) == 2
    text = str(failures[0].error)
    assert "raw/snapshots: 2 rows of shop.items were landed as the snapshot at " in text
    assert "but the files contain 1" in text
    assert not reports
    landing.copy([["1", "a"], ["2", "b"], ["3", "c"]])
    landing.land([insert("4", "d")])
    failures, reports = _merge_all(spark, landing, _ITEMS)
    assert not failures, failures[0].error
    assert [report.row_count for report in reports] == [4, 4]


def test_rows_that_another_program_adds_to_an_empty_snapshot_are_not_applied(
    spark: SparkSession, landing: Landing
) -> None:
    merge(spark, landing, _ITEMS_1)
    snapshots = landing.zone.snapshots.table
    landing.land([])
    landing.copy([])
    landing.land([])
    rows = DeltaTable(snapshots.uri).to_pyarrow_table()
    at = pa.array([landing.lsn - 0x10] * rows.num_rows, rows.schema.field("snapshot_lsn").type)
    added = rows.set_column(rows.schema.get_field_index("snapshot_lsn"), "snapshot_lsn", at)
    write_deltalake(snapshots.uri, added, mode="append")
    failures, _ = _merge_all(spark, landing, _ITEMS_1)
    assert len(failures) == 1
    assert "0 rows of shop.items were landed as the snapshot at " in str(failures[0].error)
    assert "contain 1, so another program has added rows" in str(failures[0].error)
