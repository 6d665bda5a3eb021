"""Snapshots of whole tables, without a gap or an overlap between snapshot and stream.

The order of the steps: create the slot, record the epoch, copy the tables, with one commit per
table that makes all its rows visible. The stream begins at the consistent point of the slot, and
the exported snapshot of the slot contains all earlier transactions. If the process dies between two
steps, the next run finds either no slot, or an unread slot at its consistent point, or an epoch
with some complete snapshots and some ranges of others.

An existing slot exports no snapshot. A session then exports the snapshot, if its LSN can be proved
(`export.py`), or else a temporary slot, whose creation waits for open transactions. The LSN is
above the position of the permanent slot, so the stream contains every later change. With
`snapshot.dsn_env` a standby exports all snapshots, also the first
(`postgres/snapshots/standby.py`). A slot that another program has read is adopted with consent
(`--adopt-slot`) only: a confirmation would remove WAL that the other program needs.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.capture.prepared_archive import adopt_two_phase
from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.capture.slot_owner import (
    check_owner,
    check_restore,
    read_row,
    record_new_owner,
    sync_remedy,
)
from pgcdc_assets.capture.snapshots.copies import Copies
from pgcdc_assets.capture.snapshots.export import (
    export_by_new_slot,
    export_settled,
)
from pgcdc_assets.capture.snapshots.pool import (
    SnapshotFailure,
    SnapshotPool,
    SnapshotReport,
)
from pgcdc_assets.capture.snapshots.table_copy import SnapshotProgress, ignore_progress
from pgcdc_assets.capture.source_checks import check_server_timeline
from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    PgcdcError,
    SlotBusy,
    TransientError,
    renewal_command,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.moved_tables import find_declared_table
from pgcdc_assets.postgres.catalog.publication import explain_unpublished, read_publication
from pgcdc_assets.postgres.catalog.relations import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.preflight.replica_identity import partial_identity
from pgcdc_assets.postgres.prepared_transactions import check_two_phase
from pgcdc_assets.postgres.slots.creation import SlotOptions
from pgcdc_assets.postgres.slots.health import slot_health
from pgcdc_assets.postgres.slots.lease import capture_lease
from pgcdc_assets.postgres.slots.status import (
    ExportedSnapshot,
    ServerIdentity,
    SlotStatus,
    check_slot_usable,
    read_server_identity,
    read_slot_status,
    slot_taken_error,
)
from pgcdc_assets.postgres.snapshots.standby import check_standby
from pgcdc_assets.postgres.stream.slot_peeks import claim_slot
from pgcdc_assets.postgres.wal.timelines import server_timeline
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.settings.policies import SlotPolicy, SnapshotPolicy
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection
    from pgcdc_assets.raw.zone import RawZone

_logger = logging.getLogger(__name__)

_POLICY = SnapshotPolicy()
_SLOT_POLICY = SlotPolicy()


def snapshot_tables(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    tables: Sequence[TableName] | None = None,
    *,
    adopt_slot: bool = False,
    slot_policy: SlotPolicy = _SLOT_POLICY,
    policy: SnapshotPolicy = _POLICY,
    standby: ConnectionSettings | None = None,
) -> list[SnapshotReport]:
    """Take snapshots of tables. A failed table does not stop the others.

    Args:
        tables: None: all tables of the publication without a complete snapshot in this epoch.
        adopt_slot: adopt a slot that another program has read.
        slot_policy: how the capture treats its slot.
        policy: number of connections, size of the ranges of large tables, and time limits.
        standby: a standby to read the tables from; None: they are read from the source database.

    Raises:
        ConfigurationError: a setting, a privilege or a table's name is wrong.
        TransientError: the server or the slot is not available now.
        DefiniteError: the slot is lost or missing, or the raw zone was filled from another slot.
    """
    outcomes = list(
        snapshot_each_table(
            settings,
            zone,
            slot,
            publication,
            tables,
            adopt_slot=adopt_slot,
            slot_policy=slot_policy,
            policy=policy,
            standby=standby,
        )
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
    slot_policy: SlotPolicy = _SLOT_POLICY,
    policy: SnapshotPolicy = _POLICY,
    standby: ConnectionSettings | None = None,
    on_progress: Callable[[SnapshotProgress], None] = ignore_progress,
) -> Iterator[SnapshotReport | SnapshotFailure]:
    """Yield the result of each table. For arguments and errors see `snapshot_tables`.

    Args:
        on_progress: called after each range of a large table.
    """
    zone.lake.check_writable()
    settings = limit_waits(settings, policy)
    if standby is not None:
        standby = limit_waits(standby, policy)
        # Before a slot is created.
        check_standby(settings, standby)
    with contextlib.ExitStack() as open_snapshot:
        epoch, snapshot = establish_epoch(
            *(settings, zone, slot, publication, tables or (), open_snapshot, adopt_slot),
            slot_policy=slot_policy,
        )
        if standby is not None:
            open_snapshot.close()
            snapshot = None
        # What has changed so far is in the snapshots. The copy checks that nothing changed between
        # the slot's snapshot and the copy.
        read_again = partial(_look_and_read, settings, zone, epoch, publication, tables or ())

        def export(
            left: Sequence[TableName] | None,
        ) -> tuple[ExportedSnapshot | None, list[PublishedTable | SnapshotFailure]]:
            return export_settled(
                *(settings, zone, epoch, slot, partial(read_again, left), open_snapshot, standby)
            )

        if snapshot is None:
            snapshot, wanted = export(tables)
        else:
            wanted = read_again(tables)
        copies = Copies()
        while True:
            yield from (outcome for outcome in wanted if isinstance(outcome, SnapshotFailure))
            found = [outcome for outcome in wanted if isinstance(outcome, PublishedTable)]
            if not found:
                return
            assert snapshot is not None
            pool = SnapshotPool(settings, zone, epoch, snapshot, policy, on_progress, standby)
            yield from copies.of(pool, found)
            open_snapshot.close()
            if not copies.left:
                return
            try:
                snapshot, wanted = export(tuple(copies.left))
            except PgcdcError as error:
                yield from (SnapshotFailure(*name, error) for name in copies.left)
                return


def limit_waits(settings: ConnectionSettings, policy: SnapshotPolicy) -> ConnectionSettings:
    """Return connection settings with the policy's limit of waits for locks."""
    seconds = policy.lock_timeout_seconds
    if seconds is None:
        return settings
    return replace(settings, lock_timeout_ms=max(1, int(seconds * 1000)))


