"""The exported snapshot of a copy: that of a new slot, or a later one."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pgcdc_assets.capture.snapshot_pool import SnapshotFailure
from pgcdc_assets.postgres.catalog import PublishedTable
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.copy import hold_snapshot
from pgcdc_assets.postgres.plain_snapshot import export_plain_snapshot
from pgcdc_assets.postgres.slot_creation import SlotOptions
from pgcdc_assets.postgres.slots import ExportedSnapshot, create_slot
from pgcdc_assets.postgres.standby_snapshot import export_standby_snapshot


@contextlib.contextmanager
def export_by_new_slot(
    settings: ConnectionSettings, slot: str, options: SlotOptions
) -> Iterator[ExportedSnapshot]:
    """Export a snapshot by a new slot. The snapshot outlives the replication connection.

    A temporary slot is dropped as soon as another session holds the snapshot.
    """
    with contextlib.ExitStack() as stack:
        with create_slot(settings, slot, options=options) as made:
            name = stack.enter_context(hold_snapshot(settings, made.snapshot_name))
        yield replace(made, snapshot_name=name)


def relation_ids(wanted: Sequence[PublishedTable | SnapshotFailure]) -> set[int]:
    """Return the OIDs of the tables."""
    return {each.relation.relation_id for each in wanted if isinstance(each, PublishedTable)}


def export_later(
    settings: ConnectionSettings,
    slot: str,
    wanted: Sequence[PublishedTable | SnapshotFailure],
    read_again: Callable[[], list[PublishedTable | SnapshotFailure]],
    open_snapshot: contextlib.ExitStack,
    standby: ConnectionSettings | None = None,
) -> tuple[ExportedSnapshot, list[PublishedTable | SnapshotFailure]]:
    """Export a snapshot, without a slot if its LSN can be proved, and read the tables again.

    A column that was added before the snapshot is in the snapshot. The copy checks that the tables
    were not altered after the snapshot.

    Args:
        standby: the standby that exports the snapshot; None: the source database exports it.
    """
    if standby is not None:
        snapshot = open_snapshot.enter_context(export_standby_snapshot(settings, standby))
        return snapshot, read_again()
    with contextlib.ExitStack() as held:
        plain = held.enter_context(export_plain_snapshot(settings, relation_ids(wanted)))
        if plain is not None:
            found = read_again()
            if plain.is_exact_for(relation_ids(found)):
                open_snapshot.push(held.pop_all())
                return plain, found
    marker = f"{slot[:45]}_copy_{uuid.uuid4().hex[:8]}"
    snapshot = open_snapshot.enter_context(
        export_by_new_slot(settings, marker, SlotOptions(temporary=True))
    )
    return snapshot, read_again()
