"""`raw/windows`: an index of the landed windows that survives the cleanup of log entries.

Each landing records its window in the commit of its rows. Old log entries are removed, because
opening a table lists all log entries. Maintenance copies the records to `raw/windows` before the
removal. The version of an application transaction of `raw/windows` is the last copied log version:
a window is in `raw/windows` or in a newer log entry, never in both, also after a crash.

The last copied log entry is never removed, because maintenance removes entries before its
checkpoint only, and `raw/windows` has a digest of this entry. If the entry is missing or another
one, the two tables are from different times, as after a restore (`repair.py`).

Each copy writes a small file. Some copies therefore rewrite the earlier small files as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.delta.commit_records import LogEntry
from pgcdc_assets.raw.delta.compaction import removals
from pgcdc_assets.raw.delta.row_groups import gathered
from pgcdc_assets.raw.delta.scan import DataFile, data_files, scan
from pgcdc_assets.raw.delta.table import CommitRefused, RawTable
from pgcdc_assets.raw.windows.repair import repair_window_index
from pgcdc_assets.raw.windows.rows import (
    LANDED,
    LandedWindow,
    parse_landed,
    parse_row,
    summaries,
    window_rows,
)
from pgcdc_assets.raw.windows.summary import WindowSummary

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
        epoch_starts: returns the LSN at which the first window of each epoch starts.
    """

    table: RawTable
    changes: RawTable
    app_id: str
    epoch_starts: Callable[[], Mapping[int, int]] = dict

    def windows(
        self, changes: DeltaTable, epoch: int, since: int, until: int | None = None
    ) -> list[WindowSummary]:
        """Return the windows of an epoch that end above `since` and start below `until`.

        The windows are in stream order.

        Raises:
            TransientError: `raw/windows` had to be repaired, and could not be written.
            RawZoneError: `raw/windows` has to be repaired, and rows of `raw/changes` are lost.
        """
        index, entries = self._read(changes)
        rows = self._stored(index, self.table.schema.names, epoch, since, until)
        found = [parse_row(row) for row in rows]
        found += _between(summaries(entries), epoch, since, until)
        return sorted(found, key=lambda summary: summary.window)

    def landed_windows(
        self, changes: DeltaTable, epoch: int, since: int, until: int | None = None
    ) -> list[LandedWindow]:
        """Return the same windows as `windows`, without their counts by table."""
        index, entries = self._read(changes)
        found = [parse_landed(row) for row in self._stored(index, LANDED, epoch, since, until)]
        for each in _between(summaries(entries), epoch, since, until):
            found.append(LandedWindow(each.window, each.row_count, each.last_commit_ts))
        return sorted(found, key=lambda landed: landed.window)

    def unsaved_entries(self, changes: DeltaTable) -> int:
        """Return the number of log entries of `raw/changes` that are not copied."""
        return len(self._read(changes)[1])

    def save(self, changes: DeltaTable) -> bool:
        """Copy the records of all log entries that are not copied.

        Returns:
            Whether all entries through the loaded version are copied. Otherwise another process
            copied records at the same time, and the next call copies the remaining ones.

        Raises:
            TransientError: the lake cannot be written.
        """
        index = self.table.load_or_create()
        entries = self._unsaved(index, changes)
        if entries is None:
            self._read(changes)
            return False
        if not entries:
            return True
        small = [file for file in data_files(index) if file.size_bytes < _SMALL_BYTES]
        if len(small) < _SMALL_FILES:
            small = []
        with self.table.writer() as writer:
            for rows in gathered(scan(self.table, small, self.table.schema.names)):
                writer.write(rows)
            writer.write(window_rows(summaries(entries)))
            files = writer.finish()
        try:
            self.table.commit(
                index,
                files,
                removed=removals(small),
                app_id=self.app_id,
                app_version=int(changes.version()),
                facts={self._digest_app_id: entries[-1].digest},
            )
        except CommitRefused:
            writer.discard()
            return False
        return True

    @property
    def _digest_app_id(self) -> str:
        """The application id whose transaction version is the digest of the last copied entry."""
        return f"{self.app_id}:entry"

    def _read(self, changes: DeltaTable) -> tuple[DeltaTable | None, list[LogEntry]]:
        """Return the index, which is repaired if necessary, and the entries that it lacks."""
        index = self.table.newest()
        entries = self._unsaved(index, changes)
        if entries is None:
            # Another process copied and removed log entries after `changes` or the index was
            # loaded. The index first: its last copied entry is then in the log.
            index = self.table.load()
            changes = self.changes.load() or changes
            entries = self._unsaved(index, changes)
        if entries is None:
            starts = self.epoch_starts()
            repair_window_index(self.table, self.changes, self.app_id, self._digest_app_id, starts)
            index = self.table.load()
            changes = self.changes.load() or changes
            entries = self._unsaved(index, changes)
        if entries is None:
            raise TransientError(
                reason=f"Another process changes the logs of {self.table.uri} and "
                f"{self.changes.uri}. If they are being restored, wait for the end and run it "
                "again."
            )
        return index, entries

    def _unsaved(self, index: DeltaTable | None, changes: DeltaTable) -> list[LogEntry] | None:
        """Return the entries after the last copied entry; None if the log does not have that."""
        saved = None if index is None else index.transaction_version(self.app_id)
        try:
            entries = self.changes.entries(changes, saved or 0)
        except FileNotFoundError:
            return None
        if not entries:
            return None
        # An index of an early release has no digest.
        digest = None if index is None else index.transaction_version(self._digest_app_id)
        return entries[1:] if digest in (None, entries[0].digest) else None

    def _stored(
        self,
        index: DeltaTable | None,
        columns: Sequence[str],
        epoch: int,
        since: int,
        until: int | None,
    ) -> Iterator[dict[str, Any]]:
        if index is None:
            return
        condition = (pc.field("epoch") == epoch) & (pc.field("end_lsn") > since)
        if until is not None:
            condition &= pc.field("start_lsn") < until
        files = [f for f in data_files(index) if _may_hold(f, epoch, since, until)]
        for batch in scan(self.table, files, columns, condition):
            yield from _dicts(batch)


def _dicts(batch: pa.RecordBatch, size: int = 1024) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch; `to_pylist` of a large batch would double the memory."""
    for start in range(0, batch.num_rows, size):
        yield from batch.slice(start, size).to_pylist()


def _between(
    windows: Sequence[WindowSummary], epoch: int, since: int, until: int | None
) -> list[WindowSummary]:
    return [
        summary
        for summary in windows
        if summary.window.epoch == epoch
        and summary.window.end > since
        and (until is None or summary.window.start < until)
    ]


def _may_hold(file: DataFile, epoch: int, since: int, until: int | None) -> bool:
    # Another program may write files without statistics.
    if file.row_count == 0:
        return False
    least, most = file.minimum, file.maximum
    is_early = until is None or least.get("start_lsn", since) < until
    is_late = "end_lsn" not in most or most["end_lsn"] > since
    is_of_epoch = least.get("epoch", epoch) <= epoch <= most.get("epoch", epoch)
    return bool(is_early and is_late and is_of_epoch)