def establish_epoch(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    tables: Sequence[TableName],
    open_snapshot: contextlib.ExitStack,
    adopt_slot: bool,
    slot_policy: SlotPolicy = _SLOT_POLICY,
) -> tuple[int, ExportedSnapshot | None]:
    """Return the current epoch, or start epoch 1. Return the snapshot of a new slot as well."""
    with query_connection(settings, "snapshot") as conn:
        identity = read_server_identity(conn)
        if identity.in_recovery:
            with server_timeline(settings) as server:
                identity = replace(identity, timeline=server.number)
        # The publication must exist before the slot: decoding reads it as of the WAL position.
        read_publication(conn, publication, tables, renewal_command(zone.name))

        def find() -> tuple[Epoch | None, SlotStatus | None]:
            known = zone.epochs.check_source(
                slot=slot, database=identity.database, system_identifier=identity.system_identifier
            )
            status = read_slot_status(conn, slot)
            if known is not None or status is not None:
                _check_slot(status, slot, identity, zone, known)
            if known is not None:
                zone.check_relations(known)
                check_restore(read_row(conn, slot_policy.heartbeat, status), zone, known.epoch)
                is_first = not identity.in_recovery and identity.timeline == 1
                if not is_first or zone.captured_on(known)[1] != identity.timeline:
                    with server_timeline(settings) as server:
                        check_server_timeline(zone, server)
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
                options = SlotOptions(failover=slot_policy.failover)
                snapshot = open_snapshot.enter_context(export_by_new_slot(settings, slot, options))
                start = snapshot.consistent_point
            else:
                if not adopt_slot:
                    row = read_row(conn, slot_policy.heartbeat, status)
                    check_owner(row, status, zone, sync_remedy(zone.name))
                if status.was_read and not adopt_slot:
                    lake = zone.lake.path(zone.name)
                    raise slot_taken_error(status, lake, sync_remedy(zone.name))
                check_two_phase(status, is_wanted=slot_policy.two_phase)
                if status.two_phase:
                    adopt_two_phase(conn, zone, status)
                assert status.confirmed_flush_lsn is not None
                start, snapshot = status.confirmed_flush_lsn, None
            failpoints.reach(failpoints.AFTER_SLOT_CREATION)
            if not identity.in_recovery:
                record_new_owner(conn, zone, slot_policy.heartbeat, slot, 1, start)
            zone.epochs.append(_epoch(slot, publication, identity, start))
            claim_slot(conn, slot, publication)
    failpoints.reach(failpoints.AFTER_EPOCH_COMMIT)
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
    if status is not None:
        check_slot_usable(status, identity.database)
    through = None
    if known is not None:
        through = zone.changes.captured_through(known.epoch) or known.start_lsn
    health = slot_health(status, through)
    # A slot that is there is no matter of the snapshot: the capture says what is wrong with it.
    error = health.error(slot, zone.uri, zone.name) if health.is_gone else None
    if error is not None:
        raise error
    assert status is not None
    if known is None and status.is_active:
        raise SlotBusy(
            slot=slot,
            active_pid=status.active_pid,
            application_name=status.active_application_name,
        )


