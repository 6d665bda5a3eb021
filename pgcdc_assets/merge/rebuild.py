"""Rebuild of an SCD table from the raw zone alone, without Postgres.

A merge builds the table in a staging folder. Then the files move to the folder of the live table,
and one commit removes the old files from the log, adds the new files, and carries schema and
watermark: readers see either the old or the new contents. If the process is killed before the
commit, the live table is unchanged, and VACUUM or the next maintenance removes the orphans.

The commit (`replaced_table.py`) carries the next fence, so a merge that began earlier writes
nothing. If delta-rs cannot write a feature of the table, or the table has constraints, Spark
overwrites the table from the staging folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from pgcdc_assets import failpoints
from pgcdc_assets.errors import (
    ConfigurationError,
    RawExpired,
    RawZoneError,
    TransientError,
    resnapshot_remedy,
)
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge.rebuild_range import find_range, is_taken_back
from pgcdc_assets.merge.replaced_table import (
    ReplacedTable,
    create_again,
    describe_replaced,
    explain_overwrite,
    find_next_step,
    open_again,
    replace_files,
    unwritable_error,
)
from pgcdc_assets.merge.report import MergeFailure
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import read_commit
from pgcdc_assets.raw.snapshots import Snapshot, SnapshotStore
from pgcdc_assets.raw.staging import REBUILD, STALE_AFTER, remove_stale, staging_root
from pgcdc_assets.raw.table_files import move_files
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import ASK, STOP
from pgcdc_assets.spark.sql import delta_table, string
from pgcdc_assets.tables.columns import DELETED, OP, VALID_FROM
from pgcdc_assets.tables.deleted_rows import deleted_rows
from pgcdc_assets.tables.merge_notes import NOTES
from pgcdc_assets.tables.properties import BEGINS_WITH, KEY_SINCE, MAPPING, MAX_COLUMN_ID, OURS
from pgcdc_assets.tables.schema_gate import read_gate
from pgcdc_assets.tables.state import check_written, has_applied, table_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Columns of the kinds of table that show contents from before their newest snapshot.
_SHOWS_THE_PAST = frozenset({VALID_FROM, DELETED, OP})
_START_AGAIN = (
    "Its earlier contents cannot be rebuilt; to start again, move {path} to another folder. "
    "{remedy}"
)


@dataclass(frozen=True)
class RebuildReport:
    """The outcome of the rebuild of one SCD table.

    Attributes:
        watermark_before: None if the table had no watermark.
        changes_read: number of changes folded from the raw zone.
        changes_missing: number of landed changes that another program has deleted.
    """

    schema: str
    table: str
    scd: int
    path: str
    epoch: int
    watermark_before: Position | None
    watermark_after: Lsn
    row_count: int
    changes_read: int
    changes_missing: int
    seconds: float


def rebuild_table(
    spark: SparkSession, zone: RawZone, target: CdcTable, scd: int, through: Lsn | None = None
) -> RebuildReport:
    """Build an SCD table from the raw zone, and replace the live table in one commit.

    A merge of the table at the same time fails, and has to be retried.

    Args:
        through: fold changes with a lower commit LSN; None: all captured changes, or those before
            the first schema change whose snapshot is not there yet.

    Raises:
        ConfigurationError: nothing is captured yet, the table was never merged, or the raw zone is
            older than the table.
        RawExpired: retention removed windows that the rebuild needs.
        DefiniteError: the changes cannot be folded.
        TransientError: the lake could not be written, or other writers committed every time, or a
            snapshot of the table was completed during the rebuild.
    """
    started = time.monotonic()
    window = find_range(zone, target, scd, through)
    path = table_path(zone.lake, zone.name, target.schema, target.table, scd)
    before = describe_replaced(zone, target, path)
    if before is None:
        raise ConfigurationError(
            reason=f"Table {target.qualified_name} was never merged: there is no {path}. The next "
            "merge builds it from raw."
        )
    before = replace(before, is_ahead=is_taken_back(zone, target, before, through))
    remove_stale(zone.lake, zone.name, STALE_AFTER)
    if target.schema_policy == STOP:
        gate = read_gate(zone, target, scd, before.watermark, window.end_position)
        if gate is None or not gate.is_reached(window.end_position):
            # The table has followed the replayable changes under another setting.
            target = replace(target, on_schema_change=ASK)
    complete = _positions(zone.snapshots, target, window)
    partial = _positions(zone.partial_snapshots, target, window)
    known = {*complete, *partial}
    with staging_root(zone.lake, zone.name, REBUILD) as root:
        changes_read, missing = _build(
            spark, zone, replace(target, scd=(scd,)), window, root, before
        )
        _check_none_completed(zone, target, window, known, "The table was not changed")
        failpoints.reach(failpoints.AFTER_REBUILD_STAGED)
        staged = table_path(zone.lake, zone.name, target.schema, target.table, scd, root)
        applied = (*complete[-1:], *(each for each in partial if has_applied(zone, staged, each)))
        row_count = _replace_contents(spark, zone, staged, before, window, applied)
    # A snapshot that is completed later finds the watermark above its LSN, and its run fails.
    _check_none_completed(zone, target, window, known, "Merges do not apply the snapshot")
    return RebuildReport(
        target.schema,
        target.table,
        scd,
        path,
        window.epoch,
        before.watermark,
        window.end,
        row_count,
        changes_read,
        missing,
        time.monotonic() - started,
    )


def _build(
    spark: SparkSession,
    zone: RawZone,
    target: CdcTable,
    window: LsnWindow,
    root: str,
    live: ReplacedTable,
) -> tuple[int, int]:
    """Build the staged table, and return the numbers of read and of missing changes."""
    from pgcdc_assets.merge.run import merge_tables

    needed = _check_kept(zone, target, window, live)
    changes_read = changes_missing = 0
    for report in merge_tables(spark, zone, [target], window, root=root):
        if isinstance(report, MergeFailure):
            raise report.error
        changes_read += report.changes_read
        changes_missing += report.changes_missing
    # Retention may have removed windows and snapshots while they were read.
    _check_kept(zone, target, window, live, needed)
    return changes_read, changes_missing


def _check_none_completed(
    zone: RawZone, target: CdcTable, window: LsnWindow, known: Set[Position], outcome: str
) -> None:
    """Check that no snapshot of the range was completed during the rebuild.

    No merge applies a snapshot after a commit above its LSN.

    Args:
        known: the positions of the snapshots before the rebuild.
        outcome: a sentence about the table, for the error.

    Raises:
        TransientError: a snapshot was completed.
    """
    stores = zone.snapshots, zone.partial_snapshots
    if not all(known >= set(_positions(store, target, window)) for store in stores):
        raise TransientError(
            reason=f"A snapshot of {target.qualified_name} was completed during its rebuild, which "
            f"lacks the snapshot. {outcome}. Run the rebuild again."
        )


def _positions(store: SnapshotStore, target: CdcTable, window: LsnWindow) -> list[Position]:
    """Return the positions of a table's snapshots that are not above the range, in order."""
    return sorted(
        snapshot.position
        for snapshot in store.complete_snapshots()
        if snapshot.name == target.name and snapshot.position <= window.end_position
    )


