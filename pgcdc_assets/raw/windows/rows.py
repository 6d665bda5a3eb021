"""The rows of `raw/windows`, and the windows that are read from them."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw import schema
from pgcdc_assets.raw.delta.commit_records import LogEntry
from pgcdc_assets.raw.windows.summary import StoredCounts, WindowSummary
from pgcdc_assets.table_name import TableName

# The columns of `LandedWindow`.
LANDED = ("window", "row_count", "last_commit_ts")


@dataclass(frozen=True, slots=True)
class LandedWindow:
    """What is read of a window if its counts by table are not needed.

    Attributes:
        window: the window.
        row_count: number of rows.
        last_commit_ts: latest commit time; None in a window without rows.
    """

    window: LsnWindow
    row_count: int
    last_commit_ts: dt.datetime | None


class LandedRows(NamedTuple):
    """The rows of whole windows under some names at the source, as counted at their landing.

    Attributes:
        within: from the start of the first window to the end of the last one.
        names: the names, also of relations that the table does not follow.
        row_count: number of rows of all operations.
    """

    within: LsnWindow
    names: frozenset[TableName]
    row_count: int


def summaries(entries: Iterable[LogEntry]) -> list[WindowSummary]:
    """Return the windows in log entries of `raw/changes`."""
    records = (record for entry in entries for record in entry.records)
    return [WindowSummary.from_record(record) for record in records if "window" in record]


def window_rows(windows: Iterable[WindowSummary]) -> pa.Table:
    """Return the rows of windows."""
    return pa.Table.from_pylist([_row(window) for window in windows], schema=schema.WINDOWS)


def parse_landed(row: Mapping[str, Any]) -> LandedWindow:
    """Return the window of a row with the columns `LANDED`."""
    return LandedWindow(LsnWindow.parse(row["window"]), row["row_count"], row["last_commit_ts"])


def parse_row(row: Mapping[str, Any]) -> WindowSummary:
    """Return the window of a row."""
    facts: dict[str, Any] = {
        **row,
        "window": LsnWindow.parse(row["window"]),
        "counts": StoredCounts(row["counts"]),
    }
    for name in ("epoch", "start_lsn", "end_lsn"):
        del facts[name]
    for name in ("first_commit_lsn", "last_commit_lsn"):
        facts[name] = None if facts[name] is None else Lsn(facts[name])
    return WindowSummary(**facts)


def _row(summary: WindowSummary) -> dict[str, Any]:
    return {
        "epoch": summary.window.epoch,
        "window": summary.window.key,
        "start_lsn": int(summary.window.start),
        "end_lsn": int(summary.window.end),
        "row_count": summary.row_count,
        "transaction_count": summary.transaction_count,
        "counts": json.dumps(summary.counts),
        "first_commit_lsn": summary.first_commit_lsn,
        "last_commit_lsn": summary.last_commit_lsn,
        "first_commit_ts": summary.first_commit_ts,
        "last_commit_ts": summary.last_commit_ts,
    }
