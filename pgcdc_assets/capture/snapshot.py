"""Snapshots of whole tables, without a gap or an overlap between snapshot and stream.

The order of the steps: create the slot, record the epoch, copy the tables, with one commit per
table. The stream begins at the consistent point of the slot, and the exported snapshot of the slot
contains all earlier transactions. If the process dies between two steps, the next run finds either
no slot, or an unread slot at its consistent point, or an epoch with some complete snapshots.

An existing slot exports no snapshot. A temporary slot then exports the snapshot: its consistent
point is above the position of the permanent slot, so the stream contains every later change. A slot
that another program has read is adopted with consent (`--adopt-slot`) only: a confirmation would
remove WAL that the other program needs.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pgcdc_assets.activity import activity
from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    PgcdcError,
    SlotBusy,
    SlotMissing,
    TableChanged,
    TransientError,
)
from pgcdc_assets.failpoints import reach
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.postgres.catalog import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy import copy_published, hold_snapshot
from pgcdc_assets.postgres.lease import capture_lease
from pgcdc_assets.postgres.publication import explain_unpublished, read_publication
from pgcdc_assets.postgres.slots import (
    ExportedSnapshot,
    ServerIdentity,
    SlotStatus,
    check_slot_usable,
    claim_slot,
    create_slot,
    read_server_identity,
    read_slot_status,
    slot_lost_error,
    slot_taken_error,
)
from pgcdc_assets.postgres.timelines import check_timeline, server_timeline
from pgcdc_assets.protocol.utf8 import count_hex
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    import pyarrow as pa
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.raw.zone import RawZone

_logger = logging.getLogger(__name__)

# Number of attempts for a table that is altered during its copy.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """The result of a complete snapshot, with all commits below `snapshot_lsn`.

    Attributes:
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


def snapshot_tables(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    tables: Sequence[TableName] | None = None,
    *,
    adopt_slot: bool = False,
) -> list[SnapshotReport]:
    """Take snapshots of tables. A failed table does not stop the others.

    Args:
        tables: None: all tables of the publication without a complete snapshot in this epoch.
        adopt_slot: adopt a slot that another program has read.

    Raises:
        ConfigurationError: a setting, a privilege or a table's name is wrong.
        TransientError: the server or the slot is not available now.
        DefiniteError: the slot is lost or missing, or the raw zone was filled from another slot.
    """
    outcomes = list(
        snapshot_each_table(settings, zone, slot, publication, tables, adopt_slot=adopt_slot)
    )
    failures = [outcome for outcome in outcomes if isinstance(outcome, SnapshotFailure)]
    if failures:
        raise _joined(failures)
    return [outcome for outcome in outcomes if isinstance(outcome, SnapshotReport)]


def snapshot_each_table(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    tables: Sequence[TableName] | None = None,
    *,
    adopt_slot: bool = False,
) -> Iterator[SnapshotReport | SnapshotFailure]:
    """Yield the result of each table. For arguments and errors see `snapshot_tables`."""
    zone.lake.check_writable()
    with contextlib.ExitStack() as open_snapshot:
        epoch, snapshot = _establish(
            settings, zone, slot, publication, tables or (), open_snapshot, adopt_slot
        )
        with query_connection(settings, "snapshot") as conn:
            wanted = _wanted(conn, zone, epoch, publication, tables)
        if snapshot is None and any(isinstance(outcome, PublishedTable) for outcome in wanted):
            snapshot = open_snapshot.enter_context(_temporary_snapshot(settings, slot))
            # Read the tables again: a column that was added during the creation of the slot is in
            # the snapshot. The copy checks that the table was not altered after the snapshot.
            with query_connection(settings, "snapshot") as conn:
                wanted = _wanted(conn, zone, epoch, publication, tables)
        for outcome in wanted:
            if isinstance(outcome, SnapshotFailure):
                yield outcome
                continue
            assert snapshot is not None
            yield _copy(settings, zone, epoch, publication, outcome, snapshot)


