"""Parallel copies of tables, over several connections with one exported snapshot.

A large table is divided into ranges of pages, so several connections share its copy. Each range is
written to its own files, and recorded, so that a later run can continue (`ranges.py`). One
commit of all files of a table completes the table's snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.capture.snapshots.limits import SnapshotLimits
from pgcdc_assets.capture.snapshots.ranges import (
    cut_unread_pages,
    find_usable_ranges,
    read_range,
    refresh_range,
)
from pgcdc_assets.capture.snapshots.table_copy import SnapshotProgress, TableCopy, ignore_progress
from pgcdc_assets.errors import ConnectionLost, PgcdcError, SnapshotEnded
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.ranges import RangeSource, read_page_counts, read_range_source
from pgcdc_assets.postgres.copy.reader import Pages, SnapshotReader, begin_at
from pgcdc_assets.postgres.recovery_conflicts import sorted_conflicts
from pgcdc_assets.postgres.slots.status import ExportedSnapshot, read_server_identity
from pgcdc_assets.postgres.snapshots.age import SnapshotAge, read_warning_age
from pgcdc_assets.raw.ranges import LandedRange
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from pgcdc_assets.raw.zone import RawZone
    from pgcdc_assets.settings.policies import SnapshotPolicy

_logger = logging.getLogger(__name__)

_PAGE_BYTES = 8192

# Time limit for the connections of abandoned copies to end.
_END_SECONDS = 10.0


def describe_end(error: PgcdcError) -> str:
    """Describe what has ended the snapshot of a standby, for a sentence."""
    if isinstance(error, SnapshotEnded):
        return "a conflict with the replay of WAL"
    return "a lost connection"


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """The result of a complete snapshot of a table.

    Attributes:
        snapshot_lsn: LSN of the snapshot; earlier commits are in the snapshot.
        seconds: time from the first row to the commit.
        bytes: size of the rows' texts in memory.
        rescued_count: number of values that are not UTF-8, written as hex.
        ranges: number of ranges.
        ranges_continued: number of those that an earlier snapshot of the server had read.
        age: age of the server's snapshot at the commit; None: not measured.
    """

    schema: str
    table: str
    epoch: int
    snapshot_lsn: Lsn
    row_count: int
    seconds: float
    bytes: int
    rescued_count: int = 0
    ranges: int = 1
    ranges_continued: int = 0
    age: SnapshotAge | None = None

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    @property
    def position(self) -> Position:
        """Epoch and LSN."""
        return Position(self.epoch, self.snapshot_lsn)


@dataclass(frozen=True, slots=True)
class SnapshotFailure:
    """The failed snapshot of one table. The other tables are not affected."""

    schema: str
    table: str
    error: PgcdcError

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class UnfinishedSnapshot:
    """A table that was not complete when its snapshot ended.

    Attributes:
        has_progress: the next snapshot has fewer ranges to read.
        limit: the limit of the snapshot's age, or what has ended the snapshot, for a sentence.
        error: the error of a snapshot of a standby that has ended; None for a limit.
    """

    name: TableName
    has_progress: bool
    limit: str
    error: PgcdcError | None = None


Outcome = SnapshotReport | SnapshotFailure | UnfinishedSnapshot
_Part = tuple[TableCopy, Pages | LandedRange]


@dataclass(frozen=True, slots=True)
class SnapshotPool:
    """Connections that copy tables as of one exported snapshot.

    Attributes:
        settings: the source database.
        zone: the raw zone.
        epoch: the epoch.
        snapshot: the exported snapshot.
        policy: number of connections, size of the ranges of large tables, and time limits.
        on_progress: called after each range of a large table, by the caller's thread.
        standby: the standby that the snapshot is of; None: of the source database.
        stopping: set when the copies are abandoned.
    """

    settings: ConnectionSettings
    zone: RawZone
    epoch: int
    snapshot: ExportedSnapshot
    policy: SnapshotPolicy
    on_progress: Callable[[SnapshotProgress], None] = ignore_progress
    standby: ConnectionSettings | None = None
    stopping: threading.Event = field(default_factory=threading.Event)

    def copy(self, tables: Sequence[PublishedTable]) -> Generator[Outcome, None, None]:
        """Copy tables, and yield the result of each table in the order of completion.

        Closing the iterator early cancels the incomplete copies.

        Raises:
            PgcdcError: the server or the lake is not available at all.
        """
        began = time.monotonic()
        source, page_counts, warning_age = self._examine(tables)
        limits = SnapshotLimits.of(self.policy, source.xmin, warning_age)
        limits.began = began
        copies = list(self._begin(tables, source, page_counts))
        crew = _Crew(self, source, limits, deque(self._parts(copies)))
        with crew.at_work():
            for _ in copies:
                yield crew.next_outcome()

    def _examine(self, tables: Sequence[PublishedTable]) -> tuple[RangeSource, dict[int, int], int]:
        server = self.standby or self.settings
        with contextlib.ExitStack() as open_:
            conn = open_.enter_context(query_connection(server, "snapshot", statement_timeout_ms=0))
            primary = conn
            if self.standby is not None:
                open_.enter_context(sorted_conflicts(server, "a snapshot"))
                primary = open_.enter_context(query_connection(self.settings, "snapshot"))
            timeline = read_server_identity(primary).timeline
            page_counts, warning_age = read_page_counts(conn, tables), read_warning_age(primary)
            begin_at(conn, self.snapshot.snapshot_name)
            return read_range_source(conn, tables, timeline), page_counts, warning_age

    def _begin(
        self, tables: Sequence[PublishedTable], source: RangeSource, page_counts: dict[int, int]
    ) -> Iterator[TableCopy]:
        # One commit for the relation versions of all tables.
        lsn, zone = self.snapshot.consistent_point, self.zone
        versions = [zone.relations.register(self.epoch, t.relation, lsn) for t in tables]
        zone.relations.flush()
        # The files that are written before the first commit need the table's folder.
        zone.snapshots.table.load_or_create()
        recorded = zone.ranges.all()
        for table, version in zip(tables, versions, strict=True):
            relation, name = table.relation, table.declared_name
            landed = find_usable_ranges(zone, self.epoch, table, version, source, recorded)
            for epoch in {r.epoch for r in recorded if not landed and r.name == name}:
                zone.ranges.remove(epoch, name)
            yield TableCopy(
                table,
                zone.snapshots.begin_snapshot(self.epoch, lsn, relation, version, name=name),
                self.stopping,
                source.storage.get(relation.relation_id),
                page_counts.get(relation.relation_id, 0),
                tuple(landed),
            )

    def _parts(self, copies: Iterable[TableCopy]) -> Iterator[_Part]:
        """Yield the ranges to read of each table, and then those to bring to the snapshot."""
        step = max(1, self.policy.range_bytes // _PAGE_BYTES)
        for copy in copies:
            unread = list(cut_unread_pages(copy.landed, copy.page_count, step))
            copy.parts = copy.open_parts = len(unread) + len(copy.landed)
            yield from ((copy, pages) for pages in unread)
            yield from ((copy, landed) for landed in copy.landed)

    def report(self, copy: TableCopy, age: SnapshotAge) -> SnapshotReport:
        """Commit a table's files, and return the report with the age of the snapshot."""
        failpoints.reach(failpoints.BEFORE_COPY_COMMIT)
        row_count = copy.landing.commit(self.snapshot.taken_at, self.snapshot.timeline)
        failpoints.reach(failpoints.AFTER_COPY_COMMIT)
        if copy.new_ranges or copy.landed:
            self.zone.ranges.remove(self.epoch, copy.name)
        return SnapshotReport(
            schema=copy.name.schema,
            table=copy.name.table,
            epoch=self.epoch,
            snapshot_lsn=self.snapshot.consistent_point,
            row_count=row_count,
            seconds=time.monotonic() - (copy.began or time.monotonic()),
            bytes=copy.total.byte_count + sum(landed.byte_count for landed in copy.landed),
            rescued_count=copy.total.rescued_count + sum(r.rescued_count for r in copy.landed),
            ranges=copy.parts,
            ranges_continued=len(copy.landed),
            age=age,
        )