def _check_kept(
    zone: RawZone,
    target: CdcTable,
    window: LsnWindow,
    live: ReplacedTable,
    needed: Sequence[Snapshot] | None = None,
) -> Sequence[Snapshot]:
    """Check that the raw zone has the table's snapshots and every change after them.

    Args:
        needed: the snapshots that an earlier look found to be needed.

    Returns:
        The snapshots that are needed.

    Raises:
        RawExpired: retention removed some changes.
        RawZoneError: a snapshot that is needed is gone.
    """
    snapshots = [
        snapshot
        for snapshot in zone.snapshots.complete_snapshots()
        if snapshot.name == target.name and snapshot.position <= window.end_position
    ]
    floors = zone.changes.floors({snapshot.epoch for snapshot in snapshots})
    again = resnapshot_remedy(zone.name, target.qualified_name)
    begin_again = _START_AGAIN.format(path=live.path, remedy=again)
    # A table ahead of the raw zone stops the capture, and so each new snapshot.
    remedy = {"remedy": begin_again if live.is_ahead else again}
    is_complete = True
    if not target.keeps_history(target.scd[0]):
        wanted = snapshots[-1:]
    elif live.is_readable and _SHOWS_THE_PAST.isdisjoint(live.columns):
        # The table was of another kind, so no earlier contents would be lost. What a table with an
        # unreadable log has is not known.
        wanted = [
            snapshot for snapshot in snapshots if snapshot.snapshot_lsn >= floors[snapshot.epoch]
        ]
    else:
        # A later beginning would silently lose the contents before it.
        remedy["remedy"] = begin_again
        beginning = live.properties.get(BEGINS_WITH, "")
        wanted = [snapshot for snapshot in snapshots if snapshot.key >= beginning]
        is_complete = not wanted or beginning in ("", wanted[0].key)
    if needed is not None:
        is_complete = is_complete and {c.identity for c in needed} <= {
            c.identity for c in snapshots
        }
        wanted = list(needed)
    if not is_complete:
        raise RawZoneError(
            raw_zone=zone.snapshots.table.uri,
            reason=f"a snapshot that {target.qualified_name} is made of is gone, so it cannot be "
            f"rebuilt. {begin_again}",
        )
    for snapshot in wanted:
        if snapshot.snapshot_lsn < floors[snapshot.epoch]:
            raise RawExpired(
                what=f"Table {target.qualified_name} was copied at {snapshot.snapshot_lsn} (epoch "
                f"{snapshot.epoch}); its rebuild",
                floor=floors[snapshot.epoch],
                **remedy,
            )
    return wanted


