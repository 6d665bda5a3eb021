"""`raw/changes`: every captured change, once, one atomic commit per window.

The commit carries the application transaction (application id = capture and epoch, version = the
window's end) and a record of what it holds. Windows of an epoch follow each other without a gap,
because a window that does not start where the last one ended is refused here. A repeat of a landed
window is recognised before anything is read, and again at the commit when two processes race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pgcdc_assets.errors import RawExpired, RawZoneError, TransientError, WindowUnavailable
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw import schema
from pgcdc_assets.raw.compaction import MINIMUM_FILES, CompactionReport, compact
from pgcdc_assets.raw.row_groups import RelationGroups
from pgcdc_assets.raw.scan import data_files, files_between, scan
from pgcdc_assets.raw.table import CommitRefused, RawTable
from pgcdc_assets.raw.window_index import WindowIndex
from pgcdc_assets.raw.window_summary import COUNTED, SummaryBuilder, WindowSummary

STATISTICS = ("epoch", "window", "commit_lsn", "relation_id", "schema", "table")


@dataclass(frozen=True)
class LandReport:
    """What landing a window did.

    Attributes:
        already_landed: the window was there before; nothing was written.
        summary: what the window holds.
    """

    summary: WindowSummary
    already_landed: bool
    file_count: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class Recount:
    """A landed window as it was decoded, and as its rows are counted now.

    Attributes:
        decoded: by the record of the window's commit, which was counted at decode.
        found: by the rows in the files.
        captured_through: end of the newest landed window.
    """

    decoded: WindowSummary
    found: WindowSummary
    captured_through: Lsn

    @property
    def is_complete(self) -> bool:
        """Whether the two are the same, by table and operation."""
        return self.decoded == self.found

    def check(self) -> WindowSummary:
        """Return what the window holds.

        Raises:
            WindowUnavailable: the raw zone does not hold the rows that were decoded.
        """
        if not self.is_complete:
            raise _unavailable(
                self.decoded.window,
                self.captured_through,
                f"the raw zone holds {self.found.row_count} of the {self.decoded.row_count} rows "
                "landed",
            )
        return self.decoded


def nothing() -> None:
    """Do nothing: the default of `before_commit`."""


@dataclass(frozen=True)
class ChangeLog:
    """The table of changes of one capture."""

    table: RawTable
    journal: WindowIndex
    capture: str

    def app_id(self, epoch: int) -> str:
        """Name the application whose transactions the commits carry."""
        return f"pgcdc:{self.capture}:{epoch}"

    def captured_through(self, epoch: int) -> Lsn | None:
        """End of the newest landed window; None when the epoch has none."""
        table = self.table.load()
        return None if table is None else self._end(table, epoch)

    def kept_from(self, epoch: int) -> Lsn | None:
        """Say below which LSN retention has removed windows; None when it never did."""
        table = self.table.load()
        return None if table is None else self._floor(table, epoch)

    def floors(self, epochs: Iterable[int]) -> dict[int, Lsn]:
        """Say the same of several epochs: 0/0 where it never did."""
        table = self.table.load()
        nothing_removed = Lsn(0)
        if table is None:
            return dict.fromkeys(epochs, nothing_removed)
        return {epoch: self._floor(table, epoch) or nothing_removed for epoch in epochs}

    @property
    def compaction_app_id(self) -> str:
        """Name the application of all commits that put rows of old files into new ones.

        delta-rs does not notice that another commit has removed one of these files.
        """
        return f"pgcdc:{self.capture}:compaction"

    def floor_app_id(self, epoch: int) -> str:
        """Name the application whose transaction version is the lowest LSN that is kept."""
        return f"{self.app_id(epoch)}:floor"

    def timeline_app_id(self, epoch: int) -> str:
        """Name the application whose transaction version is the newest window's timeline."""
        return f"{self.app_id(epoch)}:timeline"

    def captured_on(self, epoch: int) -> tuple[Lsn | None, int | None]:
        """Return the end of the newest landed window, and the server's timeline that it is of.

        None as the end: the epoch has no window. None as the timeline: an earlier release landed
        the window.
        """
        table = self.table.load()
        if table is None:
            return None, None
        return self._end(table, epoch), table.transaction_version(self.timeline_app_id(epoch))

    def land(
        self,
        window: LsnWindow,
        batches: Iterable[pa.RecordBatch],
        before_commit: Callable[[], None] = nothing,
        timeline: Callable[[], int | None] = lambda: None,
    ) -> LandReport:
        """Write all batches and commit them as the window's content.

        A window that was landed before is recognised without reading a batch. An exception of the
        iterable or of `before_commit` leaves no commit and no file.

        Args:
            batches: rows with the columns of `schema.CHANGES`; epoch and window may be left out.
            before_commit: called when all files are written, just before they become visible: the
                place to check that the lease is still held.
            timeline: called after it: the server's timeline that the rows were read on.

        Raises:
            RawZoneError: the window does not follow the landed ones, or a row does not belong to
                it.
            TransientError: the lake cannot be written, or another process landed something else
                meanwhile.
        """
        table = self.table.load_or_create()
        if self._check_order(window, self._end(table, window.epoch)):
            return LandReport(self.summary(window), already_landed=True)
        builder = SummaryBuilder(window)
        with self.table.writer() as writer:
            for group in self._groups(window, batches, builder):
                writer.write(group)
            files = writer.finish()
            before_commit()
            number = timeline()
        # From here on a failure may come after the commit took effect: files are not removed any
        # more.
        summary = builder.build()
        try:
            self.table.commit(
                table,
                files,
                app_id=self.app_id(window.epoch),
                app_version=int(window.end),
                facts={} if number is None else {self.timeline_app_id(window.epoch): number},
                record=summary.as_record(),
            )
        except CommitRefused as refusal:
            if self._check_order(window, self.captured_through(window.epoch)):
                return LandReport(self.summary(window), already_landed=True)
            raise TransientError(
                reason=f"Another process wrote to {self.table.uri} while window {window.key} was "
                "landed; nothing of this attempt was committed. Run it again."
            ) from refusal
        return LandReport(
            summary,
            already_landed=False,
            file_count=len(files),
            size_bytes=sum(file.size_bytes for file in files),
        )

    def summary(self, window: LsnWindow) -> WindowSummary:
        """Say what a landed window holds, counted again from its rows.

        Raises:
            WindowUnavailable: the window is not in the raw zone, or some of its rows are missing.
            RawExpired: retention removed it.
        """
        return self.recount(window).check()

    def recount(self, window: LsnWindow) -> Recount:
        """Count the rows of a landed window again.

        Raises:
            WindowUnavailable: the window is not in the raw zone, or a file of its rows is gone.
            RawExpired: retention removed it.
        """
        table = self.table.load()
        floor = None if table is None else self._floor(table, window.epoch)
        if floor is not None and window.start < floor:
            raise RawExpired(what=f"Window {window.key}", floor=floor)
        end = None if table is None else self._end(table, window.epoch)
        if table is None or end is None or end < window.end:
            raise _unavailable(window, end, "it was not landed in the raw zone")
        builder = SummaryBuilder(window)
        files = files_between(data_files(table), window.epoch, window.start, window.end)
        try:
            for batch in scan(self.table, files, COUNTED, pc.field("window") == window.key):
                builder.add(batch)
        except FileNotFoundError as error:
            raise _unavailable(window, end, "a file of its rows is gone") from error
        near = self.journal.windows(table, window.epoch, window.start, window.end)
        recorded = near[0] if near else None
        if recorded is None or recorded.window != window:
            raise _unavailable(window, end, "the raw zone has no window with these borders")
        return Recount(recorded, builder.build(), end)

    def windows(self, epoch: int, since: Lsn | None = None) -> list[WindowSummary]:
        """List the landed windows in stream order, as their commits recorded them.

        Windows that retention removed are not listed.

        Args:
            since: leave out windows that end at or before this LSN.
        """
        table = self.table.load()
        if table is None:
            return []
        floor = self._floor(table, epoch) or 0
        return self.journal.windows(table, epoch, max(since or 0, floor))

    def compact(
        self, minimum_files: int = MINIMUM_FILES, loaded: DeltaTable | None = None
    ) -> list[CompactionReport]:
        """Merge neighbouring small files, if there are at least so many; safe beside landings.

        Args:
            loaded: the newest version, where the caller has it.
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
        """Say whether the window is landed; refuse one that leaves a gap or overlaps."""
        if captured_through is None or window.start == captured_through:
            return False
        if window.end <= captured_through:
            return True
        if window.start > captured_through:
            reason = f"the changes from {captured_through} to {window.start} were not captured"
        else:
            reason = f"it overlaps what is captured through {captured_through}"
        raise RawZoneError(
            raw_zone=self.table.uri,
            reason=f"window {window.key} cannot be landed: {reason}. Capture windows in order.",
        )


def _complete(batch: pa.RecordBatch, window: LsnWindow, uri: str) -> pa.RecordBatch:
    """Add epoch and window, and refuse rows of another window."""
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
