"""The task of one table of a merge: what its stages need to know, found without Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass

from deltalake import DeltaTable

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.change_stats import ChangeStats, FollowedTable
from pgcdc_assets.merge.plan import Plan
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.table_ends import TableEnd
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import ScdState

_NO_SNAPSHOT = Lsn(0)


@dataclass(frozen=True)
class MergeTask:
    """The merge of one SCD table, with everything that its stages need to know.

    Attributes:
        state: the table as its log describes it; None if there is no table.
        followed: the table and the OID of its relation.
        relations: the versions of that relation in the plan's epoch.
        snapshot_version: the relation version that describes the tuples of the plan's snapshot.
        stats: of the changes to be folded; None without changes.
        version_order: the relation versions of these changes in the order of their last use.
        started: of the monotonic clock.
        snapshot_at: the time of the plan's snapshot, for a table that keeps history; of its partial
            snapshot, for SCD2.
        table_end: where the rows before the plan's snapshot end, if the snapshot is one of another
            table; None without a proof.
        compared_bytes: of the snapshot and the table's rows, if a shuffle compares the two.
        is_remade: the table does not exist, and its folder holds data files.
        waits_for: the schema changes before which the plan ends, in sentences.
        awaits_snapshot: the schema changes whose snapshot is taken without a person, in sentences,
            wherever the plan ends.
        blocked_by: the error of changes that cannot be folded from the plan's start on; None
            without such changes.
        healed_through: the newest usable snapshot of the epoch has what schema changes below this
            LSN did to older rows.
        changes_missing: the landed rows under the table's names that another program has deleted,
            if the table is folded again in another folder.
        counted_in: the version of `raw/changes` at the count of the changes, or an earlier one;
            None if missing changes do not stop the merge.
        comments: of the source by attnum, at the newest look at the catalog; None: not known.
    """

    plan: Plan
    scd: int
    path: str
    state: ScdState | None
    followed: FollowedTable
    relations: tuple[RelationVersion, ...]
    started: float
    snapshot_version: RelationVersion | None = None
    stats: ChangeStats | None = None
    version_order: tuple[int, ...] = ()
    snapshot_at: dt.datetime | None = None
    table_end: TableEnd | None = None
    compared_bytes: int = 0
    is_remade: bool = False
    waits_for: str = ""
    awaits_snapshot: str = ""
    blocked_by: PgcdcError | None = None
    healed_through: Lsn = _NO_SNAPSHOT
    changes_missing: int = 0
    counted_in: DeltaTable | None = None
    comments: Mapping[int, str] | None = None

    @property
    def row_count(self) -> int:
        """The number of rows to be read, of the snapshot and of the changes."""
        copied = self.plan.snapshot.row_count if self.plan.snapshot is not None else 0
        return copied + (self.stats.change_count if self.stats is not None else 0)

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return self.plan.target.name

    @property
    def watermark_before(self) -> Lsn | None:
        """The table's watermark in the plan's epoch; None without a watermark."""
        if self.state is None or self.state.watermark is None:
            return None
        epoch, lsn = self.state.watermark
        return lsn if epoch == self.plan.epoch else None

    @property
    def is_idle(self) -> bool:
        """Whether the task has nothing to write."""
        return self.plan.snapshot is None and self.stats is None and self.plan.is_last
