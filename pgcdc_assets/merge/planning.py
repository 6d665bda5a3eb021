"""What a merge has to fold: decided from watermarks, copies and windows, without touching a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgcdc_assets.errors import MergeConflict, WatermarkGap
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge.report import TableTarget
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.raw.summary import WindowSummary


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
    """

    target: TableTarget
    epoch: int
    start: Lsn
    end: Lsn
    copy: Copy | None
    windows: tuple[LsnWindow, ...]
    recorded_changes: int
    first_change: Lsn


def plan_merge(
    target: TableTarget,
    watermark: tuple[int, Lsn] | None,
    copies: Sequence[Copy],
    windows: Sequence[WindowSummary],
    through: LsnWindow,
) -> Plan:
    """Decide what is to be folded into a table.

    Args:
        watermark: the table's own; None before its first merge.
        copies: all complete copies of the raw zone.
        windows: the landed windows of `through`'s epoch in stream order.

    Raises:
        MergeConflict: the table has no copy to begin with.
        WatermarkGap: windows between the watermark and `through` are missing.
    """
    name = target.qualified_name
    copy = max(
        (c for c in copies if (c.schema, c.table) == (target.schema, target.table)),
        key=lambda c: (c.epoch, c.snapshot_lsn),
        default=None,
    )
    if copy is not None and watermark is not None and (copy.epoch, copy.snapshot_lsn) <= watermark:
        copy = None
    if copy is None and watermark is None:
        raise MergeConflict(
            table=name,
            reason="it has no complete copy. Materialise its partition of the snapshot asset.",
        )
    epoch, start = (copy.epoch, copy.snapshot_lsn) if copy is not None else _known(watermark)
    if epoch > through.epoch:
        return Plan(target, epoch, start, start, copy, (), 0, start)
    if epoch < through.epoch:
        raise MergeConflict(
            table=name,
            reason=f"epoch {through.epoch} of the slot has no copy of it, and what happened after "
            f"epoch {epoch} is not in the raw zone. Materialise its partition of the snapshot "
            "asset.",
        )
    if through.end <= start:
        return Plan(target, epoch, start, start, copy, (), 0, start)
    crossed = [w for w in windows if start < w.window.end <= through.end]
    _check_contiguity(name, start, crossed, through)
    changed = [w for w in crossed if w.counts.get(name)]
    return Plan(
        target,
        epoch,
        start,
        through.end,
        copy,
        windows=tuple(w.window for w in crossed),
        recorded_changes=sum(sum(w.counts[name].values()) for w in changed),
        # After a quiet time this is far above the start, and equal for all tables of a run.
        first_change=max(start, changed[0].window.start) if changed else start,
    )


def _known(watermark: tuple[int, Lsn] | None) -> tuple[int, Lsn]:
    assert watermark is not None
    return watermark


def _check_contiguity(
    name: str, start: Lsn, crossed: Sequence[WindowSummary], through: LsnWindow
) -> None:
    expected = start
    for summary in crossed:
        if summary.window.start > expected:
            raise WatermarkGap(table=name, expected=expected, found=summary.window.start)
        expected = summary.window.end
    if expected < through.end:
        raise WatermarkGap(table=name, expected=expected, found=through.end)