class _Crew:
    """The threads that read ranges, each with its own connection."""

    def __init__(
        self,
        pool: SnapshotPool,
        source: RangeSource,
        limits: SnapshotLimits,
        parts: deque[_Part],
    ) -> None:
        self._pool = pool
        self._source = source
        self._limits = limits
        self._parts = parts
        self._outcomes: queue.SimpleQueue[Outcome | SnapshotProgress | BaseException] = (
            queue.SimpleQueue()
        )
        # A list's append is atomic, and so is the comparison of its length after it.
        self._unopened: list[PgcdcError] = []
        limit = pool.policy.statement_timeout_seconds
        self._readers = [
            SnapshotReader(
                pool.standby or pool.settings,
                pool.snapshot.snapshot_name,
                statement_timeout_ms=int((limit or 0) * 1000),
                primary=pool.settings if pool.standby else None,
            )
            for _ in range(min(pool.policy.parallelism, len(parts)))
        ]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Run the threads for the block, and cancel their statements at its end, all at once."""
        running: list[tuple[SnapshotReader, threading.Thread]] = []
        try:
            for reader in self._readers:
                thread = threading.Thread(
                    target=self._run, args=(reader,), name="pgcdc snapshot", daemon=True
                )
                thread.start()
                running.append((reader, thread))
            yield
        finally:
            self._pool.stopping.set()
            deadline = time.monotonic() + _END_SECONDS
            while True:
                for _, thread in running:
                    thread.join(0.1)
                busy = [reader for reader, thread in running if thread.is_alive()]
                if not busy or time.monotonic() > deadline:
                    break
                with ThreadPoolExecutor(len(busy)) as cancelling:
                    list(cancelling.map(SnapshotReader.cancel, busy))

    def next_outcome(self) -> Outcome:
        """Wait for the result of the next table."""
        while isinstance(outcome := self._outcomes.get(), SnapshotProgress):
            self._pool.on_progress(outcome)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _run(self, reader: SnapshotReader) -> None:
        """Read ranges until none is left. Any error is an outcome: the caller waits for one."""
        try:
            with reader:
                try:
                    reader.open()
                except PgcdcError as error:
                    self._end_unopened(error)
                    return
                self._read_parts(reader)
        except BaseException as error:
            self._outcomes.put(error)

    def _read_parts(self, reader: SnapshotReader) -> None:
        limit: str | None = None
        while not self._pool.stopping.is_set():
            try:
                part = self._parts.popleft()
            except IndexError:
                return
            self._read(reader, part, limit)
            self._measure(reader)
            self._end_part(part[0])
            # Only here: each snapshot makes some progress, however low the limit is.
            limit = self._limits.exceeded

    def _end_unopened(self, error: PgcdcError) -> None:
        """Leave the work to the other connections; without any, the snapshot fails."""
        self._unopened.append(error)
        if len(self._unopened) == len(self._readers):
            self._outcomes.put(error)
            return
        _logger.warning("One of %d connections is not used. %s", len(self._readers), error)

    def _measure(self, reader: SnapshotReader) -> None:
        """Measure the age of the snapshot, on the connection that has read a range."""
        transactions = reader.read_xmin_age(self._limits.xmin)
        if transactions is not None:
            self._limits.transactions = transactions

    def _read(self, reader: SnapshotReader, part: _Part, limit: str | None) -> None:
        copy, pages = part
        if limit is not None and copy.cut_by is None:
            copy.cut_by, copy.conflict = limit, self._limits.error
        if copy.failure is not None or copy.cut_by is not None:
            return
        copy.begin()
        try:
            if isinstance(pages, LandedRange):
                refresh_range(reader, copy, pages)
            else:
                read_range(reader, copy, pages, self._source, self._pool.zone.ranges)
        except (SnapshotEnded, ConnectionLost) as error:
            with copy.lock:
                if self._pool.standby is None:
                    copy.failure = copy.failure or error
                else:
                    # All connections read in the one snapshot that the standby has ended.
                    self._limits.error = copy.conflict = error
                    self._limits.ended_by = copy.cut_by = describe_end(error)
        except PgcdcError as error:
            with copy.lock:
                copy.failure = copy.failure or error

    def _end_part(self, copy: TableCopy) -> None:
        """Complete the table after its last range."""
        with copy.lock:
            copy.open_parts -= 1
            is_last = not copy.open_parts
        if copy.parts > 1 and copy.failure is None and copy.cut_by is None:
            self._outcomes.put(copy.progress(self._limits.age))
        if not is_last:
            return
        outcome = self._outcome(copy)
        with contextlib.suppress(_Ended), copy.shown:
            if not isinstance(outcome, SnapshotReport):
                # The activity of an incomplete copy ends with an error.
                raise _Ended
        self._outcomes.put(outcome)

    def _outcome(self, copy: TableCopy) -> Outcome:
        if copy.failure is None and copy.cut_by is not None:
            copy.landing.discard()
            has_progress = copy.new_ranges > 0 or copy.began is None
            return UnfinishedSnapshot(copy.name, has_progress, copy.cut_by, copy.conflict)
        if copy.failure is None:
            try:
                return self._pool.report(copy, self._limits.age)
            except PgcdcError as error:
                copy.failure = error
        copy.landing.discard()
        return SnapshotFailure(*copy.name, copy.failure)


class _Ended(Exception):
    """The end of the activity of an incomplete copy."""
