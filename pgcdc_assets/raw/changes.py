"""`raw/changes`: every captured change, exactly once, with one atomic commit per window.

The commit contains the application transaction (application id: capture and epoch; version: the
window's end) and a record with the window's row counts. The windows of an epoch have no gaps: a
window that does not start at the end of the last window is refused. A landed window is recognised
before any row is read, and again at the commit if two processes race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pgcdc_assets.errors import RawExpired, RawZoneError, TransientError, WindowUnavailable
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw import schema
from pgcdc_assets.raw.app_ids import floor_app_id, landing_app_id
from pgcdc_assets.raw.delta.compaction import MINIMUM_FILES, CompactionReport, compact
from pgcdc_assets.raw.delta.refused_commits import NotCommitted
from pgcdc_assets.raw.delta.row_groups import RelationGroups
from pgcdc_assets.raw.delta.scan import UnreadableFile, data_files, files_between, scan
from pgcdc_assets.raw.delta.table import CommitRefused, RawTable
from pgcdc_assets.raw.windows.index import WindowIndex
from pgcdc_assets.raw.windows.rows import LandedWindow
from pgcdc_assets.raw.windows.summary import COUNTED, SummaryBuilder, WindowSummary

STATISTICS = ("epoch", "window", "commit_lsn", "relation_id", "schema", "table")

# Each opening of the table reads the removals of this time, one or two for each window: in seven
# days a window every 2.5 s would make 240,000. No landing has uncommitted files for so long, and
# the maintenance deletes replaced files after a day.
FILE_RETENTION = "interval 26 hours"


@dataclass(frozen=True)
class LandReport:
    """The result of landing a window.

    Attributes:
        summary: row counts and LSNs of the window.
        already_landed: the window was landed before; this call wrote nothing.
        file_count: number of written files.
        size_bytes: size of the written files.
    """

    summary: WindowSummary
    already_landed: bool
    file_count: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class Recount:
    """The row counts of a landed window at the time of decoding, and now.

    Attributes:
        decoded: the record of the window's commit, counted during decoding.
        found: the rows in the files now.
        captured_through: end of the newest landed window.
    """

    decoded: WindowSummary
    found: WindowSummary
    captured_through: Lsn

    @property
    def is_complete(self) -> bool:
        """Whether both counts are equal, by table and operation."""
        return self.decoded == self.found

    def check(self) -> WindowSummary:
        """Return the window's summary.

        Raises:
            WindowUnavailable: rows of the window are missing from the raw zone.
        """
        if not self.is_complete:
            raise _unavailable(
                self.decoded.window,
                self.captured_through,
                f"the raw zone holds {self.found.row_count} of the {self.decoded.row_count} landed "
                "rows",
            )
        return self.decoded


def nothing() -> None:
    """Do nothing: the default of `before_commit`."""


@dataclass(frozen=True)
class ChangeLog:
    """The table of changes of one capture.

    Attributes:
        table: the Delta table.
        window_index: the records of landed windows.
        capture: the capture's name.
    """

    table: RawTable
    window_index: WindowIndex
    capture: str

    def app_id(self, epoch: int) -> str:
        """Return the application id of an epoch's landings."""
        return landing_app_id(self.capture, epoch)

    def captured_through(self, epoch: int) -> Lsn | None:
        """Return the end of the newest landed window; None for an epoch without windows."""
        table = self.table.newest()
        return None if table is None else self._end(table, epoch)

    def kept_from(self, epoch: int) -> Lsn | None:
        """Return the LSN below which retention has removed windows; None without removals."""
        table = self.table.newest()
        return None if table is None else self._floor(table, epoch)

    def floors(self, epochs: Iterable[int]) -> dict[int, Lsn]:
        """Return `kept_from` by epoch, with 0/0 for an epoch without removals."""
        table = self.table.newest()
        nothing_removed = Lsn(0)
        if table is None:
            return dict.fromkeys(epochs, nothing_removed)
        return {epoch: self._floor(table, epoch) or nothing_removed for epoch in epochs}

    @property
    def compaction_app_id(self) -> str:
        """The application id of all commits that rewrite files.

        The application id is necessary because delta-rs does not detect that a concurrent commit
        has removed one of the rewritten files.
        """
        return f"pgcdc:{self.capture}:compaction"

    def floor_app_id(self, epoch: int) -> str:
        """Return the application id whose transaction version is the lowest retained LSN."""
        return floor_app_id(self.capture, epoch)

    def timeline_app_id(self, epoch: int) -> str:
        """Return the application id whose transaction version is the newest window's timeline."""
        return f"{self.app_id(epoch)}:timeline"

    def heartbeat_app_id(self, epoch: int, table_id: int) -> str:
        """Return the application id whose transaction version is the newest captured heartbeat.

        Args:
            table_id: OID of the table with the heartbeats.
        """
        return f"{self.app_id(epoch)}:heartbeat:{table_id}"

    def captured_heartbeat(self, epoch: int, table_id: int) -> int | None:
        """Return the number of the newest heartbeat before the end of the newest landed window."""
        table = self.table.newest()
        if table is None:
            return None
        version: int | None = table.transaction_version(self.heartbeat_app_id(epoch, table_id))
        return version

    def messages_app_id(self, epoch: int) -> str:
        """Return the application id whose transaction version is `messages_through`."""
        return f"{self.app_id(epoch)}:messages"

    def messages_through(self, epoch: int) -> Lsn:
        """Return the end of the record of a landed message that ends behind its window, or 0/0.

        A later stream may send this message again (see `protocol.logical_messages`).
        """
        table = self.table.newest()
        version = None if table is None else table.transaction_version(self.messages_app_id(epoch))
        return Lsn(version or 0)

    def captured_on(self, epoch: int) -> tuple[Lsn | None, int | None]:
        """Return the end of the newest landed window, and the window's timeline.

        The end is None for an epoch without windows. The timeline is None for a window of an early
        release, which did not record the timeline.
        """
        table = self.table.newest()
        if table is None:
            return None, None
        return self._end(table, epoch), table.transaction_version(self.timeline_app_id(epoch))

    def land(
        self,
        window: LsnWindow,
        batches: Iterable[pa.RecordBatch],
        before_commit: Callable[[], None] = nothing,
        timeline: Callable[[], int | None] = lambda: None,
        facts: Callable[[], Mapping[str, int]] = dict,
    ) -> LandReport:
        """Write all batches, and commit the rows as the window's content.

        A landed window is recognised without reading a batch. An exception of `batches` or of
        `before_commit` leaves no commit and no file.

        Args:
            window: the window.
            batches: rows with the columns of `schema.CHANGES`; `epoch` and `window` are optional.
            before_commit: function that is called after all files are written and before the
                commit, to verify the lease.
            timeline: function that is called after `before_commit` and returns the server's
                timeline of the rows; None: unknown.
            facts: function that is called at the same time and returns further application
                transactions of the commit, versions by application id.

        Raises:
            RawZoneError: the window does not follow the landed windows, or a row does not belong to
                the window.
            TransientError: the lake cannot be written, or another process committed at the same
                time.
        """
        table = self.table.take()
        if self._check_order(window, self._end(table, window.epoch)):
            return LandReport(self.summary(window), already_landed=True)
        builder = SummaryBuilder(window)
        with self.table.writer() as writer:
            for group in self._groups(window, batches, builder):
                writer.write(group)
            files = writer.finish()
            before_commit()
            number, further = timeline(), facts()
        timelines = {} if number is None else {self.timeline_app_id(window.epoch): number}
        # A failure from here on may follow a successful commit: the files are not removed.
        summary = builder.build()
        try:
            self.table.commit(
                table,
                files,
                app_id=self.app_id(window.epoch),
                app_version=int(window.end),
                facts={**further, **timelines},
                record=summary.as_record(),
            )
        except CommitRefused as refusal:
            if self._check_order(window, self.captured_through(window.epoch)):
                return LandReport(self.summary(window), already_landed=True)
            raise TransientError(
                reason=f"Another process wrote to {self.table.uri} during the landing of window "
                f"{window.key}. Nothing of this attempt was committed; run it again."
            ) from refusal
        except NotCommitted:
            writer.discard()
            raise
        self.table.give_back(table)
        return LandReport(
            summary,
            already_landed=False,
            file_count=len(files),
            size_bytes=sum(file.size_bytes for file in files),
        )

    def summary(self, window: LsnWindow) -> WindowSummary:
        """Return the summary of a landed window, counted again from its rows.

        Raises:
            WindowUnavailable: the window is not in the raw zone, or some of its rows are missing.
            RawExpired: retention removed the window.
        """
        return self.recount(window).check()

    def recount(self, window: LsnWindow) -> Recount:
        """Count the rows of a landed window again.

        Raises:
            WindowUnavailable: the window is not in the raw zone, or a file of its rows is missing.
            RawExpired: retention removed the window.
        """
        table = self.table.load()
        floor = None if table is None else self._floor(table, window.epoch)
        if floor is not None and window.start < floor:
            raise RawExpired(what=f"Window {window.key}", floor=floor)
        end = None if table is None else self._end(table, window.epoch)
        if table is None or end is None or end < window.end:
            raise _unavailable(window, end, "the window was not landed in the raw zone")
        builder = SummaryBuilder(window)
        files = files_between(data_files(table), window.epoch, window.start, window.end)
        try:
            for batch in scan(self.table, files, COUNTED, pc.field("window") == window.key):
                builder.add(batch)
        except UnreadableFile as error:
            raise _unavailable(window, end, "a file of the window's rows is missing") from error
        near = self.window_index.windows(table, window.epoch, window.start, window.end)
        recorded = near[0] if near else None
        if recorded is None or recorded.window != window:
            raise _unavailable(window, end, "the raw zone has no window with these borders")
        return Recount(recorded, builder.build(), end)

    def windows(self, epoch: int, since: Lsn | None = None) -> list[WindowSummary]:
        """Return the summaries of the landed windows in stream order, from the commits' records.

        Windows that retention removed are missing.

        Args:
            epoch: the epoch.
            since: return windows that end above this LSN only; None: all windows.
        """
        table = self.table.newest()
        if table is None:
            return []
        floor = self._floor(table, epoch) or 0
        return self.window_index.windows(table, epoch, max(since or 0, floor))

    def landed_windows(
        self, epoch: int, since: Lsn | None = None, until: Lsn | None = None
    ) -> list[LandedWindow]:
        """Return the windows of `windows` without their counts by table, which need memory.

        Args:
            epoch: the epoch.
            since: return windows that end above this LSN only; None: all windows.
            until: return windows that start below this LSN only; None: all windows.
        """
        table = self.table.newest()
        if table is None:
            return []
        floor = self._floor(table, epoch) or 0
        return self.window_index.landed_windows(table, epoch, max(since or 0, floor), until)

    def compact(
        self, minimum_files: int = MINIMUM_FILES, loaded: DeltaTable | None = None
    ) -> list[CompactionReport]:
        """Compact neighbouring small files. The call may run concurrently with landings.

        Args:
            minimum_files: do nothing with fewer small files.
            loaded: the newest version, if the caller has loaded the table.
        """
        loaded = loaded or self.table.load()
        if loaded is None:
            return []
        return compact(self.table, loaded, self.compaction_app_id, minimum_files=minimum_files)

    def _groups(
        self, window: LsnWindow, batches: Iterable[pa.RecordBatch], builder: SummaryBuilder
    ) -> Iterator[pa.Table]:
        groups = RelationGroups()
        for batch in batches:
            rows = _complete(batch, window, self.table.uri)
            builder.add(rows)
            yield from groups.add(rows)
        yield from groups.drain()

    def _end(self, table: DeltaTable, epoch: int) -> Lsn | None:
        version = table.transaction_version(self.app_id(epoch))
        return None if version is None else Lsn(version)

    def _floor(self, table: DeltaTable, epoch: int) -> Lsn | None:
        version = table.transaction_version(self.floor_app_id(epoch))
        return None if version is None else Lsn(version)

    def _check_order(self, window: LsnWindow, captured_through: Lsn | None) -> bool:
        """Return whether the window is landed; raise RawZoneError for a gap or an overlap."""
        if captured_through is None or window.start == captured_through:
            return False
        if window.end <= captured_through:
            return True
        if window.start > captured_through:
            reason = f"the changes from {captured_through} to {window.start} were not captured"
        else:
            reason = f"the window overlaps the windows captured through {captured_through}"
        raise RawZoneError(
            raw_zone=self.table.uri,
            reason=f"window {window.key} cannot be landed: {reason}. Capture windows in order.",
        )


def _complete(batch: pa.RecordBatch, window: LsnWindow, uri: str) -> pa.RecordBatch:
    """Return the rows with `epoch` and `window`; raise RawZoneError for rows of other windows."""
    count = batch.num_rows
    columns = {
        "epoch": pa.repeat(pa.scalar(window.epoch, pa.int32()), count),
        "window": pa.repeat(pa.scalar(window.key, pa.string()), count),
    }
    arrays = [
        columns[f.name] if f.name in columns else batch.column(f.name) for f in schema.CHANGES
    ]
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema.CHANGES)
    if count:
        found = pc.min_max(rows.column("commit_lsn")).as_py()
        if not (window.contains(found["min"]) and window.contains(found["max"])):
            raise RawZoneError(
                raw_zone=uri,
                reason=f"a row committed at {Lsn(found['min'])} or {Lsn(found['max'])} does not "
                f"belong to window {window.key}.",
            )
    return rows


def _unavailable(window: LsnWindow, captured_through: Lsn | None, reason: str) -> WindowUnavailable:
    return WindowUnavailable(
        window=window.key,
        confirmed_flush_lsn=captured_through or window.start,
        reason=reason,
    )
