"""`raw/windows`: an index of the landed windows that survives the cleanup of log entries.

Each landing records its window in the commit of its rows. Old log entries are removed, because
opening a table lists all log entries. Maintenance copies the records to `raw/windows` before the
removal. The version of an application transaction of `raw/windows` is the last copied log version:
a window is in `raw/windows` or in a newer log entry, never in both, also after a crash.

Each copy writes a small file. Some copies therefore rewrite the earlier small files as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.compaction import removals
from pgcdc_assets.raw.row_groups import gathered
from pgcdc_assets.raw.scan import DataFile, data_files, scan
from pgcdc_assets.raw.table import CommitRefused, RawTable
from pgcdc_assets.raw.window_summary import WindowSummary

STATISTICS = ("epoch", "start_lsn", "end_lsn")

# Number of small files that are rewritten as one file, and the size below which a file is small.
_SMALL_FILES = 64
_SMALL_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class WindowIndex:
    """The records of landed windows, from `raw/windows` and from the log of `raw/changes`.

    Attributes:
        table: `raw/windows`.
        changes: `raw/changes`.
        app_id: application id whose transaction version is the last copied log version.
    """

    table: RawTable
    changes: RawTable
    app_id: str

    def windows(
        self, changes: DeltaTable, epoch: int, since: int, until: int | None = None
    ) -> list[WindowSummary]:
        """Return the windows of an epoch that end above `since` and start below `until`.

        The windows are in stream order.
        """
        index = self.table.newest()
        try:
            logged = self._logged(changes, self._saved_version(index))
        except FileNotFoundError:
            # Another process copied and removed log entries after the index was loaded.
            index = self.table.newest()
            logged = self._logged(changes, self._saved_version(index))
        found = [] if index is None else self._stored(index, epoch, since, until)
        for summary in logged:
            window = summary.window
            if (
                window.epoch == epoch
                and window.end > since
                and (until or window.end) > window.start
            ):
                found.append(summary)
        return sorted(found, key=lambda summary: summary.window)

    def unsaved_entries(self, changes: DeltaTable) -> int:
        """Return the number of log entries of `raw/changes` that are not copied."""
        return int(changes.version()) - self._saved_version(self.table.load())

    def save(self, changes: DeltaTable) -> None:
        """Copy the records of all log entries that are not copied.

        Raises:
            TransientError: the lake cannot be written.
        """
        index = self.table.load_or_create()
        try:
            windows = self._logged(changes, self._saved_version(index))
        except FileNotFoundError:
            # Another process copied and removed log entries after the index was loaded.
            return
        small = [file for file in data_files(index) if file.size_bytes < _SMALL_BYTES]
        if len(small) < _SMALL_FILES:
            small = []
        with self.table.writer() as writer:
            for rows in gathered(scan(self.table, small, self.table.schema.names)):
                writer.write(rows)
            writer.write(pa.Table.from_pylist([_row(w) for w in windows], schema=self.table.schema))
            files = writer.finish()
        try:
            self.table.commit(
                index,
                files,
                removed=removals(small),
                app_id=self.app_id,
                app_version=int(changes.version()),
            )
        except CommitRefused:
            # Another process copied the records. The next call copies the remaining records.
            writer.discard()

    def _saved_version(self, index: DeltaTable | None) -> int:
        version = None if index is None else index.transaction_version(self.app_id)
        return 0 if version is None else version

    def _logged(self, changes: DeltaTable, after_version: int) -> list[WindowSummary]:
        records = self.changes.records(changes, after_version)
        return [WindowSummary.from_record(record) for record in records if "window" in record]

    def _stored(
        self, index: DeltaTable, epoch: int, since: int, until: int | None
    ) -> list[WindowSummary]:
        condition = (pc.field("epoch") == epoch) & (pc.field("end_lsn") > since)
        if until is not None:
            condition &= pc.field("start_lsn") < until
        files = [f for f in data_files(index) if _may_hold(f, epoch, since, until)]
        return [
            _summary(row)
            for batch in scan(self.table, files, self.table.schema.names, condition)
            for row in batch.to_pylist()
        ]


def _may_hold(file: DataFile, epoch: int, since: int, until: int | None) -> bool:
    least, most = file.minimum, file.maximum
    if not least:
        # A file without statistics and without rows is empty.
        return file.row_count > 0
    is_early = until is None or least["start_lsn"] < until
    is_of_epoch = least["epoch"] <= epoch <= most["epoch"]
    return bool(is_early and most["end_lsn"] > since and is_of_epoch)


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


def _summary(row: dict[str, Any]) -> WindowSummary:
    facts: dict[str, Any] = {
        **row,
        "window": LsnWindow.parse(row["window"]),
        "counts": json.loads(row["counts"]),
    }
    for name in ("epoch", "start_lsn", "end_lsn"):
        del facts[name]
    for name in ("first_commit_lsn", "last_commit_lsn"):
        facts[name] = None if facts[name] is None else Lsn(facts[name])
    return WindowSummary(**facts)
