"""Merges of tables whose columns are all texts, which need no Spark, and checks of their rows."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import CLOCK, Change, Landing, Version, Versions
from pgcdc_assets_tests.support.merge.random_history import COLUMNS

NAMES = [each.name for each in COLUMNS]
_BEGIN = ("_valid_from", "_valid_from_epoch", "_valid_from_lsn", "_ordinal", "_op")
_END = ("_valid_to", "_valid_to_epoch", "_valid_to_lsn", "_is_current")
_IMAGE = ("_lsn", "_ordinal", "_commit_ts", "_rescued")
_NO_SPARK = cast("SparkSession", None)

Rows = list[tuple[Any, ...]]


def land_each(landing: Landing, expected: Versions, changes: Sequence[Change]) -> None:
    """Land a window with a transaction for each change."""
    for number, change in enumerate(changes):
        expected.apply([change], landing.lsn + 0x10 * number)
    landing.land(*([change] for change in changes))


def merge(landing: Landing, target: CdcTable) -> MergeReport:
    """Merge the last windows without a Spark session."""
    (report,) = merge_tables(
        _NO_SPARK, landing.zone, [target], landing.windows[-1], sessions=[_NO_SPARK]
    )
    assert isinstance(report, MergeReport), report.error.__cause__ or report.error
    return report


def check_image(
    report: MergeReport,
    expected: Versions,
    names: Sequence[str] = NAMES,
    *,
    has_twins: bool = False,
) -> None:
    """Compare a table with the newest rows.

    Args:
        names: the columns of the source.
        has_twins: the changes have whole old rows. A transaction with a deferred constraint may add
            a row equal to the one that is there, and delete one of both: which one is not known.
    """
    rows: Rows = [
        (*each.row, each.start, each.ordinal, _changed_at(each), None)
        for each in expected.open.values()
    ]
    rows.sort(key=repr)
    stored = stored_rows(report.path, *names, *_IMAGE)
    if has_twins:
        count = len(names)
        assert [row[:count] for row in stored] == [row[:count] for row in rows]
        positions = slice(count, count + 2)
        assert all(a[positions] <= b[positions] for a, b in zip(stored, rows, strict=True))
    else:
        assert stored == rows
    assert report.row_count == len(rows)


def check_history(report: MergeReport, expected: Versions, names: Sequence[str] = NAMES) -> None:
    """Compare the table of a history with the versions."""
    versions: Rows = [
        (
            *each.row,
            *(_changed_at(each) or CLOCK, 1, each.start, each.ordinal, each.op),
            *((None, None, None, True) if each.end is None else _ended(each.end)),
        )
        for each in expected.all
    ]
    assert stored_rows(report.path, *names, *_BEGIN, *_END) == sorted(versions, key=repr)
    assert report.row_count == len(versions)


def _changed_at(version: Version) -> dt.datetime | None:
    """Return the time of a row's last change; None for a row of a snapshot."""
    return None if version.op == "S" else _time(version.start)


def _ended(lsn: int) -> tuple[Any, ...]:
    return _time(lsn), 1, lsn, False


def _time(lsn: int) -> dt.datetime:
    return CLOCK + dt.timedelta(microseconds=lsn)


def stored_rows(path: str, *names: str) -> Rows:
    """Return columns of a table, in a sortable order."""
    rows = pa.RecordBatchReader.from_stream(DeltaTable(path).scan()).read_all().to_pylist()
    return sorted((tuple(row[name] for name in names) for row in rows), key=repr)
