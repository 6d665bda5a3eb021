"""Repair of `raw/windows`, if it does not belong to the log of `raw/changes`.

A backup copies one folder after another, so a restored lake may have the two tables from different
times. `raw/changes` decides, because it has the rows and the LSN from which a capture continues:

- `raw/windows` is newer: its windows above the end of the captured changes are removed. A capture
  lands the same WAL again, perhaps with other borders. If the slot no longer has this WAL, the
  capture is refused, as after any loss of captured changes.
- `raw/windows` is older, or lost: the maintenance has removed the log entries of some windows.
  These windows are counted again from their rows. The ranges between them are windows without rows:
  their earlier borders are unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from deltalake import DeltaTable

from pgcdc_assets.errors import RawZoneError, TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.app_ids import floor_app_id, landing_app_id
from pgcdc_assets.raw.delta.commit_records import read_new_entries
from pgcdc_assets.raw.delta.compaction import removals
from pgcdc_assets.raw.delta.files import FileWriter, filesystem
from pgcdc_assets.raw.delta.log_entries import FOLDER, oldest_commit
from pgcdc_assets.raw.delta.scan import (
    DataFile,
    UnreadableFile,
    data_files,
    files_between,
    scan,
    with_statistics,
)
from pgcdc_assets.raw.delta.table import CommitRefused, RawTable
from pgcdc_assets.raw.windows.rows import summaries, window_rows
from pgcdc_assets.raw.windows.summary import COUNTED, SummaryBuilder, WindowSummary

_logger = logging.getLogger(__name__)

# A day of the shortest windows is 34,560 entries, each with counts by table.
_ENTRIES_AT_ONCE = 256


def repair_window_index(
    table: RawTable,
    changes: RawTable,
    app_id: str,
    digest_app_id: str,
    epoch_starts: Mapping[int, int],
) -> None:
    """Make `raw/windows` the index of all windows of `raw/changes`.

    Args:
        table: `raw/windows`.
        changes: `raw/changes`.
        app_id: application id whose transaction version is the last copied log version.
        digest_app_id: application id whose transaction version is the digest of that log entry.
        epoch_starts: the LSN at which the first window of an epoch starts, by epoch.

    Raises:
        TransientError: the lake cannot be written, or log entries were removed at the same time.
        RawZoneError: a file of `raw/changes` is missing.
    """
    stored = table.load_or_create()
    loaded = changes.load()
    if loaded is None:
        return
    files = [(file, _read_windows(table, file)) for file in data_files(stored)]
    with table.writer() as writer:
        log = _write_logged(writer, changes, int(loaded.version()))
        kept: set[LsnWindow] = set()
        counted: list[WindowSummary] = []
        known = [window for _, windows in files for window in windows]
        for epoch in sorted({*_epochs(changes, loaded, known), *epoch_starts, *log.starts}):
            own = [window for window in known if window.epoch == epoch]
            stay, again = _complete(
                changes, loaded, epoch, own, epoch_starts.get(epoch), log.starts.get(epoch)
            )
            kept.update(stay)
            counted += again
        writer.write(window_rows(counted))
        removed = [file for file, windows in files if not kept.issuperset(windows)]
        for file, windows in files:
            if file in removed:
                keys = pa.array([each.key for each in kept.intersection(windows)], pa.string())
                condition = pc.field("window").isin(keys)
                for batch in scan(table, [file], table.schema.names, condition):
                    writer.write(pa.Table.from_batches([batch]))
        added = writer.finish()
    dropped = len(known) - len(kept)
    try:
        table.commit(
            stored,
            added,
            removed=removals(removed),
            app_id=app_id,
            app_version=int(loaded.version()),
            facts={digest_app_id: log.digest},
            record={"repaired": True, "dropped": dropped, "counted_again": len(counted)},
        )
    except CommitRefused:
        # Another process repaired the table at the same time.
        writer.discard()
        return
    _logger.warning(
        "raw/windows of %s did not belong to raw/changes, as after a restore of files from "
        "different times, and was repaired: %d of its windows were removed, %d windows were read "
        "again from the log, and %d were counted again from the rows.",
        changes.uri.removesuffix("/changes"),
        dropped,
        log.window_count,
        len(counted),
    )


@dataclass(frozen=True)
class _Log:
    """The windows in the log.

    Attributes:
        starts: the start of the first window by epoch.
        digest: digest of the newest entry.
    """

    starts: Mapping[int, Lsn]
    digest: int
    window_count: int


def _write_logged(writer: FileWriter, changes: RawTable, version: int) -> _Log:
    """Write the windows of all entries that the log has without a gap through a version."""
    starts: dict[int, Lsn] = {}
    count = digest = 0
    oldest = _oldest_entry(filesystem(changes.lake, changes.uri), changes.uri, version)
    for first in range(oldest, version + 1, _ENTRIES_AT_ONCE):
        versions = range(first, min(first + _ENTRIES_AT_ONCE, version + 1))
        try:
            entries = read_new_entries(changes.lake, changes.uri, versions)
        except FileNotFoundError as error:
            raise TransientError(
                reason=f"Log entries of {changes.uri} were removed while they were read. Run it "
                "again."
            ) from error
        windows = summaries(entries)
        for summary in windows:
            starts.setdefault(summary.window.epoch, summary.window.start)
        writer.write(window_rows(windows))
        count, digest = count + len(windows), entries[-1].digest
    return _Log(starts, digest, count)


def _oldest_entry(files: pafs.FileSystem, uri: str, version: int) -> int:
    oldest = oldest_commit(files, version)
    if oldest is None:
        raise RawZoneError(
            raw_zone=uri,
            reason=f"log entry {version} of its newest version is missing. Restore the folder "
            f"{FOLDER} of the table from one backup.",
        )
    return oldest


def _read_windows(table: RawTable, file: DataFile) -> list[LsnWindow]:
    batches = scan(table, [file], ["window"])
    return [LsnWindow.parse(key) for batch in batches for key in batch.column(0).to_pylist()]


def _epochs(table: RawTable, changes: DeltaTable, known: Iterable[LsnWindow]) -> set[int]:
    found = {window.epoch for window in known}
    for file in with_statistics(table, data_files(changes), ("epoch",)):
        if file.row_count:
            found.update(range(file.minimum["epoch"], file.maximum["epoch"] + 1))
    return found


def _complete(
    changes: RawTable,
    loaded: DeltaTable,
    epoch: int,
    stored: Sequence[LsnWindow],
    epoch_start: int | None,
    logged_from: Lsn | None,
) -> tuple[list[LsnWindow], list[WindowSummary]]:
    """Return the stored windows of an epoch that stay, and the windows that have to be added.

    Args:
        stored: the windows in `raw/windows`.
        epoch_start: start of the epoch's first window; None: unknown.
        logged_from: start of the first window in the log; None: the log has no window.
    """
    captured = loaded.transaction_version(landing_app_id(changes.capture, epoch))
    if captured is None:
        return [], []
    end = captured if logged_from is None else int(logged_from)
    start = loaded.transaction_version(floor_app_id(changes.capture, epoch)) or epoch_start
    below = [window for window in stored if start is not None and window.end <= start]
    kept = [w for w in stored if w.end <= end and (start is None or w.end > start)]
    kept = _without_overlaps(kept)
    while True:
        added: list[WindowSummary] = []
        for first, last in _holes(kept, start, end):
            added += _count(changes, loaded, epoch, first, last)
        # A stored window that shares rows with another window was not landed in this lake.
        wrong = _overlapping([*kept, *(each.window for each in added)]).intersection(kept)
        if not wrong:
            return [*below, *kept], added
        kept = [window for window in kept if window not in wrong]


def _overlapping(windows: Iterable[LsnWindow]) -> set[LsnWindow]:
    found: set[LsnWindow] = set()
    for before, after in pairwise(sorted(windows)):
        if after.start < before.end:
            found |= {before, after}
    return found


def _without_overlaps(windows: Sequence[LsnWindow]) -> list[LsnWindow]:
    wrong = _overlapping(windows)
    return sorted(window for window in windows if window not in wrong)


def _holes(
    windows: Sequence[LsnWindow], start: int | None, end: int
) -> list[tuple[int | None, int]]:
    """Return the ranges through `end` that no window has; the first start may be unknown."""
    found = []
    for window in windows:
        if start is None or start < window.start:
            found.append((start, int(window.start)))
        start = int(window.end)
    if start is None or start < end:
        found.append((start, end))
    return found


def _count(
    changes: RawTable, loaded: DeltaTable, epoch: int, start: int | None, end: int
) -> list[WindowSummary]:
    """Count the rows of a range by their windows, and add windows between them without rows.

    Args:
        start: None: the range starts with the first window with rows.
    """
    builders: dict[str, SummaryBuilder] = {}
    condition = (pc.field("epoch") == epoch) & (pc.field("commit_lsn") < end)
    condition &= pc.field("commit_lsn") >= (start or 0)
    files = files_between(data_files(loaded), epoch, start or 0, end)
    try:
        for batch in scan(changes, files, [*COUNTED, "window"], condition):
            for key in pc.unique(batch.column("window")).to_pylist():
                window = LsnWindow.parse(key)
                rows = batch.filter(pc.equal(batch.column("window"), key))
                builders.setdefault(key, SummaryBuilder(window)).add(rows)
    except UnreadableFile as error:
        raise RawZoneError(
            raw_zone=changes.uri,
            reason="a file of its log is missing, so its windows cannot be counted again for "
            "raw/windows. Restore the file from a backup.",
        ) from error
    found: list[WindowSummary] = []
    for key in sorted(builders):
        summary = builders[key].build()
        if start is not None and start < summary.window.start:
            found.append(WindowSummary(LsnWindow.of(epoch, start, summary.window.start)))
        found.append(summary)
        start = int(summary.window.end)
    if start is not None and start < end:
        found.append(WindowSummary(LsnWindow.of(epoch, start, end)))
    return found
