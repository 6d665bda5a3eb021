"""What a merge has to fold: decided from watermarks, copies and windows, without touching a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pgcdc_assets.errors import SnapshotNeeded, WatermarkGap
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge.report import TableTarget
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.raw.summary import WindowSummary

Landed = Callable[[int], Sequence[WindowSummary]]


@dataclass(frozen=True)
class Plan:
    """What is to be folded into one SCD table.

    Attributes:
        start: changes of the epoch with commit_lsn >= start are to be folded ...
        end: ... that have commit_lsn < end. Equal to start when there is nothing.
        copy: the copy that replaces the contents first; None without one.
        windows: the windows that the range crosses.
        recorded_changes: changes of the table in these windows by the commits' own records.
        first_change: no change of the range stands before this.
        is_last: nothing that was asked for comes after this.
    """

    target: TableTarget
    epoch: int
    start: Lsn
    end: Lsn
    copy: Copy | None
    windows: tuple[LsnWindow, ...]
    recorded_changes: int
    first_change: Lsn
    is_last: bool = True


def plan_merge(
    target: TableTarget,
    watermark: tuple[int, Lsn] | None,
    copies: Sequence[Copy],
    landed: Landed,
    through: LsnWindow,
    *,
    in_order: bool = False,
    is_bounded: bool = False,
    skips_to_copy: bool = False,
) -> Plan:
    """Decide what is to be folded into a table, or what first.

    Args:
        watermark: the table's own; None before its first merge.
        copies: the complete copies of the raw zone; for a table without a watermark only those
            after which nothing was removed.
        landed: gives the landed windows of an epoch in stream order.
        in_order: the table keeps history: every copy between the watermark and `through` is a step
            of its own, after the changes before it. Otherwise the newest copy replaces whatever
            came before.
        is_bounded: copies above `through` are none of this merge's business.
        skips_to_copy: what lies between the watermark and the next copy cannot be folded.

    Raises:
        MergeConflict: the table has no copy to begin with.
        WatermarkGap: windows between the watermark and `through` are missing.
    """
    name = target.qualified_name
    # History before a copy is folded first, and may not be captured yet.
    waits = is_bounded or (in_order and watermark is not None)
    usable = _usable_copies(
        target, watermark, copies, through if waits else None, begins_epoch=not is_bounded
    )
    if not usable and watermark is None:
        raise SnapshotNeeded(table=name, reason="it has no complete copy with all changes after it")
    if in_order and usable:
        return _plan_step(target, watermark, usable, landed, through, skips_to_copy)
    copy = usable[-1] if usable else None
    epoch, start = (copy.epoch, copy.snapshot_lsn) if copy is not None else _known(watermark)
    if epoch < through.epoch:
        raise _no_copy_of_epoch(target, epoch, through.epoch)
    end = through.end if epoch == through.epoch else start
    return _plan_range(target, epoch, start, end, copy, landed(epoch) if end > start else ())


def _no_copy_of_epoch(target: TableTarget, last: int, epoch: int) -> SnapshotNeeded:
    return SnapshotNeeded(
        table=target.qualified_name,
        reason=f"epoch {epoch} of the slot has no copy of it, and what happened after epoch {last} "
        "is not in the raw zone",
    )


def _usable_copies(
    target: TableTarget,
    watermark: tuple[int, Lsn] | None,
    copies: Sequence[Copy],
    through: LsnWindow | None,
    *,
    begins_epoch: bool,
) -> list[Copy]:
    """List the table's copies above its watermark, oldest first.

    Args:
        through: leave out copies above its end; None: leave out none.
        begins_epoch: keep the first copy of `through`'s epoch all the same, if the table is not in
            that epoch yet: nothing that it has to fold before that copy lies in the epoch.
    """
    own = sorted(
        (
            copy
            for copy in copies
            if (copy.schema, copy.table) == (target.schema, target.table)
            and (watermark is None or (copy.epoch, copy.snapshot_lsn) > watermark)
        ),
        key=lambda copy: (copy.epoch, copy.snapshot_lsn),
    )
    if through is None:
        return own
    usable = [c for c in own if (c.epoch, c.snapshot_lsn) <= (through.epoch, through.end)]
    if begins_epoch and (watermark is None or watermark[0] < through.epoch):
        first = next((copy for copy in own if copy.epoch == through.epoch), None)
        if first is not None and first not in usable:
            usable.append(first)
    return usable


def _plan_step(
    target: TableTarget,
    watermark: tuple[int, Lsn] | None,
    copies: Sequence[Copy],
    landed: Landed,
    through: LsnWindow,
    skips_to_copy: bool,
) -> Plan:
    """Plan the changes before the next copy, or that copy and the changes after it."""
    first = copies[0]
    if watermark is not None and not skips_to_copy:
        epoch, start = watermark
        end = _end_of(epoch, first, landed, through)
        if end > start:
            step = _plan_range(target, epoch, start, end, None, landed(epoch))
            return replace(step, is_last=False)
    following = copies[1] if len(copies) > 1 else None
    if following is None and first.epoch < through.epoch:
        raise _no_copy_of_epoch(target, first.epoch, through.epoch)
    end = _end_of(first.epoch, following, landed, through)
    step = _plan_range(target, first.epoch, first.snapshot_lsn, end, first, landed(first.epoch))
    return replace(step, is_last=following is None)


def _end_of(epoch: int, following: Copy | None, landed: Landed, through: LsnWindow) -> Lsn:
    """Say how far the changes of an epoch go until the next copy takes over.

    That is one byte short of the copy: a watermark at its LSN would say that it is in the table. No
    commit record is left out by that, because records begin at multiples of eight (MAXALIGN in
    Postgres's src/include/access/xlogrecord.h).
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
    target: TableTarget,
    epoch: int,
    start: Lsn,
    end: Lsn,
    copy: Copy | None,
    windows: Sequence[WindowSummary],
) -> Plan:
    if end <= start:
        return Plan(target, epoch, start, start, copy, (), 0, start)
    name = target.qualified_name
    crossed = [w for w in windows if start < w.window.end and w.window.start < end]
    _check_contiguity(name, start, crossed, end)
    changed = [w for w in crossed if w.counts.get(name)]
    return Plan(
        target,
        epoch,
        start,
        end,
        copy,
        windows=tuple(w.window for w in crossed),
        recorded_changes=sum(sum(w.counts[name].values()) for w in changed),
        # After a quiet time this is far above the start, and equal for all tables of a run.
        first_change=max(start, changed[0].window.start) if changed else start,
    )


def _known(watermark: tuple[int, Lsn] | None) -> tuple[int, Lsn]:
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