def _establish(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    tables: Sequence[TableName],
    open_snapshot: contextlib.ExitStack,
    adopt_slot: bool,
) -> tuple[int, ExportedSnapshot | None]:
    """Return the current epoch, or start epoch 1. Return the snapshot of a new slot as well."""
    with query_connection(settings, "snapshot") as conn:
        identity = read_server_identity(conn)
        if identity.in_recovery:
            with server_timeline(settings) as server:
                identity = replace(identity, timeline=server.number)
        # The publication must exist before the slot: decoding reads it as of the WAL position.
        read_publication(conn, publication, tables)

        def find() -> tuple[Epoch | None, SlotStatus | None]:
            known = zone.epochs.check_source(
                slot=slot, database=identity.database, system_identifier=identity.system_identifier
            )
            status = read_slot_status(conn, slot)
            if known is not None or status is not None:
                _check_slot(status, slot, identity, zone, known)
            if known is not None:
                through, timeline = zone.captured_on(known)
                if identity.in_recovery or timeline != identity.timeline:
                    with server_timeline(settings) as server:
                        check_timeline(zone.changes.table.uri, timeline, through, server)
            return known, status

        known, _ = find()
        if known is not None:
            return known.epoch, None
        with capture_lease(conn, zone.name, slot):
            # Check again: another process may have started the epoch before the lease was taken.
            known, status = find()
            if known is not None:
                return known.epoch, None
            if status is None:
                snapshot = open_snapshot.enter_context(_kept_snapshot(settings, slot))
                start = snapshot.consistent_point
            else:
                if status.was_read and not adopt_slot:
                    raise slot_taken_error(
                        status, zone.lake.path(zone.name), "pgcdc sync --adopt-slot"
                    )
                assert status.confirmed_flush_lsn is not None
                start, snapshot = status.confirmed_flush_lsn, None
            reach("after_slot_creation")
            zone.epochs.append(_epoch(slot, publication, identity, start))
            claim_slot(conn, slot, publication)
    reach("after_epoch_commit")
    _logger.info("Epoch 1 of slot %s starts at %s", slot, start)
    return 1, snapshot


def _epoch(slot: str, publication: str, identity: ServerIdentity, start: Lsn) -> Epoch:
    return Epoch(
        epoch=1,
        start_lsn=start,
        slot=slot,
        publication=publication,
        database=identity.database,
        system_identifier=identity.system_identifier,
        timeline=identity.timeline,
        server_version=identity.server_version,
        created_at=dt.datetime.now(dt.UTC),
    )


def _check_slot(
    status: SlotStatus | None,
    slot: str,
    identity: ServerIdentity,
    zone: RawZone,
    known: Epoch | None,
) -> None:
    if status is None:
        assert known is not None
        raise SlotMissing(
            slot=slot,
            raw_zone=zone.uri,
            captured_through=zone.changes.captured_through(known.epoch) or known.start_lsn,
        )
    check_slot_usable(status, identity.database)
    if status.is_lost:
        raise slot_lost_error(status)
    if known is None and status.is_active:
        raise SlotBusy(
            slot=slot,
            active_pid=status.active_pid,
            application_name=status.active_application_name,
        )


@contextlib.contextmanager
def _kept_snapshot(settings: ConnectionSettings, slot: str) -> Iterator[ExportedSnapshot]:
    """Create the permanent slot. The snapshot outlives the replication connection."""
    with contextlib.ExitStack() as stack:
        with create_slot(settings, slot) as made:
            name = stack.enter_context(hold_snapshot(settings, made.snapshot_name))
        yield replace(made, snapshot_name=name)


@contextlib.contextmanager
def _temporary_snapshot(settings: ConnectionSettings, slot: str) -> Iterator[ExportedSnapshot]:
    """Export a snapshot by a temporary slot, which is dropped after the snapshot is re-exported."""
    marker = f"{slot[:45]}_copy_{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        with create_slot(settings, marker, temporary=True) as made:
            name = stack.enter_context(hold_snapshot(settings, made.snapshot_name))
        yield replace(made, snapshot_name=name)


