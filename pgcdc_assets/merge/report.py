"""What a merge is asked for and what it tells; no Spark is needed to know these."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.table_name import TableName


@dataclass(frozen=True)
class MergeReport:
    """What the merge of one SCD table did.

    Attributes:
        watermark_before: through which LSN of the epoch the table was folded; None before its first
            merge and in an epoch that is new to it.
        watermark_after: the same after this merge. For a table without changes it may be ahead of
            what the table itself records: an idle table is not committed to each time.
        steps: commits that folded changes, of which each is within the limit.
        windows_folded: windows whose changes are in the table now and were not before.
        changes_read: changes of the table in these windows.
        columns_filled: columns that were added, and whose default the rows from before were given.
        snapshot_lsn: the snapshot that replaced the contents; None without one.
        row_count: rows after the merge, where it is known for nothing.
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
    rows_inserted: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    rows_rescued: int = 0
    columns_filled: tuple[str, ...] = ()
    snapshot_lsn: Lsn | None = None
    row_count: int | None = None
    seconds: float = 0.0

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    def followed_by(self, later: MergeReport) -> MergeReport:
        """Report two steps of one table as one."""
        return replace(
            later,
            watermark_before=self.watermark_before,
            steps=self.steps + later.steps,
            windows_folded=self.windows_folded + later.windows_folded,
            changes_read=self.changes_read + later.changes_read,
            rows_inserted=self.rows_inserted + later.rows_inserted,
            rows_updated=self.rows_updated + later.rows_updated,
            rows_deleted=self.rows_deleted + later.rows_deleted,
            rows_rescued=self.rows_rescued + later.rows_rescued,
            columns_filled=self.columns_filled + later.columns_filled,
            snapshot_lsn=later.snapshot_lsn or self.snapshot_lsn,
            seconds=self.seconds + later.seconds,
        )


@dataclass(frozen=True)
class MergeFailure:
    """A table that was not merged; the others were not held up."""

    schema: str
    table: str
    error: PgcdcError

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    @property
    def qualified_name(self) -> str:
        """The name for messages."""
        return str(self.name)
