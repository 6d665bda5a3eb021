"""The errors of rows that were landed, and that the raw zone does not have any more."""

from __future__ import annotations

from pgcdc_assets.errors import PgcdcError, RawZoneError, TransientError, resnapshot_remedy
from pgcdc_assets.merge.plan import Plan
from pgcdc_assets.raw.delta.scan import UnreadableFile
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.windows.rows import LandedRows
from pgcdc_assets.raw.zone import RawZone


def unreadable_error(zone: RawZone, plan: Plan, error: UnreadableFile) -> RawZoneError:
    """Return the error of a table whose changes may be in a file that cannot be read."""
    return RawZoneError(
        raw_zone=error.raw_zone,
        reason=f"{error.reason} Without a backup, the table needs a new snapshot. "
        f"{_snapshot_remedy(zone, plan)}",
    )


def miscount_error(zone: RawZone, plan: Plan, landed: LandedRows, found: int) -> PgcdcError:
    """Return the error of a table whose windows do not have the rows that were landed.

    Args:
        found: number of rows that the windows have.
    """
    epoch, start, end = landed.within
    floor = zone.changes.kept_from(epoch)
    if floor is not None and floor > start:
        return TransientError(
            reason=f"Retention removed windows of {zone.changes.table.uri} while they were "
            "counted. Nothing was merged. Run it again."
        )
    name = plan.target.qualified_name
    what, remedy = _explain_difference(landed.row_count, found)
    return RawZoneError(
        raw_zone=zone.changes.table.uri,
        reason=f"{landed.row_count} changes of {name} were landed between {start} and {end} "
        f"(epoch {epoch}), but the files contain {found}, so another program has {what}. Nothing "
        f"of them was merged into the table. {remedy}. Otherwise the table needs a new snapshot. "
        f"{_snapshot_remedy(zone, plan)}",
    )


def snapshot_error(zone: RawZone, plan: Plan, snapshot: Snapshot, landed: int) -> RawZoneError:
    """Return the error of a table whose snapshot does not have the rows that were landed.

    Args:
        landed: number of rows at the commit of the snapshot.
    """
    store = zone.snapshots if snapshot is plan.snapshot else zone.partial_snapshots
    what, remedy = _explain_difference(landed, snapshot.row_count)
    return RawZoneError(
        raw_zone=store.table.uri,
        reason=f"{landed} rows of {plan.target.qualified_name} were landed as the snapshot at "
        f"{snapshot.snapshot_lsn} (epoch {snapshot.epoch}), but the files contain "
        f"{snapshot.row_count}, so another program has {what}. Nothing of the snapshot was merged "
        f"into the table. {remedy}. Otherwise the table needs a new snapshot. "
        f"{_snapshot_remedy(zone, plan)}",
    )


def _explain_difference(landed: int, found: int) -> tuple[str, str]:
    """Return what another program has done to landed rows, and the remedy."""
    if found < landed:
        return "deleted rows, or files", "Restore the rows from a backup"
    return "added rows", "Delete the added rows"


def _snapshot_remedy(zone: RawZone, plan: Plan) -> str:
    return resnapshot_remedy(zone.name, plan.target.qualified_name)
