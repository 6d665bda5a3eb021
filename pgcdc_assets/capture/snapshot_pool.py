"""Parallel copies of tables, over several connections with one exported snapshot.

A large table is divided into ranges of pages, so several connections share its copy. Each range is
written to its own files. One commit of all files of a table completes the table's snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.activity import Activity, activity
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.postgres.catalog import PublishedTable
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy import Pages, SnapshotReader, read_page_counts
from pgcdc_assets.postgres.slots import ExportedSnapshot
from pgcdc_assets.protocol.utf8 import count_hex
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    import pyarrow as pa

    from pgcdc_assets.policies import SnapshotPolicy
    from pgcdc_assets.raw.snapshots import SnapshotLanding
    from pgcdc_assets.raw.zone import RawZone

_logger = logging.getLogger(__name__)

_PAGE_BYTES = 8192

# Time limit for the connections of abandoned copies to end.
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """The result of a complete snapshot of a table.

    Attributes:
        snapshot_lsn: LSN of the snapshot; earlier commits are in the snapshot.
        seconds: time from the first row to the commit.
        bytes: size of the rows' texts in memory.
        rescued_count: number of values that are not UTF-8, written as hex.
    """

    schema: str
    table: str
    epoch: int
    snapshot_lsn: Lsn
    row_count: int
    seconds: float
    bytes: int
    rescued_count: int = 0

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
class SnapshotPool:
    """Connections that copy tables as of one exported snapshot.

    Attributes:
        settings: the source database.
        zone: the raw zone.
        epoch: the epoch.
        snapshot: the exported snapshot.
        policy: number of connections, and size of the ranges of large tables.
    """

    settings: ConnectionSettings
    zone: RawZone
    epoch: int
    snapshot: ExportedSnapshot
    policy: SnapshotPolicy

    def copy(
        self, tables: Sequence[PublishedTable]
    ) -> Generator[SnapshotReport | SnapshotFailure, None, None]:
        """Copy tables, and yield the result of each table in the order of completion.

        Closing the iterator early cancels the incomplete copies.

        Raises:
            PgcdcError: the server or the lake is not available at all.
        """
        copies = [_TableSnapshot(table, landing) for table, landing in self._landings(tables)]
        crew = _Crew(self, deque(self._parts(copies)))
        with crew.at_work():
            for _ in copies:
                yield crew.next_outcome()

    def _landings(
        self, tables: Sequence[PublishedTable]
    ) -> Iterator[tuple[PublishedTable, SnapshotLanding]]:
        # One commit for the relation versions of all tables.
        lsn = self.snapshot.consistent_point
        versions = [self.zone.relations.register(self.epoch, t.relation, lsn) for t in tables]
        self.zone.relations.flush()
        # The files that are written before the first commit need the table's folder.
        self.zone.snapshots.table.load_or_create()
        for table, version in zip(tables, versions, strict=True):
            yield (
                table,
                self.zone.snapshots.begin_snapshot(self.epoch, lsn, table.relation, version),
            )

    def _parts(self, copies: Iterable[_TableSnapshot]) -> Iterator[_Part]:
        copies = list(copies)
        with query_connection(self.settings, "snapshot") as conn:
            page_counts = read_page_counts(conn, [copy.table for copy in copies])
        step = max(1, self.policy.range_bytes // _PAGE_BYTES)
        for copy in copies:
            starts = range(0, max(1, page_counts.get(copy.table.relation.relation_id, 0)), step)
            copy.open_parts = len(starts)
            for start in starts:
                # The last range has no end. Pages after the count have no row of the snapshot.
                end = None if start == starts[-1] else start + step
                yield copy, Pages(start, end)

    def report(self, copy: _TableSnapshot) -> SnapshotReport:
        """Commit a table's files, and return the report."""
        failpoints.reach(failpoints.BEFORE_COPY_COMMIT)
        row_count = copy.landing.commit(self.snapshot.taken_at)
        failpoints.reach(failpoints.AFTER_COPY_COMMIT)
        relation = copy.table.relation
        return SnapshotReport(
            schema=relation.schema,
            table=relation.table,
            epoch=self.epoch,
            snapshot_lsn=self.snapshot.consistent_point,
            row_count=row_count,
            seconds=time.monotonic() - (copy.began or time.monotonic()),
            bytes=copy.byte_count,
            rescued_count=copy.rescued_count,
        )


