"""Partial snapshot: the rows of a table that match a predicate, as of one LSN.

A merge replaces the rows with these keys, and leaves all other rows as they are
(docs/decisions/0040-partial-snapshots.md). Each refusal precedes the first row that is read.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.activity import Activity, activity
from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.capture.snapshots.export import export_later
from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import establish_epoch, limit_waits, read_wanted
from pgcdc_assets.capture.snapshots.table_copy import RowCounts
from pgcdc_assets.errors import (
    ConfigurationError,
    PgcdcError,
    TableChanged,
    resnapshot_remedy,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.predicate import check_predicate, predicate_sql
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.reader import SnapshotReader
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.relations.schema_events import open_events
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    import pyarrow as pa

_logger = logging.getLogger(__name__)

# Number of attempts for a table that is altered during its copy.
_ATTEMPTS = 3


@dataclass(frozen=True)
class PartialSnapshot:
    """A request for the rows of one table that match a predicate.

    Attributes:
        settings: the source database.
        zone: the raw zone.
        slot: the slot of the capture.
        publication: its publication.
        table: the declared table.
        predicate: SQL of a condition over the table's rows. It may contain values of rows, so no
            message, no log and no `repr` contains it.
        has_configured_key: the settings name the key of the table.
        policy: limits of the copy.
        keeps_partitions: the table keeps the rows of detached partitions.
    """

    settings: ConnectionSettings
    zone: RawZone
    slot: str
    publication: str
    table: TableName
    predicate: str = field(repr=False)
    has_configured_key: bool = False
    policy: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    keeps_partitions: bool = False

    def check(self) -> tuple[int, PublishedTable]:
        """Check that the snapshot can be taken, and return the epoch and the table.

        Raises:
            ConfigurationError: the predicate is refused, or the table is not published, has no
                key, has no complete snapshot or waits for a new one.
            TransientError: the server or the lake is not available now.
            DefiniteError: the slot is lost or missing.
        """
        zone = self.zone
        zone.lake.check_writable()
        if zone.epochs.latest() is None:
            raise self._without_snapshot()
        settings = limit_waits(self.settings, self.policy)
        with contextlib.ExitStack() as unused:
            epoch, _ = establish_epoch(
                settings, zone, self.slot, self.publication, [self.table], unused, False
            )
        with query_connection(settings, "snapshot") as conn:
            poll_catalog(conn, zone, [self.table], self.publication)
        found = self._read(epoch)
        snapshots = zone.snapshots.complete_snapshots()
        if not any(s.epoch == epoch and s.name == self.table for s in snapshots):
            raise self._without_snapshot()
        keepers = [self.table] if self.keeps_partitions else []
        if self.table in open_events(zone.schema_events.read(), snapshots, keepers=keepers):
            raise self.refused("it waits for a snapshot of all rows after a schema change")
        self._check_key(found.relation)
        check_predicate(settings, found, self.predicate)
        return epoch, found

    def take(self) -> SnapshotReport:
        """Read the rows and land them in one commit. Nothing is landed if no row matches.

        Raises:
            PgcdcError: as `check`; nothing was landed.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._take()
            except TableChanged as error:
                _logger.warning("%s Retrying with a new snapshot", error)
        return self._take()

    def _take(self) -> SnapshotReport:
        epoch, checked = self.check()
        settings = limit_waits(self.settings, self.policy)

        def read_again() -> list[PublishedTable | SnapshotFailure]:
            return [self._read(epoch)]

        with contextlib.ExitStack() as open_snapshot:
            snapshot, (table,) = export_later(
                settings, self.slot, [checked], read_again, open_snapshot
            )
            assert isinstance(table, PublishedTable)
            began, lsn = time.monotonic(), snapshot.consistent_point
            version = self._find_version(epoch, table.relation, lsn)
            landing = self.zone.partial_snapshots.begin_snapshot(
                epoch, lsn, table.relation, version, name=self.table
            )
            # The files that are written before the first commit need the table's folder.
            landing.store.table.load_or_create()
            work = open_snapshot.enter_context(
                activity(f"partial snapshot of {table.relation.qualified_name}", "rows")
            )
            counts = RowCounts()
            limit = int((self.policy.statement_timeout_seconds or 0) * 1000)
            with SnapshotReader(
                settings, snapshot.snapshot_name, statement_timeout_ms=limit
            ) as reader:
                rows = reader.read(table, condition=predicate_sql(self.predicate))
                try:
                    with contextlib.closing(rows):
                        landing.write(_counted(rows, counts, work))
                except PgcdcError as error:
                    # The server's sentence, which is the cause, may quote the predicate.
                    raise error from None
            if counts.row_count:
                failpoints.reach(failpoints.BEFORE_COPY_COMMIT)
                try:
                    landing.commit(snapshot.taken_at, snapshot.timeline)
                except PgcdcError:
                    landing.discard()
                    raise
                failpoints.reach(failpoints.AFTER_COPY_COMMIT)
            else:
                landing.discard()
        return SnapshotReport(
            *self.table,
            epoch,
            lsn,
            row_count=counts.row_count,
            seconds=time.monotonic() - began,
            bytes=counts.byte_count,
            rescued_count=counts.rescued_count,
        )

    def _read(self, epoch: int) -> PublishedTable:
        (found,) = read_wanted(self.settings, self.zone, epoch, self.publication, [self.table])
        if isinstance(found, SnapshotFailure):
            raise found.error
        return found

    def _check_key(self, relation: Relation) -> None:
        if not (self.has_configured_key or relation.row_key):
            raise self.refused("it has no key")

    def _find_version(self, epoch: int, relation: Relation, lsn: Lsn) -> int:
        """Find the registered version of the table's columns.

        A new version is not registered here: the stream would not announce it any more, and the
        change that led to it would not be noticed.

        Raises:
            ConfigurationError: there is none, or the table has lost its key since the check.
        """
        self._check_key(relation)
        for known in self.zone.relations.versions(epoch):
            is_same = known.relation.relation_id == relation.relation_id
            if is_same and known.lsn < lsn and known.relation.describes(relation):
                return known.version
        raise self.refused(
            "its definition changed, and no row with the new definition is captured yet"
        )

    def refused(self, reason: str) -> ConfigurationError:
        """Return the error of a table of which only a complete snapshot can be taken."""
        return ConfigurationError(
            reason=f"Rows of table {self.table} cannot be replaced by a predicate: {reason}. "
            f"{resnapshot_remedy(self.zone.name, str(self.table))}"
        )

    def _without_snapshot(self) -> ConfigurationError:
        return ConfigurationError(
            reason=f"Table {self.table} has no complete snapshot yet, so there are no rows to "
            "replace. Run `pgcdc sync` first."
        )


def _counted(
    batches: Iterable[pa.RecordBatch], counts: RowCounts, work: Activity
) -> Iterator[pa.RecordBatch]:
    """Yield batches, and add them to the counts."""
    for batch in batches:
        counts.add(RowCounts.of(batch))
        work.count = counts.row_count
        yield batch
        failpoints.reach(failpoints.MID_COPY)
