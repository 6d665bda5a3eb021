"""Merge the tables of a publication: plan, count the changes, then fold several side by side.

Each table is folded from its own watermark, so retries, skipped runs and ranges converge. The error
of a table is returned as a `MergeFailure`, and the other tables are merged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.activity import activity
from pgcdc_assets.errors import (
    DefiniteError,
    MergeConflict,
    TableRefused,
)
from pgcdc_assets.lsn import LsnWindow, Position
from pgcdc_assets.merge.batch.run import SmallMerges
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.merge.column_changes import finish_clustering
from pgcdc_assets.merge.comments import find_changes, follow_comments
from pgcdc_assets.merge.failures import guarded
from pgcdc_assets.merge.idle_tables import needs_spark_to_advance, report_idle_tables
from pgcdc_assets.merge.kinds.base import Counts
from pgcdc_assets.merge.kinds.choose import choose_small_kind, choose_table_kind
from pgcdc_assets.merge.report import MergeFailure, MergeReport
from pgcdc_assets.merge.step_report import begin_report
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import StepLimit
from pgcdc_assets.spark.session import activate, own_sessions
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.spark.tuning import tune
from pgcdc_assets.tables.columns import LSN, VALID_FROM_LSN
from pgcdc_assets.tables.compaction import compact_small_files
from pgcdc_assets.tables.spark_watermarks import advance_by_spark
from pgcdc_assets.tables.state import (
    ScdState,
    advance_watermark,
    check_not_overtaken,
    finish_step,
    next_step,
    overtaken_error,
)

# How long a canceled query may take to end before the session is asked again.
_SECONDS_TO_CANCEL = 0.2
_POSITION = {1: LSN, 2: VALID_FROM_LSN}


def merge_tables(
    spark: SparkSession,
    zone: RawZone,
    targets: Sequence[CdcTable],
    through: LsnWindow,
    *,
    parallelism: int = 2,
    root: str | None = None,
    sessions: Sequence[SparkSession] | None = None,
    limit: StepLimit | None = None,
) -> Iterator[MergeReport | MergeFailure]:
    """Fold each table from its own watermark through the window's end; yield each outcome.

    Args:
        through: a window whose end is the end of the merge; the end may be inside a captured
            window.
        parallelism: tables that are merged side by side.
        root: the address of a folder in place of the capture's folder, for the SCD tables.
        sessions: one for each parallel table, opened by `own_sessions` and used by this call alone,
            for callers that merge repeatedly. A session of a server costs about twenty requests.
        limit: of one commit; further commits fold the remaining changes.
    """
    busy: list[MergeTask] = []
    idle: list[MergeTask] = []
    for task in build_tasks(zone, targets, through, root, limit=limit):
        if isinstance(task, MergeFailure):
            yield task
        elif (
            task.is_idle
            and find_changes(task) is None
            and not needs_spark_to_advance(task, len(targets))
        ):
            idle.append(task)
        else:
            busy.append(task)
    yield from report_idle_tables(zone, idle, len(targets))
    if busy:
        count = min(parallelism, len(busy))
        given = None if sessions is None else nullcontext(list(sessions[:count]))
        with given or own_sessions(spark, count) as opened:
            merge = _Merge(zone, through, root, limit)
            rest: list[_Begun] = []
            yield from _merge_small_tables(opened[0], busy, merge, count, rest)
            if rest:
                yield from _merge_in_threads(opened, rest, merge)


@dataclass(frozen=True)
class _Begun:
    """A step that Spark has to merge.

    Attributes:
        reason: as of `LeftMerge`.
        report: of the steps of the table before it.
    """

    task: MergeTask
    reason: str
    report: MergeReport | None = None


@dataclass(frozen=True)
class _Merge:
    """The arguments that all tables of one call share."""

    zone: RawZone
    through: LsnWindow
    root: str | None
    limit: StepLimit | None

    def run(self, spark: SparkSession, begun: _Begun) -> MergeReport | MergeFailure:
        """Merge one table in steps, each up to the limit or up to the next snapshot."""
        outcome = self._run_steps(spark, begun)
        if isinstance(outcome, MergeReport):
            outcome = replace(outcome, spark_reason=begun.reason)
        return outcome

    def _run_steps(self, spark: SparkSession, begun: _Begun) -> MergeReport | MergeFailure:
        task = begun.task
        outcome = self._step(spark, task)
        if isinstance(outcome, MergeReport) and begun.report is not None:
            outcome = begun.report.followed_by(outcome)
        while isinstance(outcome, MergeReport) and not task.plan.is_last:
            failpoints.reach(failpoints.AFTER_MERGE_STEP)
            following = self.plan_next(task)
            if isinstance(following, MergeFailure):
                return following
            task, report = following, outcome
            outcome = self._step(spark, task)
            if isinstance(outcome, MergeReport):
                outcome = report.followed_by(outcome)
        return outcome

    def _step(self, spark: SparkSession, task: MergeTask) -> MergeReport | MergeFailure:
        """Merge one step; if its changes cannot be folded, continue with the next snapshot.

        A table that keeps the past waits for its owner instead, if its own definition refuses the
        rows: it would lose versions that it can still get.
        """
        outcome = self._merge(spark, task)
        if isinstance(outcome, MergeReport) or task.plan.is_last:
            return outcome
        if not isinstance(outcome.error, DefiniteError):
            return outcome
        keeps_past = task.plan.target.keeps_history(task.scd)
        if keeps_past and isinstance(outcome.error, TableRefused):
            return outcome
        following = self._plan_after_next_snapshot(task)
        if following is None:
            return outcome
        if isinstance(following, MergeFailure):
            return following
        plan = following.plan.after_left_out(task.plan.start, outcome.error)
        return self._merge(spark, replace(following, plan=plan))

    def _merge(self, spark: SparkSession, task: MergeTask) -> MergeReport | MergeFailure:
        return guarded(task, lambda step: merge_table(spark, self.zone, step), spark)

    def _plan_after_next_snapshot(self, task: MergeTask) -> MergeTask | MergeFailure | None:
        """Plan from the next snapshot on; None if there is none, or the table began with one."""
        snapshot = task.plan.snapshot
        if snapshot is None:
            return self.plan_next(task, skips_to_snapshot=True)
        if task.state is not None and task.blocked_by is None:
            return None
        found = self.plan_next(task, skips_to_snapshot=True, after=snapshot.key)
        if isinstance(found, MergeTask) and found.plan.snapshot is None:
            return None
        is_conflict = isinstance(found, MergeFailure) and isinstance(found.error, MergeConflict)
        return None if is_conflict else found

    def plan_next(
        self, task: MergeTask, *, skips_to_snapshot: bool = False, after: str | None = None
    ) -> MergeTask | MergeFailure:
        """Plan the step after a step of a table."""
        target = replace(task.plan.target, scd=(task.scd,))
        (found,) = build_tasks(
            self.zone,
            [target],
            self.through,
            self.root,
            skips_to_snapshot=skips_to_snapshot,
            after=after,
            limit=self.limit,
        )
        return found


def _merge_small_tables(
    spark: SparkSession,
    tasks: Sequence[MergeTask],
    merge: _Merge,
    parallelism: int,
    rest: list[_Begun],
) -> Iterator[MergeReport | MergeFailure]:
    """Merge small tables together, step by step.

    Args:
        spark: a session that no other thread uses at the same time.
        parallelism: tables that are written side by side.
        rest: gets the steps that Spark has to merge.
    """
    reports: dict[str, MergeReport] = {}
    choose_kind = partial(choose_small_kind, spark, merge.zone)
    while tasks:
        small = SmallMerges(spark, merge.zone, choose_kind, parallelism)
        following: list[MergeTask] = []
        for group in small.groups(tasks):
            for task, outcome in small.merge(group):
                before = reports.pop(task.path, None)
                if isinstance(outcome, MergeReport) and before is not None:
                    outcome = before.followed_by(outcome)
                if isinstance(outcome, MergeFailure) or task.plan.is_last:
                    yield outcome
                    continue
                failpoints.reach(failpoints.AFTER_MERGE_STEP)
                planned = merge.plan_next(task)
                if isinstance(planned, MergeFailure):
                    yield planned
                else:
                    reports[task.path] = outcome
                    following.append(planned)
        rest += [
            _Begun(left.task, left.reason, reports.pop(left.task.path, None)) for left in small.left
        ]
        tasks = following


def _merge_in_threads(
    sessions: Sequence[SparkSession], tasks: Sequence[_Begun], merge: _Merge
) -> Iterator[MergeReport | MergeFailure]:
    free: SimpleQueue[SparkSession] = SimpleQueue()
    for session in sessions:
        free.put(session)

    def run(begun: _Begun) -> MergeReport | MergeFailure:
        session, task = free.get(), begun.task
        try:
            activate(session)
            if merge.root is not None:
                # A fold for a comparison or a rebuild, which announce their own activity.
                return guarded(task, lambda _: merge.run(session, begun), session)
            name = f"merge of {task.plan.target.qualified_name} (scd{task.scd})"
            with activity(name, "changes") as shown:
                report = guarded(task, lambda _: merge.run(session, begun), session)
                if isinstance(report, MergeReport):
                    shown.count = report.changes_read
                else:
                    shown.name = f"{name} failed"
                return report
        finally:
            free.put(session)

    with ThreadPoolExecutor(len(sessions), "pgcdc-merge") as pool:
        futures = [pool.submit(run, task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            _interrupt_until_done(sessions, futures)


def _interrupt_until_done(
    sessions: Sequence[SparkSession], futures: Sequence[Future[MergeReport | MergeFailure]]
) -> None:
    """Cancel the queries of merges that are not awaited any more, as after Ctrl-C.

    A merge runs several queries. Each one is canceled when it comes.
    """
    while wait(futures, timeout=0).not_done:
        for session in sessions:
            # The server may be gone, or the query may have ended by itself.
            with suppress(PySparkException, Py4JError, OSError):
                session.interruptAll()
        wait(futures, timeout=_SECONDS_TO_CANCEL)


def merge_table(spark: SparkSession, zone: RawZone, task: MergeTask) -> MergeReport:
    """Apply the snapshot, if there is one, and then the changes; at most one commit each.

    Args:
        spark: a session that no other thread uses at the same time.

    Raises:
        DefiniteError: the changes cannot be folded into this table.
        TransientError: another merge of the table was faster.
    """
    if task.blocked_by is not None:
        raise task.blocked_by
    started = time.monotonic()
    task = follow_comments(spark, zone, task)
    plan, state = task.plan, task.state
    counts = Counts()
    target_bytes = state.size_bytes if state is not None else 0
    tune(spark, task.row_count, target_bytes, plan.change_bytes + task.compared_bytes)
    kind = choose_table_kind(spark, zone, task)
    if state is not None:
        check_not_overtaken(zone, task.path, state)
        finish_clustering(spark, task.path, state.properties)
    if plan.snapshot is not None and not kind.merges_snapshot_with_changes:
        step = next_step(zone, state, plan.epoch, plan.snapshot.snapshot_lsn)
        written = kind.apply_snapshot(state, plan.snapshot, step)
        before, state = state, finish_step(zone, task.path, step)
        counts += written.counted(before, state)
        if state.watermark != step.position:
            raise overtaken_error(task.path)
    if task.stats is not None:
        step = next_step(zone, state, plan.epoch, plan.end)
        written = kind.apply_changes(state, step)
        before, state = state, finish_step(zone, task.path, step)
        counts += written.counted(before, state)
        compact_small_files(spark, task.path, state.files)
    elif plan.end > plan.start:
        before_end, end = Position(plan.epoch, plan.start), Position(plan.epoch, plan.end)
        if not advance_watermark(zone, task.path, before_end, end):
            advance_by_spark(spark, zone, task.path, before_end, end)
    assert state is not None
    return replace(
        begin_report(task),
        rows_inserted=counts.inserted or 0,
        rows_updated=counts.updated,
        rows_deleted=counts.deleted,
        rows_rescued=_count_rescued(spark, task, state) if counts.may_be_rescued else 0,
        columns_filled=tuple(kind.filled),
        row_count=state.row_count,
        version=state.version,
        seconds=time.monotonic() - started,
    )


def _count_rescued(spark: SparkSession, task: MergeTask, state: ScdState) -> int:
    """Count the rows written by this merge that have a rescued value.

    Usually the statistics of the new files show that there is none, and no row is read.
    """
    known = task.state.rescued if task.state is not None else {}
    if not any(count != 0 for path, count in state.rescued.items() if path not in known):
        return 0
    row = spark.sql(
        f"SELECT count(*) AS n FROM {delta_table(task.path)} "
        f"WHERE _rescued IS NOT NULL AND {_POSITION[task.scd]} >= {int(task.plan.start)}"
    ).collect()[0]
    return int(row["n"])
