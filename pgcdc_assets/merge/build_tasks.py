"""Build of the task of each table of a merge: state, plan and statistics, without Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain

from pgcdc_assets.errors import (
    PgcdcError,
    SchemaChangeError,
    WatermarkGap,
)
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge.change_stats import (
    ChangeStats,
    FollowedTable,
    ReadChanges,
    count_snapshot_rows,
    read_change_stats,
    versions_in_order,
)
from pgcdc_assets.merge.doubts import Doubt, find_doubt, find_lost_key, find_unidentified
from pgcdc_assets.merge.lost_changes import miscount_error, snapshot_error, unreadable_error
from pgcdc_assets.merge.opened_table import (
    OpenedTable,
    check_log_is_there,
    check_not_ahead,
    lowest_start,
    open_scd_table,
    stored_key,
)
from pgcdc_assets.merge.plan import Landed, Limits, Names, Plan, plan_merge
from pgcdc_assets.merge.report import MergeFailure
from pgcdc_assets.merge.schema_stops import SchemaStops
from pgcdc_assets.merge.snapshot_time import find_snapshot_time
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.delta.scan import UnreadableFile
from pgcdc_assets.raw.delta.sizes import RowGroups
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.relations.source_relations import SourceRelations
from pgcdc_assets.raw.snapshots import Snapshot, SnapshotIdentity, group_by_name
from pgcdc_assets.raw.table_threads import map_tables
from pgcdc_assets.raw.windows.rows import LandedRows
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import FOLLOW, StepLimit
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.keyed_snapshots import newest_alike, no_key_error, snapshots_with_key
from pgcdc_assets.tables.tables_ahead import RawEnd


def build_tasks(
    zone: RawZone,
    targets: Sequence[CdcTable],
    through: LsnWindow,
    root: str | None = None,
    *,
    skips_to_snapshot: bool = False,
    after: str | None = None,
    limit: StepLimit | None = None,
) -> Iterator[MergeTask | MergeFailure]:
    """Read each table's state, plan its merge, and count the changes of all tables in one scan.

    Args:
        root: the address that takes the place of the capture's folder; snapshots above `through`
            are not used there.
        skips_to_snapshot: for tables with history, see `plan_merge`.
        after: ignore snapshots up to this key.
        limit: of a step.
    """
    # Most tables of a merge have the same range.
    sizes = cache(RowGroups(zone.changes.table).between)
    opened: list[OpenedTable] = []
    places = [(target, scd) for target in targets for scd in target.scd]
    for found in map_tables(zone.lake, places, lambda place: _open(zone, *place, root)):
        if isinstance(found, MergeFailure):
            yield found
        else:
            opened.append(found)
    snapshots = zone.snapshots.complete_snapshots()
    partial_snapshots = zone.partial_snapshots.complete_snapshots()
    kept = snapshots
    if any(table.state is None for table in opened):
        # A new table begins with a snapshot whose later changes are all retained.
        floors = zone.changes.floors({snapshot.epoch for snapshot in snapshots})
        kept = [
            snapshot for snapshot in snapshots if snapshot.snapshot_lsn >= floors[snapshot.epoch]
        ]
    snapshots_of, kept_set = group_by_name(snapshots), set(kept)
    is_bounded = root is not None

    @cache
    def landed(epoch: int) -> Sequence[WindowSummary]:
        watermarks = ((table.target.name, table.watermark) for table in opened)
        return zone.changes.windows(epoch, lowest_start(watermarks, snapshots, epoch))

    @cache
    def relations(epoch: int) -> SourceRelations:
        return SourceRelations(epoch, snapshots, zone.relations.versions(epoch))

    stops = SchemaStops.read(zone, targets, snapshots, through, relations, is_bounded=is_bounded)

    @cache
    def copy_times() -> dict[SnapshotIdentity, dt.datetime]:
        return zone.snapshots.times() | zone.partial_snapshots.times()

    @cache
    def copied_rows() -> dict[SnapshotIdentity, int]:
        return zone.snapshots.landed_rows() | zone.partial_snapshots.landed_rows()

    looks = cache(zone.definitions.newest)
    read_end = cache(partial(RawEnd.read, zone))
    tasks = []
    for table in opened:
        own = snapshots_of.get(table.target.name, [])
        if is_bounded:
            own = [snapshot for snapshot in own if snapshot.position <= through.end_position]
        usable = own if table.state is not None else [each for each in own if each in kept_set]
        keyed: list[Snapshot] = []
        if table.is_keyless or table.target.needs_key(table.scd):
            keyed = snapshots_with_key(table.target, usable, relations, table.watermark)
        if table.target.needs_key(table.scd):
            usable = keyed
        elif table.state is None and table.target.keeps_history(table.scd):
            usable = newest_alike(table.target, usable, relations)
        if after is not None:
            usable = [snapshot for snapshot in usable if snapshot.key > after]
        limits = Limits(limit or StepLimit(), sizes, _names(table, relations))
        skips = skips_to_snapshot or stops.is_replaced(table, snapshots)
        try:
            if not is_bounded:
                check_not_ahead(zone, table, through, read_end)
            plan, waits_for = stops.plan(
                table.target,
                table.scd,
                table.watermark,
                partial(
                    _plan,
                    table,
                    usable,
                    table.foldable_partials(partial_snapshots, keyed),
                    landed,
                    is_bounded,
                    skips,
                    limits,
                ),
            )
            described = _describe(zone, table, plan.snapshot, relations(plan.epoch))
            is_remade = check_log_is_there(zone.lake, table, snapshots, kept)
        except PgcdcError as error:
            yield MergeFailure(*table.target.name, error)
            continue
        if described is not None:
            relation_id = described.relation.relation_id
        else:
            relation_id = table.relation_id or 0
        snapshot_at, table_end, compared_bytes, altered = None, None, 0, None
        if (read := plan.partial or plan.snapshot) is not None and not is_bounded:
            landed_rows = copied_rows().get(read.identity, read.row_count)
            if landed_rows != read.row_count:
                altered = snapshot_error(zone, plan, read, landed_rows)
        if (few := plan.partial) is not None:
            plan = replace(plan, change_bytes=zone.partial_snapshots.size_bytes(few))
            if table.scd == 2:
                taken_at = copy_times().get(few.identity)
                snapshot_at = find_snapshot_time(zone, few, taken_at, is_first=False)
        if plan.snapshot is not None and table.target.keeps_history(table.scd):
            snapshot_at = find_snapshot_time(
                zone, plan.snapshot, copy_times().get(plan.snapshot.identity), table.state is None
            )
            if table.state is not None:
                table_end = table.find_end(zone, plan.snapshot, relation_id, relations(plan.epoch))
                # Assume that the table has as many rows as the snapshot.
                compared_bytes = 2 * zone.snapshots.size_bytes(plan.snapshot)
        tasks.append(
            MergeTask(
                plan,
                table.scd,
                table.path,
                table.state,
                FollowedTable(table.target.name, relation_id),
                relations(plan.epoch).versions(relation_id),
                table.started,
                snapshot_version=described,
                snapshot_at=snapshot_at,
                table_end=table_end,
                compared_bytes=compared_bytes,
                is_remade=is_remade,
                waits_for=waits_for,
                awaits_snapshot=stops.awaits_snapshot(table.target.name, table.watermark),
                blocked_by=altered,
                healed_through=_newest_snapshot_lsn(plan, own),
                comments=looks(plan.epoch).comments(relation_id),
            )
        )
    yield from _with_stats(zone, tasks, relations, stops.keyless, is_bounded=is_bounded)


def _open(
    zone: RawZone, target: CdcTable, scd: int, root: str | None
) -> OpenedTable | MergeFailure:
    try:
        return open_scd_table(zone, target, scd, root)
    except PgcdcError as error:
        return MergeFailure(target.schema, target.table, error)


def _plan(
    table: OpenedTable,
    snapshots: Sequence[Snapshot],
    partial_snapshots: Sequence[Snapshot],
    landed: Landed,
    is_bounded: bool,
    skips_to_snapshot: bool,
    limits: Limits,
    through: LsnWindow,
) -> Plan:
    """Plan a table's merge; a history with missing changes continues with the next snapshot."""
    watermark = table.state.watermark if table.state is not None else None
    in_order = table.target.keeps_history(table.scd)

    def plan(skips: bool) -> Plan:
        return plan_merge(
            table.target,
            watermark,
            snapshots,
            landed,
            through,
            partial=partial_snapshots,
            in_order=in_order,
            is_bounded=is_bounded,
            skips_to_snapshot=skips,
            limits=limits,
        )

    try:
        return plan(skips_to_snapshot)
    except WatermarkGap as gap:
        if not in_order or skips_to_snapshot:
            raise
        found = plan(True)
        return found if watermark is None else found.after_left_out(watermark.lsn, gap)