@dataclass(eq=False)
class _TableSnapshot:
    """The running copy of one table. `lock` guards the attributes of several connections.

    Attributes:
        open_parts: number of ranges that are not read yet.
        failure: the first error, after which the other ranges are skipped.
    """

    table: PublishedTable
    landing: SnapshotLanding
    open_parts: int = 0
    began: float | None = None
    byte_count: int = 0
    rescued_count: int = 0
    failure: PgcdcError | None = None
    work: Activity | None = None
    shown: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Start the clock with the first range."""
        with self.lock:
            if self.work is None:
                self.began = time.monotonic()
                name = f"snapshot of {self.table.relation.qualified_name}"
                self.work = self.shown.enter_context(activity(name, "rows"))

    def count(self, batch: pa.RecordBatch) -> None:
        """Add a batch to the counts."""
        rescued = count_hex(batch.column("new"))
        with self.lock:
            self.byte_count += batch.nbytes
            self.rescued_count += rescued
            if self.work is not None:
                self.work.count += batch.num_rows


_Part = tuple[_TableSnapshot, Pages]


class _Crew:
    """The threads that read ranges, each with its own connection."""

    def __init__(self, pool: SnapshotPool, parts: deque[_Part]) -> None:
        self._pool = pool
        self._parts = parts
        self._outcomes: queue.SimpleQueue[SnapshotReport | SnapshotFailure | BaseException] = (
            queue.SimpleQueue()
        )
        self._is_stopping = threading.Event()
        # A list's append is atomic, and so is the comparison of its length after it.
        self._unopened: list[PgcdcError] = []
        self._readers = [
            SnapshotReader(pool.settings, pool.snapshot.snapshot_name)
            for _ in range(min(pool.policy.parallelism, len(parts)))
        ]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Run the threads for the block, and cancel their statements at its end."""
        threads = [
            threading.Thread(target=self._run, args=(reader,), name="pgcdc snapshot", daemon=True)
            for reader in self._readers
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_stopping.set()
            deadline = time.monotonic() + _END_SECONDS
            while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
                for reader in self._readers:
                    reader.cancel()
                for thread in threads:
                    thread.join(0.1)

    def next_outcome(self) -> SnapshotReport | SnapshotFailure:
        """Wait for the result of the next table."""
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _run(self, reader: SnapshotReader) -> None:
        with reader:
            try:
                reader.open()
            except PgcdcError as error:
                self._end_unopened(error)
                return
            while not self._is_stopping.is_set():
                try:
                    copy, pages = self._parts.popleft()
                except IndexError:
                    return
                try:
                    self._read(reader, copy, pages)
                    self._end_part(copy)
                except BaseException as error:
                    self._outcomes.put(error)
                    return

    def _end_unopened(self, error: PgcdcError) -> None:
        """Leave the work to the other connections; without any, the snapshot fails."""
        self._unopened.append(error)
        if len(self._unopened) == len(self._readers):
            self._outcomes.put(error)
            return
        _logger.warning("One of %d connections is not used. %s", len(self._readers), error)

    def _read(self, reader: SnapshotReader, copy: _TableSnapshot, pages: Pages) -> None:
        if copy.failure is not None:
            return
        copy.begin()
        try:
            # An error of the lake holds the frames that refer to the iterator: close it here.
            with contextlib.closing(self._batches(reader, copy, pages)) as batches:
                copy.landing.write(batches)
        except PgcdcError as error:
            with copy.lock:
                copy.failure = copy.failure or error

    def _batches(
        self, reader: SnapshotReader, copy: _TableSnapshot, pages: Pages
    ) -> Generator[pa.RecordBatch, None, None]:
        with contextlib.closing(reader.read(copy.table, pages)) as batches:
            for batch in batches:
                if self._is_stopping.is_set():
                    raise _Stopped
                copy.count(batch)
                yield batch
                failpoints.reach(failpoints.MID_COPY)

    def _end_part(self, copy: _TableSnapshot) -> None:
        """Complete the table after its last range."""
        with copy.lock:
            copy.open_parts -= 1
            if copy.open_parts:
                return
        outcome = self._outcome(copy)
        with contextlib.suppress(PgcdcError), copy.shown:
            if isinstance(outcome, SnapshotFailure):
                # The activity of a failed copy ends with an error.
                raise outcome.error
        self._outcomes.put(outcome)

    def _outcome(self, copy: _TableSnapshot) -> SnapshotReport | SnapshotFailure:
        relation = copy.table.relation
        if copy.failure is None:
            try:
                return self._pool.report(copy)
            except PgcdcError as error:
                copy.failure = error
        copy.landing.discard()
        return SnapshotFailure(relation.schema, relation.table, copy.failure)


class _Stopped(Exception):
    """The copies were abandoned."""
