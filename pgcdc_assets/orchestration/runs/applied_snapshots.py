"""Whether merges have applied the snapshots that a command has taken.

A merge of another Dagster instance does not know the runs of this instance. If the merge was
planned before a snapshot was landed, and then commits a watermark above its LSN, no merge applies
the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Position
from pgcdc_assets.orchestration.state import watermarks
from pgcdc_assets.raw.snapshots import SnapshotIdentity
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import has_applied, read_watermark, table_path


def find_merged(
    zone: RawZone, tables: Iterable[CdcTable]
) -> dict[CdcTable, frozenset[SnapshotIdentity]]:
    """Return the merged tables, with their merged kinds alone, and their complete snapshots."""
    complete = zone.snapshots.complete_snapshots()
    found = {}
    for table in tables:
        merged = [scd for scd in table.scd if watermarks(zone, table.of_kinds([scd]))]
        if merged:
            known = frozenset(each.identity for each in complete if each.name == table.name)
            found[table.of_kinds(merged)] = known
    return found


def check_new_applied(zone: RawZone, merged: Mapping[CdcTable, Set[SnapshotIdentity]]) -> None:
    """Check that the merges have applied the new snapshots of tables that were merged before.

    Args:
        merged: the result of `find_merged` before the snapshots.

    Raises:
        TransientError: another process has merged a table past its new snapshot.
    """
    complete = zone.snapshots.complete_snapshots()
    for table, known in merged.items():
        new = [each for each in complete if each.name == table.name and each.identity not in known]
        # One write may have an empty snapshot together with the changes after it.
        if new and new[0].row_count:
            check_applied(zone, table, new[0].position)


def check_applied(zone: RawZone, table: CdcTable, position: Position) -> None:
    """Check that the merges of a table have applied a snapshot of all or some rows.

    Raises:
        TransientError: a merge that was planned before the snapshot was landed has passed it.
    """
    if not all(_has_applied(zone, table, scd, position) for scd in table.scd):
        raise passed_error(table, position)


def is_passed(zone: RawZone, table: CdcTable, position: Position, row_count: int) -> bool:
    """Return whether a merge has passed a snapshot of all or some rows without applying it.

    A merge of another Dagster instance may apply the snapshot before its run ends. One write may
    have an empty snapshot together with the changes after it, so an empty one counts as passed.
    """
    for scd in table.scd:
        marks = watermarks(zone, table.of_kinds([scd]))
        if any(mark >= position for mark in marks) and not (
            row_count and _has_applied(zone, table, scd, position)
        ):
            return True
    return False


def _has_applied(zone: RawZone, table: CdcTable, scd: int, position: Position) -> bool:
    path = table_path(zone.lake, zone.name, table.schema, table.table, scd)
    if has_applied(zone, path, position):
        return True
    watermark = read_watermark(zone.lake, zone.name, table.schema, table.table, scd)
    # A complete snapshot that was taken later has the same rows.
    return watermark is not None and any(
        snapshot.name == table.name and position < snapshot.position <= watermark
        for snapshot in zone.snapshots.complete_snapshots()
    )


def passed_error(table: CdcTable, position: Position) -> TransientError:
    """Return the error of a table that was merged past a snapshot."""
    return TransientError(
        reason=f"Another process merged {table.qualified_name} past the LSN of the snapshot, "
        f"{position.lsn}, so the snapshot is not applied. Run it again."
    )
