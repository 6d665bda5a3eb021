"""The tables of a merge without changes: their reports, and when their watermarks are recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from pgcdc_assets.lsn import Position
from pgcdc_assets.merge.failures import guarded
from pgcdc_assets.merge.report import MergeFailure, MergeReport
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.raw.table_threads import map_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.state import advance_watermark, record_watermark

# The recorded watermark of a table without changes may fall behind by this many windows, whose
# records the next merge reads. With hundreds of tables a merge would record more watermarks than
# changes, so the number grows with the tables. Hundreds of tables often fall behind by this number
# at the same merge, which records a few. The others wait, until they are this many times as far
# behind.
IDLE_WINDOWS = 10
TABLES_TO_RECORD = 5
_MOST_TIMES_BEHIND = 4


def needs_spark_to_advance(task: MergeTask, table_count: int) -> bool:
    """Return whether a table without changes is far behind, and may need a commit of Spark.

    delta-rs cannot write the table, or its last commit failed. As long as a watermark is behind,
    retention removes no later window.

    Args:
        table_count: number of tables of the merge.
    """
    if task.state is None or task.state.is_watermark_recorded:
        return False
    return len(task.plan.windows) >= _MOST_TIMES_BEHIND * _idle_windows(table_count)


def _idle_windows(table_count: int) -> int:
    return max(IDLE_WINDOWS, table_count // TABLES_TO_RECORD)


def report_idle_tables(
    zone: RawZone, tasks: Sequence[MergeTask], table_count: int
) -> Iterator[MergeReport | MergeFailure]:
    """Report the tables without changes, and record the watermarks that are furthest behind.

    Args:
        table_count: number of tables of the merge.
    """
    idle_windows = _idle_windows(table_count)
    behind = sorted((task for task in tasks if len(task.plan.windows) >= idle_windows), key=_behind)
    first = {task.path for task in behind[-TABLES_TO_RECORD:]}

    def report(task: MergeTask) -> MergeReport:
        times = 1 if task.path in first else _MOST_TIMES_BEHIND
        return _report_idle(zone, task, times * idle_windows)

    yield from map_tables(zone.lake, tasks, lambda task: guarded(task, report))


def _behind(task: MergeTask) -> int:
    return len(task.plan.windows)


def _report_idle(zone: RawZone, task: MergeTask, idle_windows: int) -> MergeReport:
    """Report a table without changes; not every call records the watermark.

    Args:
        idle_windows: the watermark is recorded if it is this many windows behind.
    """
    plan, has_committed = task.plan, True
    if plan.end > plan.start and (plan.recorded_changes or len(plan.windows) >= idle_windows):
        advance_watermark(
            zone, task.path, Position(plan.epoch, plan.start), Position(plan.epoch, plan.end)
        )
    elif task.state is not None and not task.state.is_watermark_recorded:
        record_watermark(zone, task.path)
    else:
        has_committed = False
    return MergeReport(
        *task.name,
        task.scd,
        task.path,
        watermark_before=task.watermark_before,
        watermark_after=plan.end,
        windows_folded=len(plan.windows),
        row_count=task.state.row_count if task.state is not None else None,
        seconds=time.monotonic() - task.started,
        waits_for=task.waits_for,
        has_committed=has_committed,
    )
