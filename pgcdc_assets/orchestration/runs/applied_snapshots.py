"""Whether merges have applied the snapshots that a command has taken.

A merge of another Dagster instance does not know the runs of this instance. If the merge was
planned before a snapshot was landed, and then commits a watermark above its LSN, no merge applies
the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from pgcdc_assets.orchestration.runs.partial_request import check_applied
from pgcdc_assets.orchestration.state import watermarks
from pgcdc_assets.raw.snapshots import SnapshotIdentity
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable


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