def _look_and_read(
    settings: ConnectionSettings,
    zone: RawZone,
    epoch: int,
    publication: str,
    declared: Sequence[TableName],
    tables: Sequence[TableName] | None,
) -> list[PublishedTable | SnapshotFailure]:
    """Look at the catalog, and read the tables to copy.

    A look before an export finds the changes that the snapshot has. A look after the export finds
    the partitions that the snapshot has: the next look does not find one that is detached by then.
    """
    with query_connection(settings, "snapshot") as conn:
        poll_catalog(conn, zone, declared, publication)
        return _wanted(conn, zone, epoch, publication, tables)


def read_wanted(
    settings: ConnectionSettings,
    zone: RawZone,
    epoch: int,
    publication: str,
    tables: Sequence[TableName] | None,
) -> list[PublishedTable | SnapshotFailure]:
    """Read the tables to copy from the catalog; a table that cannot be copied is a failure."""
    with query_connection(settings, "snapshot") as conn:
        return _wanted(conn, zone, epoch, publication, tables)


def _wanted(
    conn: Connection,
    zone: RawZone,
    epoch: int,
    publication: str,
    tables: Sequence[TableName] | None,
) -> list[PublishedTable | SnapshotFailure]:
    published = published_tables(conn, publication)
    if tables is None:
        complete = {copy.name for copy in zone.snapshots.complete_snapshots(epoch)}
        return [_checked(table) for table in published if table.relation.name not in complete]
    known = zone.followed_ids()
    wanted: list[PublishedTable | SnapshotFailure] = []
    for name in dict.fromkeys(TableName(*table) for table in tables):
        found = find_declared_table(published, name, known.get(name))
        if found is None:
            reason = explain_unpublished(conn, publication, *name)
            error = ConfigurationError(reason=f"Table {name} {reason}.")
            wanted.append(SnapshotFailure(*name, error))
        else:
            wanted.append(_checked(found))
    return wanted


def _checked(table: PublishedTable) -> PublishedTable | SnapshotFailure:
    """Return the table, or the failure of a table whose rows the published columns do not tell."""
    if not table.relation.unsent_identity:
        return table
    error = ConfigurationError(reason=str(partial_identity(table.relation)))
    return SnapshotFailure(*table.declared_name, error)


def _joined(failures: Sequence[SnapshotFailure]) -> PgcdcError:
    """Return one error for all failures, of the most severe class among them."""
    for kind in (DefiniteError, ConfigurationError, TransientError):
        errors = [failure.error for failure in failures if isinstance(failure.error, kind)]
        if len(failures) == 1 and errors:
            return errors[0]
        if errors:
            return kind(reason=" ".join(str(failure.error) for failure in failures))
    return failures[0].error
