"""The plan of a merge, computed from watermarks, snapshots and windows without reading a row."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from pgcdc_assets.errors import PgcdcError, SnapshotError, SnapshotNeeded, WatermarkGap
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.raw.delta.sizes import RowGroup
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.windows.rows import LandedRows
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import StepLimit
from pgcdc_assets.table_name import TableName

Landed = Callable[[int], Sequence[WindowSummary]]
Sizes = Callable[[int, Lsn, Lsn], Sequence[RowGroup]]
Names = Callable[[int], Collection[TableName]]

# Text in WAL is compressed to 1/255 at best (by lz4): below so many bytes it is less than 32 MB.
_SMALL_BYTES = 128 * 1024


@dataclass(frozen=True)
class Limits:
    """The bounds of a merge's step.

    Attributes:
        sizes: returns the row groups of raw/changes in a range of an epoch; None: sizes are
            estimated from the WAL.
        names: returns the names under which the table's changes may be in the windows of an epoch;
            None: the declared name. The names may be too many: their changes are then none.
    """

    step: StepLimit = field(default_factory=StepLimit)
    sizes: Sizes | None = None
    names: Names | None = None

    def names_of(self, target: CdcTable, epoch: int) -> Collection[TableName]:
        """Return the names under which the changes of a table are counted."""
        return (target.name,) if self.names is None else self.names(epoch)


NO_SIZES = Limits()


@dataclass(frozen=True)
class Plan:
    """The snapshot and the changes to be folded into one SCD table.

    Attributes:
        start: changes with start <= commit_lsn < end are folded.
        end: see `start`; equal to `start` without changes.
        snapshot: the snapshot that is applied first; None without a snapshot.
        partial: the partial snapshot that is the whole step; None without one.
        windows: the windows that overlap the range.
        recorded_changes: changes of the table in these windows, by the summaries of the windows;
            for a renamed table at most so many.
        change_bytes: approximate size of these changes as text.
        first_change: the changes of the range begin at this LSN or later.
        landed: the rows that were landed in these windows under the table's names, from the first
            window with such rows on; None without changes.
        is_last: no step follows.
        left_out: a sentence about changes before the snapshot that cannot be folded; empty without
            such changes.
    """

    target: CdcTable
    epoch: int
    start: Lsn
    end: Lsn
    snapshot: Snapshot | None
    windows: tuple[LsnWindow, ...]
    recorded_changes: int
    change_bytes: int
    first_change: Lsn
    is_last: bool = True
    partial: Snapshot | None = None
    left_out: str = ""
    landed: LandedRows | None = None

    def after_left_out(self, start: Lsn, reason: PgcdcError) -> Plan:
        """Return the plan of a history that continues with the snapshot for the reason.

        Args:
            start: of the changes before the snapshot that cannot be folded.
        """
        cause = str(reason)
        if isinstance(reason, SnapshotError):
            # Its remedy is the snapshot, which was taken.
            cause = cause.removesuffix(reason.remedy).rstrip()
        sentence = (
            f"The changes from {start} to {self.start} could not be merged. The snapshot at "
            f"{self.start} has their results, but the table has no versions of them: {cause}"
        )
        return replace(self, left_out=sentence)


def plan_merge(
    target: CdcTable,
    watermark: Position | None,
    snapshots: Sequence[Snapshot],
    landed: Landed,
    through: LsnWindow,
    *,
    partial: Sequence[Snapshot] = (),
    in_order: bool = False,
    is_bounded: bool = False,
    skips_to_snapshot: bool = False,
    limits: Limits = NO_SIZES,
) -> Plan:
    """Plan the next step of a table's merge.

    Args:
        watermark: of the table; None before the first merge.
        snapshots: the complete snapshots of the raw zone; for a table without a watermark only
            those after which nothing was removed.
        landed: returns the landed windows of an epoch in stream order.
        partial: the partial snapshots of the raw zone; each is a step of its own, after the changes
            before it.
        in_order: the table keeps history: every snapshot between the watermark and `through` is a
            step of its own, after the changes before it. Otherwise the newest snapshot replaces
            whatever came before.
        is_bounded: ignore snapshots above `through`.
        skips_to_snapshot: ignore the changes before the next snapshot, which cannot be folded.
        limits: of the step; later changes are left to the next step.

    A table without a snapshot of the epoch of `through` is merged through the end of its epoch.

    Raises:
        MergeConflict: the table has no usable snapshot.
        WatermarkGap: windows between the watermark and `through` are missing.
    """
    name = target.qualified_name
    # The changes before a snapshot are folded first, and may not be captured yet.
    waits = is_bounded or (in_order and watermark is not None)
    usable = _usable_snapshots(
        target, watermark, snapshots, through if waits else None, begins_epoch=not is_bounded
    )
    if not usable and watermark is None:
        raise SnapshotNeeded(
            table=name, reason="it has no complete snapshot with all changes after it"
        )
    if not in_order:
        usable = usable[-1:]
    found = _usable_partials(target, watermark, usable, partial, through)
    if found or (in_order and usable):
        skips = bool(usable) if not in_order else skips_to_snapshot and bool(usable)
        if skips:
            found = [each for each in found if each.position > usable[0].position]
        steps = sorted([*usable, *found], key=lambda snapshot: snapshot.position)
        return _plan_step(target, watermark, steps, found, landed, through, skips, limits)
    snapshot = usable[-1] if usable else None
    epoch, start = snapshot.position if snapshot is not None else _known(watermark)
    if epoch < through.epoch:
        rest = None if is_bounded or watermark is None else landed(epoch)
        if rest and rest[-1].window.end > start:
            # A table that left the publication gets no snapshot of the next epoch.
            step = _plan_range(target, epoch, start, rest[-1].window.end, snapshot, rest, limits)
            if step.recorded_changes:
                return step
        raise _no_snapshot_of_epoch(target, epoch, through.epoch)
    end = through.end if epoch == through.epoch else start
    windows = landed(epoch) if end > start else ()
    return _plan_range(target, epoch, start, end, snapshot, windows, limits)


def _no_snapshot_of_epoch(target: CdcTable, last: int, epoch: int) -> SnapshotNeeded:
    return SnapshotNeeded(table=target.qualified_name, reason=explain_end_of_epoch(last, epoch))


def explain_end_of_epoch(last: int, epoch: int) -> str:
    """Return why a table is not merged beyond its epoch."""
    return (
        f"epoch {epoch} of the slot has no snapshot of the table, and the changes after epoch "
        f"{last} are not in the raw zone"
    )


def _usable_snapshots(
    target: CdcTable,
    watermark: Position | None,
    snapshots: Sequence[Snapshot],
    through: LsnWindow | None,
    *,
    begins_epoch: bool,
) -> list[Snapshot]:
    """List the table's snapshots above its watermark, oldest first.

    Args:
        through: ignore snapshots above its end; None: ignore no snapshot.
        begins_epoch: keep the first snapshot of `through`'s epoch all the same, if the table is not
            in that epoch yet: the epoch has no changes to fold before that snapshot.
    """
    own = sorted(
        (
            snapshot
            for snapshot in snapshots
            if snapshot.name == target.name and (watermark is None or snapshot.position > watermark)
        ),
        key=lambda snapshot: snapshot.position,
    )
    if through is None:
        return own
    usable = [c for c in own if c.position <= through.end_position]
    if begins_epoch and (watermark is None or watermark.epoch < through.epoch):
        first = next((snapshot for snapshot in own if snapshot.epoch == through.epoch), None)
        if first is not None and first not in usable:
            usable.append(first)
    return usable


def _usable_partials(
    target: CdcTable,
    watermark: Position | None,
    usable: Sequence[Snapshot],
    partial: Sequence[Snapshot],
    through: LsnWindow,
) -> list[Snapshot]:
    """List the table's partial snapshots above its watermark.

    A partial snapshot needs the table as of its LSN: a table in its epoch, or an earlier usable
    snapshot of its epoch.
    """
    bases = [snapshot.position for snapshot in usable]
    bases += [] if watermark is None else [watermark]
    return [
        each
        for each in partial
        if each.name == target.name
        and (watermark is None or each.position > watermark)
        and each.position <= through.end_position
        and any(base.epoch == each.epoch and base < each.position for base in bases)
    ]


def _plan_step(
    target: CdcTable,
    watermark: Position | None,
    snapshots: Sequence[Snapshot],
    partial: Sequence[Snapshot],
    landed: Landed,
    through: LsnWindow,
    skips_to_snapshot: bool,
    limits: Limits,
) -> Plan:
    """Plan the changes before the next snapshot, or that snapshot and the changes after it.

    A partial snapshot is a step without the changes after it.
    """
    first = snapshots[0]
    if watermark is not None and not skips_to_snapshot:
        epoch, start = watermark
        end = _end_of(epoch, first, landed, through)
        if end > start:
            step = _plan_range(target, epoch, start, end, None, landed(epoch), limits)
            return replace(step, is_last=False)
    if first in partial:
        epoch, lsn = first.position
        step = Plan(target, epoch, lsn, lsn, None, (), 0, 0, lsn)
        return replace(step, partial=first, is_last=False)
    following = snapshots[1] if len(snapshots) > 1 else None
    if following is None and first.epoch < through.epoch:
        raise _no_snapshot_of_epoch(target, first.epoch, through.epoch)
    end = _end_of(first.epoch, following, landed, through)
    windows = landed(first.epoch)
    step = _plan_range(target, first.epoch, first.snapshot_lsn, end, first, windows, limits)
    return replace(step, is_last=step.is_last and following is None)


def _end_of(epoch: int, following: Snapshot | None, landed: Landed, through: LsnWindow) -> Lsn:
    """Return the end of the changes of an epoch before the next snapshot.

    The end is one byte before the LSN of the snapshot: a watermark at that LSN would mean that the
    snapshot is in the table. No commit record is skipped, because records begin at multiples of
    eight (MAXALIGN in Postgres's src/include/access/xlogrecord.h).
    """
    if following is not None and following.epoch == epoch:
        end = Lsn(following.snapshot_lsn - 1)
    elif epoch < through.epoch:
        windows = landed(epoch)
        return windows[-1].window.end if windows else Lsn(0)
    else:
        end = through.end
    return min(end, through.end) if epoch == through.epoch else end


def _plan_range(
    target: CdcTable,
    epoch: int,
    start: Lsn,
    end: Lsn,
    snapshot: Snapshot | None,
    windows: Sequence[WindowSummary],
    limits: Limits,
) -> Plan:
    """Plan the changes of a range up to the limits of a step."""
    if end <= start:
        return Plan(target, epoch, start, start, snapshot, (), 0, 0, start)
    names = limits.names_of(target, epoch)
    crossed = [w for w in windows if start < w.window.end and w.window.start < end]
    _check_contiguity(target.qualified_name, start, crossed, end)
    changed = [w for w in crossed if w.count_changes(names)]
    count, size = _fit(names, epoch, changed, limits)
    is_last = count == len(changed)
    if not is_last:
        # Windows without changes are free, so the step ends at the next window with changes.
        end = changed[count].window.start
        crossed = [w for w in crossed if w.window.start < end]
        changed = changed[:count]
    recorded = sum(w.count_changes(names) for w in changed)
    landed = None
    if changed:
        # The idle windows at the end have no rows, and the ends of more tables are equal with them.
        within = LsnWindow(epoch, changed[0].window.start, crossed[-1].window.end)
        landed = LandedRows(within, frozenset(names), recorded)
    return Plan(
        target,
        epoch,
        start,
        end,
        snapshot,
        windows=tuple(w.window for w in crossed),
        recorded_changes=recorded,
        change_bytes=size,
        # After idle windows this is far above the start, and equal for all tables of a run.
        first_change=max(start, changed[0].window.start) if changed else start,
        is_last=is_last,
        landed=landed,
    )


def _fit(
    names: Collection[TableName], epoch: int, changed: Sequence[WindowSummary], limits: Limits
) -> tuple[int, int]:
    """Return the number of windows that fit into a step, at least one, and their bytes."""
    limit = limits.step
    count = _prefix([w.count_changes(names) for w in changed], limit.changes)
    changed = changed[:count]
    sizes = [_share_of_wal(names, w) for w in changed]
    if limits.sizes is not None and sum(w.window.size_bytes for w in changed) > _SMALL_BYTES:
        groups = limits.sizes(epoch, changed[0].window.start, changed[-1].window.end)
        stored = _stored_bytes(names, changed, groups)
        # Parquet stores a repeated value once, and WAL has out-of-line values compressed.
        sizes = [max(pair) for pair in zip(sizes, stored, strict=True)]
    count = _prefix(sizes, limit.bytes)
    return count, sum(sizes[:count])


def _prefix(amounts: Sequence[int], limit: int) -> int:
    """Return how many of the first amounts fit into the limit together, at least one."""
    total = 0
    for index, amount in enumerate(amounts):
        total += amount
        if total > limit and index:
            return index
    return len(amounts)


def _share_of_wal(names: Collection[TableName], summary: WindowSummary) -> int:
    changes, rows = summary.count_changes(names), summary.row_count
    return summary.window.size_bytes * changes // max(changes, rows)


def _stored_bytes(
    names: Collection[TableName], changed: Sequence[WindowSummary], groups: Sequence[RowGroup]
) -> list[int]:
    """Divide the bytes of the table's row groups among windows by the numbers of changes."""
    starts = [w.window.start for w in changed]
    ends = [w.window.end for w in changed]
    sizes = [0] * len(changed)
    for group in groups:
        if not any(map(group.may_hold, names)):
            continue
        held = range(bisect_right(ends, group.lsns[0]), bisect_left(starts, group.lsns[1] + 1))
        changes = sum(changed[index].count_changes(names) for index in held)
        if group.lsns[0] < starts[0] or group.lsns[1] >= ends[-1]:
            # A compacted row group also has the changes of windows that the step does not merge.
            changes = max(changes, group.row_count)
        for index in held:
            sizes[index] += group.size_bytes * changed[index].count_changes(names) // changes
    return sizes


def _known(watermark: Position | None) -> Position:
    assert watermark is not None
    return watermark


def _check_contiguity(name: str, start: Lsn, crossed: Sequence[WindowSummary], end: Lsn) -> None:
    expected = start
    for summary in crossed:
        if summary.window.start > expected:
            raise WatermarkGap(table=name, expected=expected, found=summary.window.start)
        expected = summary.window.end
    if expected < end:
        raise WatermarkGap(table=name, expected=expected, found=end)
