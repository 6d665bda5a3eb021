"""The merge of small tables: read and cast for all of them at once, then write them in threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.merge.batch.casts import Casts
from pgcdc_assets.merge.batch.column_types import arrow_schema
from pgcdc_assets.merge.batch.commit import create_table, read_stored_rows, replace_rows
from pgcdc_assets.merge.batch.contents import Contents
from pgcdc_assets.merge.batch.events import MOST_FILLED_BYTES
from pgcdc_assets.merge.batch.images import fresh_contents, merge_contents
from pgcdc_assets.merge.batch.input import MOST_BYTES, Incomplete, TooLarge, read_input
from pgcdc_assets.merge.batch.latest import event_texts, fold_texts, read_snapshot_texts
from pgcdc_assets.merge.batch.scope import ChooseKind, SmallMerge, find_small_merge
from pgcdc_assets.merge.batch.spark_fallback import (
    CommitConflict,
    LeftMerge,
    NotInScope,
    reason_of,
)
from pgcdc_assets.merge.batch.typed_rows import RequestedRows
from pgcdc_assets.merge.batch.versions import begin_versions, merge_versions
from pgcdc_assets.merge.failures import full_disk_error
from pgcdc_assets.merge.report import MergeFailure, MergeReport
from pgcdc_assets.merge.step_report import begin_report
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.raw.table_threads import thread_count
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.errors import full_disk_of
from pgcdc_assets.spark.tuning import tune
from pgcdc_assets.tables.columns import RESCUED
from pgcdc_assets.tables.fence import read_fence
from pgcdc_assets.tables.state import ScdState, next_step, open_table, overtaken_error

_logger = logging.getLogger(__name__)

# The bound of the changes and snapshots that are in memory at once, beside `MOST_BYTES`.
MOST_ROWS = 50_000

# Tables of an object store that are written at the same time, if the parallelism is not higher. The
# rows of each, up to 64 MB, are in memory at that time.
_STORE_WRITES = 8

# Errors after which Spark merges the table, and explains what is wrong.
_FOR_SPARK = (NotInScope, DeltaError, OSError, pa.ArrowException)

Outcome = MergeReport | MergeFailure


@dataclass(frozen=True)
class _Folded:
    """A merge whose changes are folded, and whose casts are requested."""

    merge: SmallMerge
    copied: RequestedRows | None
    changed: RequestedRows | None


@dataclass
class SmallMerges:
    """Merges tables without a Spark job for each.

    Attributes:
        spark: a session that no other thread uses at the same time.
        parallelism: tables of a local lake that are written side by side; in an object store there
            are more, because their writes wait.
        left: the merges that Spark has to do.
    """

    spark: SparkSession
    zone: RawZone
    choose_kind: ChooseKind
    parallelism: int
    left: list[LeftMerge] = field(default_factory=list)

    def groups(self, tasks: Iterable[MergeTask]) -> Iterator[list[SmallMerge]]:
        """Yield the tasks that are in scope, as many at once as fit into the bounds."""
        group: list[SmallMerge] = []
        rows = size = 0
        for task in tasks:
            try:
                found = find_small_merge(self.zone, task, self.choose_kind)
            except Exception as error:
                # One table must not stop the others. Spark merges it, or explains what is wrong.
                self._leave(task, error)
                continue
            rows += task.row_count
            size += task.plan.change_bytes
            if group and (rows > MOST_ROWS or size > MOST_BYTES):
                yield group
                group, rows, size = [], task.row_count, task.plan.change_bytes
            group.append(found)
        if group:
            yield group

    def merge(self, group: Sequence[SmallMerge]) -> Iterator[tuple[MergeTask, Outcome]]:
        """Merge the tables of a group, and yield each outcome; the others are `left`."""
        started = time.monotonic()
        casts = Casts()
        try:
            folded = list(self._fold(group, casts))
        except TooLarge as error:
            if len(group) == 1:
                self._leave(group[0].task, error)
                return
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                yield from self.merge(half)
            return
        except (Incomplete, PgcdcError, DeltaError, OSError, pa.ArrowException) as error:
            for merge in group:
                self._leave(merge.task, error)
            return
        try:
            if casts.needs_spark:
                tune(self.spark, casts.row_count, 0)
            casts.run(self.spark)
        except (PySparkException, Py4JError, OSError, pa.ArrowException) as error:
            # The texts that Spark cannot read, or its server, are explained by Spark's merge.
            for each in folded:
                self._leave(each.merge.task, error)
            return
        share = (time.monotonic() - started) / max(1, len(folded))
        # Files and commits are written without Python's lock.
        count = thread_count(self.zone.lake, self.parallelism, _STORE_WRITES)
        pool = ThreadPoolExecutor(count, "pgcdc-small-merge")
        try:
            writes = [pool.submit(self._write, each, casts, share) for each in folded]
            for each, write in zip(folded, writes, strict=True):
                outcome = self._outcome(each.merge.task, write)
                if outcome is not None:
                    yield each.merge.task, outcome
        finally:
            # The caller may have stopped in between, as after Ctrl-C.
            pool.shutdown(cancel_futures=True)

    def _outcome(self, task: MergeTask, write: Future[MergeReport]) -> Outcome | None:
        """Wait for the write of a table; None if Spark has to merge the table."""
        try:
            return self._result(task, write)
        except PgcdcError as error:
            return MergeFailure(*task.name, error)
        except Exception as error:
            full = full_disk_of(error)
            if full is not None and self.zone.lake.is_local:
                # Spark would leave a part of its files.
                return MergeFailure(*task.name, full_disk_error(task, full))
            # One table must not stop the others. Spark merges it, or explains what is wrong.
            if not isinstance(error, _FOR_SPARK):
                _logger.warning("%s: %s, so Spark merges it", task.path, type(error).__name__)
            self._leave(task, error)
        return None

    def _leave(self, task: MergeTask, error: Exception) -> None:
        self.left.append(LeftMerge(task, reason_of(error)))

    def _result(self, task: MergeTask, write: Future[MergeReport]) -> MergeReport:
        try:
            return write.result()
        except CommitConflict:
            if self._is_overtaken(task):
                raise overtaken_error(task.path) from None
            raise

    def _fold(self, group: Sequence[SmallMerge], casts: Casts) -> Iterator[_Folded]:
        changes, copies = read_input(self.zone, group)
        left_bytes = MOST_FILLED_BYTES
        for merge, rows, tuples in zip(group, changes, copies, strict=True):
            schema, plan = merge.schema, merge.task.plan
            copied = changed = None
            try:
                if tuples is not None:
                    assert plan.snapshot is not None
                    at = merge.task.snapshot_at if merge.task.scd == 2 else None
                    texts = read_snapshot_texts(tuples, schema, plan.snapshot.snapshot_lsn, at)
                    copied = RequestedRows.request(texts, schema, casts)
                if merge.fold is not None and merge.task.scd == 2:
                    texts = event_texts(rows, merge.fold, left_bytes)
                    left_bytes -= sum(texts.columns[i].nbytes for i in merge.fold.unknown)
                    changed = RequestedRows.request(texts, schema, casts)
                elif merge.fold is not None:
                    changed = RequestedRows.request(fold_texts(rows, merge.fold), schema, casts)
            except Exception as error:
                # One table must not stop the others. Spark merges it, or explains what is wrong.
                self._leave(merge.task, error)
                continue
            yield _Folded(merge, copied, changed)

    def _write(self, each: _Folded, casts: Casts, share: float) -> MergeReport:
        """Write one table.

        Args:
            share: the table's share of the seconds of the group.

        Raises:
            CommitConflict: another writer has committed to the table.
            NotInScope, DeltaError, OSError, pa.ArrowException: Spark has to merge the table.
        """
        began = time.monotonic()
        task, schema = each.merge.task, each.merge.schema
        state, plan = task.state, task.plan
        contents = self._versions(each, casts) if task.scd == 2 else self._contents(each, casts)
        step = next_step(self.zone, state, plan.epoch, plan.end)
        if state is None:
            begins_with = plan.snapshot.key if task.scd == 2 and plan.snapshot else None
            create_table(self.zone, task.path, schema, contents, step, begins_with)
        else:
            replace_rows(self.zone, state, contents, step)
        failpoints.reach(failpoints.AFTER_BATCH_COMMIT)
        return replace(
            begin_report(task),
            rows_inserted=contents.inserted,
            rows_updated=contents.updated,
            rows_deleted=contents.deleted,
            rows_rescued=_count_rescued(contents, schema.stored_position[0], int(plan.start)),
            row_count=_count_rows(contents, state),
            version=0 if state is None else state.version + 1,
            seconds=share + time.monotonic() - began,
        )

    def _contents(self, each: _Folded, casts: Casts) -> Contents:
        schema, task = each.merge.schema, each.merge.task
        is_emptied = task.stats is not None and bool(task.stats.truncates)
        before: pa.Table | None = None
        inserted = removed = 0
        if each.copied is not None:
            copied = fresh_contents(each.copied.typed(casts))
            before, inserted = copied.rows, copied.inserted
        elif task.state is not None and is_emptied:
            removed = task.state.row_count or 0
        elif task.state is not None:
            before = read_stored_rows(self.zone, task.state, schema)
        if is_emptied and before is not None:
            removed, before = before.num_rows, None
        if each.changed is None:
            rows = arrow_schema(schema).empty_table() if before is None else before
            return Contents(rows, inserted, 0, removed)
        typed = each.changed.typed(casts)
        if before is None or before.num_rows == 0:
            found = fresh_contents(typed)
        else:
            found = merge_contents(before, typed, schema)
        return replace(found, inserted=found.inserted + inserted, deleted=found.deleted + removed)

    def _versions(self, each: _Folded, casts: Casts) -> Contents:
        """Return the versions of a history after a step without a TRUNCATE."""
        task, schema = each.merge.task, each.merge.schema
        epoch, inserted = task.plan.epoch, 0
        if task.state is not None:
            stored = read_stored_rows(self.zone, task.state, schema)
        else:
            assert each.copied is not None
            stored = begin_versions(each.copied.typed(casts).rows, epoch)
            inserted = stored.num_rows
        if each.changed is None:
            return Contents(stored, inserted, ended=stored.slice(0, 0))
        found = merge_versions(stored, each.changed.typed(casts), schema, epoch)
        return replace(found, inserted=found.inserted + inserted)

    def _is_overtaken(self, task: MergeTask) -> bool:
        """Return whether another merge has written the table since its state was read."""
        table = open_table(self.zone.lake, task.path)
        if table is None or task.state is None:
            return True
        return read_fence(self.zone.lake, table, task.path, self.zone.name) != task.state.fence


def _count_rescued(contents: Contents, lsn: str, start: int) -> int:
    """Count the rows with a rescued value that the changes from an LSN on have written.

    Args:
        lsn: the name of the column with the LSN of a row's change.
    """
    is_new = pc.is_valid(pc.field(RESCUED)) & (pc.field(lsn) >= start)
    written = [rows for rows in (contents.rows, contents.ended) if rows is not None]
    # Few tables have any, and a filter of nothing costs a millisecond.
    rescued = [rows for rows in written if rows.column(RESCUED).null_count < rows.num_rows]
    return sum(rows.filter(is_new).num_rows for rows in rescued)


def _count_rows(contents: Contents, state: ScdState | None) -> int | None:
    """Count the rows of a table after a step; None if the state of a history has no count."""
    if contents.ended is None:
        return int(contents.rows.num_rows)
    before = 0 if state is None else state.row_count
    return None if before is None else before + contents.inserted
