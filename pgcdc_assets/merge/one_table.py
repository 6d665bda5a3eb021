"""The merge of one SCD table, from its copy or its watermark on."""

from __future__ import annotations

import time

from pyspark.sql import SparkSession

from pgcdc_assets.merge.kinds.base import Counts
from pgcdc_assets.merge.kinds.choose import choose_kind
from pgcdc_assets.merge.report import MergeReport
from pgcdc_assets.merge.task import TableWork
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.spark.tuning import tune
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.state import (
    TargetState,
    advance_watermark,
    check_unmoved,
    finish_step,
    next_step,
    overtaken,
    read_target,
    settle,
)

# How far the recorded watermark of a table without changes may fall behind: its next merge looks
# through the records of that many windows.
IDLE_WINDOWS = 10

_POSITION = {1: "_lsn", 2: "_valid_from_lsn"}


def pass_by(zone: RawZone, work: TableWork) -> MergeReport:
    """Report a table without changes; its watermark is recorded only now and then."""
    plan = work.plan
    if plan.end > plan.start and (plan.recorded_changes or len(plan.windows) >= IDLE_WINDOWS):
        _advance(zone, work)
    elif work.state is not None and not work.state.is_settled:
        settle(zone, work.path)
    return MergeReport(
        *work.name,
        work.scd,
        work.path,
        watermark_before=work.watermark_before,
        watermark_after=plan.end,
        windows_folded=len(plan.windows),
        row_count=work.state.row_count if work.state is not None else None,
        seconds=time.monotonic() - work.started,
    )


def merge_table(spark: SparkSession, zone: RawZone, work: TableWork) -> MergeReport:
    """Apply the copy, if one is due, and then the changes; at most one commit each.

    Args:
        spark: a session that nobody else uses meanwhile.

    Raises:
        DefiniteError: what the raw zone holds cannot be folded into this table.
        TransientError: another merge of the table was faster.
    """
    started = time.monotonic()
    plan, state = work.plan, work.state
    counts = Counts()
    target_bytes = state.size_bytes if state is not None else 0
    tune(
        spark, _rows_to_handle(work), target_bytes, plan.change_bytes + _compared_bytes(zone, work)
    )
    kind = choose_kind(spark, zone, work)
    if state is not None:
        check_unmoved(zone, work.path, state)
    if plan.copy is not None and not kind.takes_copy_with_changes:
        step = next_step(zone, state, plan.epoch, plan.copy.snapshot_lsn)
        written = kind.apply_copy(state, plan.copy, step)
        before, state = state, _finish(zone, work, step)
        counts += written.counted(before, state)
        if state.watermark != step.position:
            raise overtaken(work.path)
    if work.facts is not None:
        step = next_step(zone, state, plan.epoch, plan.end)
        written = kind.apply_changes(state, step)
        before, state = state, _finish(zone, work, step)
        counts += written.counted(before, state)
    elif plan.end > plan.start:
        _advance(zone, work)
    assert state is not None
    return MergeReport(
        *work.name,
        work.scd,
        work.path,
        watermark_before=work.watermark_before,
        watermark_after=plan.end,
        steps=1,
        windows_folded=len(plan.windows),
        changes_read=work.facts.change_count if work.facts is not None else 0,
        rows_inserted=counts.inserted or 0,
        rows_updated=counts.updated,
        rows_deleted=counts.deleted,
        rows_rescued=_count_rescued(spark, work, state) if counts.may_be_rescued else 0,
        columns_filled=tuple(kind.filled),
        snapshot_lsn=plan.copy.snapshot_lsn if plan.copy is not None else None,
        row_count=state.row_count,
        seconds=time.monotonic() - started,
    )


def _compared_bytes(zone: RawZone, work: TableWork) -> int:
    """Count the bytes of a copy that a shuffle compares with the table's rows, and of these rows.

    They are taken to be as many as the copy's. Where the copy replaces the rows, none is compared.
    """
    plan = work.plan
    if plan.copy is None or work.state is None or not plan.target.keeps_history(work.scd):
        return 0
    return 2 * zone.snapshots.size_bytes(plan.copy)


def _rows_to_handle(work: TableWork) -> int:
    copied = work.plan.copy.row_count if work.plan.copy is not None else 0
    return copied + (work.facts.change_count if work.facts is not None else 0)


def _finish(zone: RawZone, work: TableWork, step: Step) -> TargetState:
    """Check and record a write, and read the table's state after it."""
    finish_step(zone, work.path, step)
    state = read_target(zone.lake, zone.name, work.path)
    assert state is not None
    return state


def _advance(zone: RawZone, work: TableWork) -> None:
    """Record that a table is folded through the plan's end without a change."""
    plan = work.plan
    advance_watermark(zone, work.path, (plan.epoch, plan.start), (plan.epoch, plan.end))


def _count_rescued(spark: SparkSession, work: TableWork, state: TargetState) -> int:
    """Count the rows written by this merge that have a rescued value.

    Where the new files' statistics say that there is none, which is the rule, nothing is read.
    """
    known = work.state.rescued if work.state is not None else {}
    if not any(count != 0 for path, count in state.rescued.items() if path not in known):
        return 0
    row = spark.sql(
        f"SELECT count(*) AS n FROM {delta_table(work.path)} "
        f"WHERE _rescued IS NOT NULL AND {_POSITION[work.scd]} >= {int(work.plan.start)}"
    ).collect()[0]
    return int(row["n"])