def _replace_contents(
    spark: SparkSession,
    zone: RawZone,
    staged_path: str,
    live: ReplacedTable,
    window: LsnWindow,
    snapshots: tuple[Position, ...],
) -> int:
    """Replace a table's contents, schema and watermark by those of the staged table.

    Args:
        snapshots: positions of the snapshots in the staged table.
    """
    path = live.path
    staged = open_again(zone, staged_path)
    files = pa.table(staged.get_add_actions(flatten=True))
    if deleted_rows(zone.lake, staged_path, staged, files):
        _alter(spark, path, f"REORG TABLE {delta_table(staged_path)} APPLY (PURGE)")
        staged = open_again(zone, staged_path)
        files = pa.table(staged.get_add_actions(flatten=True))
    actions = _added_files(zone, staged, files, staged_path)
    # The log of a table with column mapping has a number for each column, which others lack.
    loses_mapping = MAPPING in live.properties and MAPPING not in staged.metadata().configuration
    if not live.is_readable:
        create_again(spark, zone, staged, staged_path, path, window.end_position, snapshots)
    elif live.is_for_spark or loses_mapping:
        _commit_by_spark(spark, zone, staged, staged_path, live, window, snapshots)
    else:
        try:
            move_files(zone, {each.path: each.size for each in actions}, staged_path, path)
        except OSError as error:
            raise unwritable_error(path, error) from error
        failpoints.reach(failpoints.AFTER_REBUILD_MOVED)
        replace_files(zone, staged, live, actions, window.end_position, snapshots)
    failpoints.reach(failpoints.AFTER_REBUILD_COMMIT)
    if live.is_readable:
        _keep_properties_in_step(spark, zone, staged, path)
    return sum(json.loads(action.stats)["numRecords"] for action in actions)


def _added_files(zone: RawZone, staged: DeltaTable, files: pa.Table, path: str) -> list[AddAction]:
    """Return the staged table's files with all statistics of its log."""
    live = set(files.column("path").to_pylist())
    folder = filesystem(zone.lake, path)
    found: dict[str, dict[str, Any]] = {}
    for version in range(staged.version() + 1):
        added = [action["add"] for action in read_commit(folder, version) if "add" in action]
        found.update({add["path"]: add for add in added})
    now = int(time.time() * 1000)
    return [
        AddAction(name, add["size"], add["partitionValues"], now, True, add["stats"])
        for name, add in found.items()
        if name in live
    ]


def _commit_by_spark(
    spark: SparkSession,
    zone: RawZone,
    staged: DeltaTable,
    staged_path: str,
    replaced: ReplacedTable,
    window: LsnWindow,
    snapshots: tuple[Position, ...],
) -> None:
    """Overwrite a table with the staged rows by Spark, which checks the owner's constraints."""
    from pgcdc_assets.merge.schema_evolution import overwrite_by_spark

    live = open_again(zone, replaced.path)
    step = find_next_step(zone, live, replaced.path, window.end_position, snapshots)
    columns = staged.metadata().partition_columns
    try:
        overwrite_by_spark(spark, staged_path, replaced.path, replaced.owned, columns, step)
    except Exception as error:
        raise explain_overwrite(replaced.path, error) from error
    check_written(zone, replaced.path, step)


def _keep_properties_in_step(
    spark: SparkSession, zone: RawZone, staged: DeltaTable, path: str
) -> None:
    """Write the changed properties that describe the contents.

    They need a commit of their own, because no writer commits properties together with files and an
    earlier watermark. A crash before it leaves a complete table with the relation version from
    before the rebuild: merges accept it, or raise an error whose remedy is another rebuild.
    """
    known = open_again(zone, path).metadata().configuration
    wanted = {
        name: value
        for name, value in staged.metadata().configuration.items()
        if name.startswith(OURS) and name != MAX_COLUMN_ID and known.get(name) != value
    }
    if wanted:
        pairs = ", ".join(f"{string(name)} = {string(value)}" for name, value in wanted.items())
        _alter(spark, path, f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES ({pairs})")
    # The notes are about the rows before the rebuild. Those of the staged table do not hold here.
    for name in (BEGINS_WITH, KEY_SINCE, *NOTES):
        if name in known and name not in staged.metadata().configuration:
            unset = f"UNSET TBLPROPERTIES ({string(name)})"
            _alter(spark, path, f"ALTER TABLE {delta_table(path)} {unset}")


def _alter(spark: SparkSession, path: str, statement: str) -> None:
    """Run a statement of a rebuild.

    Args:
        path: the address of the live table.

    Raises:
        DefiniteError: Spark refuses the statement.
        TransientError: the statement failed, such as on a full disk.
    """
    try:
        spark.sql(statement)
    except Exception as error:
        raise explain_overwrite(path, error) from error