def _describe(
    zone: RawZone, table: OpenedTable, snapshot: Snapshot | None, relations: SourceRelations
) -> RelationVersion | None:
    """Find the relation version of the plan's snapshot; None without a snapshot.

    Raises:
        RawZoneError: raw/relations does not have it.
    """
    found = None if snapshot is None else relations.snapshot_version(snapshot)
    if snapshot is not None and found is None:
        name = table.target.qualified_name
        raise zone.relations.missing_error(name, snapshot.relation_version)
    return found


def _names(table: OpenedTable, relations: Callable[[int], SourceRelations]) -> Names:
    known = table.relation_id
    own = () if known is None else (known,)
    return lambda epoch: relations(epoch).names(table.target.name, own)


def _newest_snapshot_lsn(plan: Plan, own: Sequence[Snapshot]) -> Lsn:
    """Return the LSN of the table's newest snapshot in the plan's epoch; 0 without a snapshot."""
    lsns = [snapshot.snapshot_lsn for snapshot in own if snapshot.epoch == plan.epoch]
    return max(lsns, default=Lsn(0))


def _with_stats(
    zone: RawZone,
    tasks: Sequence[MergeTask],
    relations: Callable[[int], SourceRelations],
    keyless: Mapping[TableName, Relation],
    *,
    is_bounded: bool,
) -> Iterator[MergeTask]:
    """Add the statistics of the changes; a step ends before changes that cannot be folded.

    Args:
        keyless: the relations of tables whose newest snapshot has no key.
        is_bounded: the tables are folded again, so missing changes are counted only.
    """
    ranges: dict[LsnWindow, set[FollowedTable]] = {}
    landed: dict[LsnWindow, set[LandedRows]] = {}
    for task in tasks:
        if task.plan.landed is not None:
            ranges.setdefault(_range(task.plan), set()).add(task.followed)
            landed.setdefault(_range(task.plan), set()).add(task.plan.landed)
    counted_in = zone.changes.table.newest() if ranges and not is_bounded else None
    (stats, row_counts), unreadable = _read_stats(zone, ranges, landed)
    for task in tasks:
        if task.blocked_by is not None:
            yield task
            continue
        if task.plan.partial is not None:
            yield _of_partial(task, task.plan.partial)
            continue
        error = unreadable.get(_range(task.plan))
        if error is not None and task.plan.recorded_changes:
            unreadable_file = unreadable_error(zone, task.plan, error)
            yield replace(task, stats=ChangeStats(), blocked_by=unreadable_file)
            continue
        rows = task.plan.landed
        if rows is not None and (count := row_counts.get(rows, 0)) != rows.row_count:
            if not is_bounded:
                miscount = miscount_error(zone, task.plan, rows, count)
                yield replace(task, stats=ChangeStats(), blocked_by=miscount)
                continue
            task = replace(task, changes_missing=max(rows.row_count - count, 0))
        found = stats.get((_range(task.plan), task.followed))
        if found is None:
            yield task
            continue
        doubt = _find_doubt(task, found, relations(task.plan.epoch))
        if doubt is not None:
            end = Lsn(doubt.lsn - 1)
            if end <= task.plan.start:
                refusal = doubt.error(task.name)
                target, relation = task.plan.target, keyless.get(task.name)
                if doubt.key and relation is not None and target.schema_policy != FOLLOW:
                    # Otherwise the change is recorded, and the next attempt stops before it.
                    refusal = no_key_error(target, task.scd, relation)
                yield replace(task, stats=found, blocked_by=refusal)
                continue
            # Fold what is certain. The next step begins at the change that is not.
            task = replace(task, plan=replace(task.plan, end=end, is_last=False))
            within = LsnWindow(task.plan.epoch, min(task.plan.first_change, end), end)
            before = read_change_stats(zone, {within: [task.followed]})
            found = before.stats.get((within, task.followed))
            if found is None:
                yield task
                continue
        order = versions_in_order(zone, _range(task.plan), task.followed.relation_id, found)
        yield replace(task, stats=found, version_order=tuple(order), counted_in=counted_in)


