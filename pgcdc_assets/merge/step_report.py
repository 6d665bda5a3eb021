"""The part of a step's report that its task determines, however the step is merged."""

from __future__ import annotations

from pgcdc_assets.merge.report import MergeReport
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.table_name import TableName


def begin_report(task: MergeTask) -> MergeReport:
    """Return the report of a step without the counts of rows and the time."""
    plan, stats = task.plan, task.stats
    return MergeReport(
        *task.name,
        task.scd,
        task.path,
        watermark_before=task.watermark_before,
        watermark_after=plan.end,
        steps=1,
        windows_folded=len(plan.windows),
        changes_read=stats.change_count if stats is not None else 0,
        changes_missing=task.changes_missing,
        snapshot_lsn=plan.snapshot.snapshot_lsn if plan.snapshot is not None else None,
        is_remade=task.is_remade,
        left_out=plan.left_out,
        waits_for=task.waits_for,
        source_name=_source_name(task),
        names=frozenset(stats.names) if stats is not None else frozenset(),
    )


def _source_name(task: MergeTask) -> TableName | None:
    """Return the name of a table at the source in the newest change or snapshot that was folded."""
    if task.version_order:
        number = task.version_order[-1]
        return next((v.relation.name for v in task.relations if v.version == number), None)
    return None if task.snapshot_version is None else task.snapshot_version.relation.name
