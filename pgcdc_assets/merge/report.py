"""The outcome of a merge: a report or a failure for each table. Needs no Spark."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.table_name import TableName


@dataclass(frozen=True)
class MergeReport:
    """The outcome of the merge of one SCD table.

    Attributes:
        watermark_before: the watermark of the table in the epoch before the merge; None before the
            first merge of the table in the epoch.
        watermark_after: the watermark after the merge. For a table without changes it may be ahead
            of the recorded watermark, because not every merge commits to an idle table.
        steps: number of commits that folded changes, each within the limit of a step.
        windows_folded: number of windows whose changes the merge added to the table.
        changes_read: number of changes of the table in these windows.
        changes_missing: landed changes that another program has deleted; 0 for a live table, whose
            merge stops instead.
        columns_filled: added columns whose default was written to the existing rows.
        snapshot_lsn: LSN of the snapshot that the merge applied; None without a snapshot.
        row_count: rows after the merge; None if the log does not have the count.
        source_name: the table's name at the source in the newest folded change or snapshot; None
            without one.
        names: all names under which the folded changes arrived.
        version: the table's version after the merge; None if the merge did not read it.
        has_committed: the merge may have written to the table; false for a table without changes
            whose watermark was not recorded.
        is_remade: the folder held data files and no log, and the table was built again from raw.
        left_out: a sentence about the changes that could not be folded, and that the next snapshot
            replaced; empty without such changes.
        waits_for: the schema changes for whose snapshot the table waits at its watermark; empty if
            the table does not wait.
        spark_reason: why Spark merged the table on its own; empty for a table that was merged
            together with others, or had nothing to merge.
    """

    schema: str
    table: str
    scd: int
    path: str
    watermark_before: Lsn | None
    watermark_after: Lsn | None
    steps: int = 0
    windows_folded: int = 0
    changes_read: int = 0
    changes_missing: int = 0
    rows_inserted: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    rows_rescued: int = 0
    columns_filled: tuple[str, ...] = ()
    snapshot_lsn: Lsn | None = None
    row_count: int | None = None
    seconds: float = 0.0
    is_remade: bool = False
    left_out: str = ""
    waits_for: str = ""
    spark_reason: str = ""
    source_name: TableName | None = None
    names: frozenset[TableName] = frozenset()
    version: int | None = None
    has_committed: bool = True

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    def followed_by(self, later: MergeReport) -> MergeReport:
        """Combine the reports of two steps of one table."""
        return replace(
            later,
            watermark_before=self.watermark_before,
            steps=self.steps + later.steps,
            windows_folded=self.windows_folded + later.windows_folded,
            changes_read=self.changes_read + later.changes_read,
            changes_missing=self.changes_missing + later.changes_missing,
            rows_inserted=self.rows_inserted + later.rows_inserted,
            rows_updated=self.rows_updated + later.rows_updated,
            rows_deleted=self.rows_deleted + later.rows_deleted,
            rows_rescued=self.rows_rescued + later.rows_rescued,
            columns_filled=self.columns_filled + later.columns_filled,
            snapshot_lsn=later.snapshot_lsn or self.snapshot_lsn,
            seconds=self.seconds + later.seconds,
            is_remade=self.is_remade,
            left_out=" ".join(filter(None, [self.left_out, later.left_out])),
            spark_reason=later.spark_reason or self.spark_reason,
            source_name=later.source_name or self.source_name,
            names=self.names | later.names,
            has_committed=self.has_committed or later.has_committed,
        )


@dataclass(frozen=True)
class MergeFailure:
    """The error of a table that was not merged; other tables are not affected."""

    schema: str
    table: str
    error: PgcdcError

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    @property
    def qualified_name(self) -> str:
        """The name in sentences."""
        return str(self.name)