def _wanted(
    conn: Connection,
    zone: RawZone,
    epoch: int,
    publication: str,
    tables: Sequence[TableName] | None,
) -> list[PublishedTable | SnapshotFailure]:
    published = {
        (table.relation.schema, table.relation.table): table
        for table in published_tables(conn, publication)
    }
    if tables is None:
        complete = {copy.name for copy in zone.snapshots.complete_snapshots(epoch)}
        return [table for name, table in published.items() if name not in complete]
    wanted: list[PublishedTable | SnapshotFailure] = []
    for schema, table in dict.fromkeys(tables):
        found = published.get((schema, table))
        if found is None:
            reason = explain_unpublished(conn, publication, schema, table)
            error = ConfigurationError(reason=f"Table {TableName(schema, table)} {reason}.")
            wanted.append(SnapshotFailure(schema, table, error))
        else:
            wanted.append(found)
    return wanted


def _copy(
    settings: ConnectionSettings,
    zone: RawZone,
    epoch: int,
    publication: str,
    table: PublishedTable,
    snapshot: ExportedSnapshot,
) -> SnapshotReport | SnapshotFailure:
    relation = table.relation
    with contextlib.ExitStack() as stack:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return _copy_once(settings, zone, epoch, table, snapshot)
            except TableChanged as error:
                if attempt == _ATTEMPTS:
                    return SnapshotFailure(relation.schema, relation.table, error)
                _logger.warning("%s Retrying with a new snapshot", error)
            except PgcdcError as error:
                return SnapshotFailure(relation.schema, relation.table, error)
            try:
                snapshot = stack.enter_context(_temporary_snapshot(settings, snapshot.slot))
                with query_connection(settings, "snapshot") as conn:
                    again = _wanted(conn, zone, epoch, publication, [relation.name])[0]
            except PgcdcError as error:
                return SnapshotFailure(relation.schema, relation.table, error)
            if isinstance(again, SnapshotFailure):
                return again
            table = again
    raise AssertionError("the last attempt returns")


def _copy_once(
    settings: ConnectionSettings,
    zone: RawZone,
    epoch: int,
    table: PublishedTable,
    snapshot: ExportedSnapshot,
) -> SnapshotReport:
    began = time.monotonic()
    byte_count = rescued_count = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal byte_count, rescued_count
        for batch in copy_published(settings, table, snapshot.snapshot_name):
            work.count += batch.num_rows
            byte_count += batch.nbytes
            rescued_count += count_hex(batch.column("new"))
            yield batch
            reach("mid_copy")
        reach("before_copy_commit")

    relation = table.relation
    version = zone.relations.register(epoch, relation, snapshot.consistent_point)
    zone.relations.flush()
    with activity(f"snapshot of {relation.qualified_name}", "rows") as work:
        row_count = zone.snapshots.land_snapshot(
            epoch,
            snapshot.consistent_point,
            relation,
            version,
            batches(),
            taken_at=snapshot.taken_at,
        )
    reach("after_copy_commit")
    return SnapshotReport(
        schema=relation.schema,
        table=relation.table,
        epoch=epoch,
        snapshot_lsn=snapshot.consistent_point,
        row_count=row_count,
        seconds=time.monotonic() - began,
        bytes=byte_count,
        rescued_count=rescued_count,
    )


def _joined(failures: Sequence[SnapshotFailure]) -> PgcdcError:
    """Return one error for all failures, of the most severe class among them."""
    for kind in (DefiniteError, ConfigurationError, TransientError):
        errors = [failure.error for failure in failures if isinstance(failure.error, kind)]
        if len(failures) == 1 and errors:
            return errors[0]
        if errors:
            return kind(reason=" ".join(str(failure.error) for failure in failures))
    return failures[0].error