def _read_stats(
    zone: RawZone,
    ranges: Mapping[LsnWindow, Collection[FollowedTable]],
    landed: Mapping[LsnWindow, Collection[LandedRows]],
) -> tuple[ReadChanges, dict[LsnWindow, UnreadableFile]]:
    """Count the changes of tables in their ranges.

    Args:
        landed: the landed rows of each range, which are counted again.

    Returns:
        The statistics, and the errors of the ranges that cannot be read.
    """
    with suppress(UnreadableFile):
        return read_change_stats(zone, ranges, set(chain(*landed.values()))), {}
    read = ReadChanges({}, {})
    unreadable: dict[LsnWindow, UnreadableFile] = {}
    for within, tables in ranges.items():
        try:
            stats, row_counts = read_change_stats(zone, {within: tables}, landed[within])
        except UnreadableFile as error:
            unreadable[within] = error
        else:
            read.stats.update(stats)
            read.row_counts.update(row_counts)
    return read, unreadable


def _of_partial(task: MergeTask, snapshot: Snapshot) -> MergeTask:
    """Return the task with the rows of its partial snapshot as its changes."""
    if snapshot.relation_id != task.followed.relation_id:
        reason = "the table was dropped and created again"
        doubt = SchemaChangeError(relation=str(task.name), column="(all)", reason=reason)
        return replace(task, blocked_by=doubt)
    stats = count_snapshot_rows(snapshot)
    return replace(task, stats=stats, version_order=(snapshot.relation_version,))


def _find_doubt(task: MergeTask, stats: ChangeStats, relations: SourceRelations) -> Doubt | None:
    """Find the first change that cannot be folded."""
    target = task.plan.target
    doubts = [
        find_doubt(task.followed, stats, relations, task.plan.start),
        find_unidentified(stats, task.relations),
    ]
    if target.needs_key(task.scd):
        doubts.append(find_lost_key(target, stored_key(task.state), stats, task.relations))
    return min(filter(None, doubts), key=lambda doubt: doubt.lsn, default=None)


def _range(plan: Plan) -> LsnWindow:
    return LsnWindow(plan.epoch, plan.first_change, plan.end)
