"""The base of all kinds of SCD table: how snapshots and changes are applied and counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets import failpoints
from pgcdc_assets.errors import MergeConflict, SchemaChangeError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.column_changes import (
    check_none_lost,
    find_column_changes,
    rewrite_columns,
)
from pgcdc_assets.merge.fold.chosen_types import check_chosen, check_retypes, choose_types
from pgcdc_assets.merge.fold.events import null_key_sql
from pgcdc_assets.merge.fold.schema import build_schema, resolve_names
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.read import read_past, read_snapshot
from pgcdc_assets.merge.schema_evolution import (
    add_columns,
    allow_types,
    fields_to_fill,
    fill_columns,
    follows_relation,
    replace_table,
    set_properties,
)
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.merge.write import (
    create_or_replace,
    overwrite,
)
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.tuning import SMALL_BYTES
from pgcdc_assets.tables.columns import SCD1_COLUMNS, SystemColumns
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.merge_notes import FollowedRelation, followed_relation
from pgcdc_assets.tables.owned_columns import find_owned, versions_of_table
from pgcdc_assets.tables.state import ScdState, check_written, overtaken_error, read_scd_state

# Their readers would see every row that is written again go and come.
_SEES_EVERY_ROW = ("delta.enableChangeDataFeed", "delta.enableRowTracking")


def rows_in(state: ScdState | None) -> int:
    """Return the row count of a table; 0 if there is no table or no count."""
    return (state.row_count or 0) if state is not None else 0


def is_large(state: ScdState) -> bool:
    """Return whether a merge into the table should look for the affected range of keys first."""
    return state.size_bytes > SMALL_BYTES


@dataclass(frozen=True)
class Counts:
    """The rows that a write inserted, updated and deleted.

    Attributes:
        inserted: None if the count follows from the row counts of the table before and after.
    """

    inserted: int | None = 0
    updated: int = 0
    deleted: int = 0
    may_be_rescued: bool = False

    def counted(self, before: ScdState | None, after: ScdState) -> Counts:
        """Return the counts with `inserted` computed from two states of the table."""
        if self.inserted is not None:
            return self
        return replace(self, inserted=rows_in(after) - rows_in(before) + self.deleted)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            (self.inserted or 0) + (other.inserted or 0),
            self.updated + other.updated,
            self.deleted + other.deleted,
            self.may_be_rescued or other.may_be_rescued,
        )


@dataclass(frozen=True)
class TableKind(ABC):
    """The writer of one SCD table. Each method makes at most one commit with rows, as a step.

    Changed and added columns are commits of their own before the rows.

    Attributes:
        spark: a session that no other thread uses at the same time.
        filled: added columns whose default was written to the existing rows.
        row_condition: SQL that is true for the rows `t` of the table that represent a source row.
        shows_the_past: the table keeps columns that the source has dropped.
    """

    system: ClassVar[SystemColumns] = SCD1_COLUMNS
    row_condition: ClassVar[str] = "true"
    partitioned_by: ClassVar[tuple[str, ...]] = ()
    shows_the_past: ClassVar[bool] = False

    spark: SparkSession
    zone: RawZone
    task: MergeTask
    filled: list[str] = field(default_factory=list)

    @property
    def merges_snapshot_with_changes(self) -> bool:
        """Whether one commit writes an empty snapshot together with the changes after it."""
        return False

    @abstractmethod
    def apply_snapshot(self, state: ScdState | None, snapshot: Snapshot, step: Step) -> Counts:
        """Write a snapshot to the table."""

    @abstractmethod
    def apply_changes(self, state: ScdState | None, step: Step) -> Counts:
        """Fold the task's changes into the table.

        Args:
            state: None if the changes create the table.
        """

    def build_snapshot_schema(self, state: ScdState | None = None) -> TableSchema:
        """Build the schema of a snapshot's tuples.

        Args:
            state: the table that gets the differences; None if the snapshot is the whole table.
        """
        version = self.task.snapshot_version
        assert version is not None
        key, known = self.task.plan.target.key, self.task.relations
        past = None if state is None else read_past(self.task, state, version)
        schema = build_schema([version], key, system=self.system, known=known, past=past)
        return _with_chosen_types(self.task, schema).with_comments(self.task.comments or {})

    def build_changes_schema(self, state: ScdState | None) -> TableSchema:
        """Build the schema from the relation version of the table and the versions of the changes.

        Args:
            state: the table; None if the changes create it.

        Raises:
            MergeConflict: the Delta table was not made by this package.
            SchemaChangeError: the source table was re-created, or its change cannot be replayed.
            RawZoneError: a relation version is not described.
        """
        task = self.task
        assert task.stats is not None
        name = task.plan.target.qualified_name
        relation_id, made_with, known_key = self._written_with(state)
        if task.followed.relation_id != relation_id:
            raise SchemaChangeError(
                relation=name, column="(all)", reason="the table was dropped and created again"
            )
        versions = {v.version: v for v in task.relations if v.relation.relation_id == relation_id}
        order = list(task.version_order)
        if made_with not in order:
            order.insert(0, made_with)
        missing = [number for number in order if number not in versions]
        if missing:
            raise self.zone.relations.missing_error(name, missing[0])
        ordered = [versions[number] for number in order]
        steps = [
            (versions[before], versions[after])
            for before, after, lsn in task.stats.schema_steps(order, made_with)
            if lsn >= task.healed_through
        ]
        past = None
        if self.shows_the_past:
            past = () if state is None else read_past(task, state, ordered[-1])
        schema = build_schema(
            ordered,
            task.plan.target.key,
            known_key,
            self.system,
            # A snapshot stores its version first, with an LSN above the first changes.
            [v for v in task.relations if v.lsn < task.plan.end or v.version in order],
            steps=steps,
            past=past,
            recorded=versions[made_with],
        )
        schema = _with_chosen_types(task, schema)
        if state is not None:
            check_chosen(schema, state.properties, state.schema)
        return schema.with_comments(task.comments or {})

    def _written_with(self, state: ScdState | None) -> tuple[int, int, str | None]:
        """Return the OID and the relation version of a table, and its key as `key_text` writes it.

        Without a table they are those of the snapshot, which has no key yet.
        """
        if state is None:
            copied = self.task.snapshot_version
            assert copied is not None
            return copied.relation.relation_id, copied.version, None
        followed = followed_relation(state)
        if followed is None:
            raise MergeConflict(
                table=self.task.plan.target.qualified_name,
                reason=f"the Delta table {self.task.path} was not made by this package. Move it to "
                "another folder",
            )
        return followed

    def read_snapshot(self, snapshot: Snapshot, schema: TableSchema) -> DataFrame:
        """Read a snapshot's tuples, column `new`. A NULL in the configured key raises an error."""
        rows = read_snapshot(self.spark, self.zone, snapshot)
        for index in schema.nullable_key:
            is_there = (
                f"coalesce(new[{index}], {null_key_sql(schema.key.index(index))}) IS NOT NULL"
            )
            rows = rows.selectExpr(f"IF({is_there}, new, NULL) AS new")
        return rows

    def follow_columns(
        self, state: ScdState, schema: TableSchema, step: Step
    ) -> tuple[ScdState, Step]:
        """Add the columns of a schema to the table, and fill added columns with their defaults.

        Returns:
            The new state, and the step for the rows, after steps for the columns.

        Raises:
            TableRefused: the table lacks a column that its rows follow.
        """
        version = self._find_version(schema)
        columns = read_past(self.task, state, version)
        changes = find_column_changes(columns, schema)
        followed = followed_relation(state)
        if changes.missing and followed is not None:
            written = self._find_written(state, followed)
            check_none_lost(state.path, changes, schema, written)
        if changes.needs_rewrite:
            allow_types(self.spark, state, schema)
            rewrite = step.keeping(state.watermark)
            rewrite_columns(self.spark, state.path, changes, self.partitioned_by, rewrite)
            step = self.follow_write(rewrite, step)
            failpoints.reach(failpoints.AFTER_COLUMNS_REWRITTEN)
            state = self.read_state()
            columns = read_past(self.task, state, version)
        fields = [] if state.is_empty else fields_to_fill(state, schema)
        add_columns(self.spark, state, schema, columns, fields, followed)
        if fields:
            failpoints.reach(failpoints.AFTER_COLUMNS_ADDED)
            fill = step.keeping(state.watermark)
            fill_columns(self.spark, state.path, fields, self.row_condition, fill)
            step = self.follow_write(fill, step)
            self.filled.extend(each.name for each in fields)
        if changes.missing or fields:
            state = self.read_state()
        elif not follows_relation(state, schema):
            set_properties(self.spark, state, schema, columns, followed)
        return state, step

    def follow_relation(
        self, state: ScdState, schema: TableSchema, step: Step
    ) -> tuple[ScdState, Step]:
        """Adopt the columns of a new snapshot, and record the snapshot's relation in the table.

        Returns:
            As `follow_columns`.
        """
        check_retypes(schema, state.properties, state.schema)
        state, step = self.follow_columns(state, schema, step)
        columns = read_past(self.task, state, self._find_version(schema))
        set_properties(self.spark, state, schema, columns, followed_relation(state))
        return state, step

    def read_state(self) -> ScdState:
        """Read the state of the table after a write."""
        state = read_scd_state(self.zone.lake, self.zone.name, self.task.path)
        if state is None:
            raise overtaken_error(self.task.path)
        return state

    def _find_written(self, state: ScdState, followed: FollowedRelation) -> RelationVersion | None:
        """Find the relation version that the rows of a table follow; None in a new epoch."""
        if state.watermark is None or state.watermark.epoch != self.task.plan.epoch:
            return None
        identity = followed.relation_id, followed.relation_version
        found = (v for v in self.task.relations if (v.relation.relation_id, v.version) == identity)
        return next(found, None)

    def _find_version(self, schema: TableSchema) -> RelationVersion:
        return RelationVersion(schema.epoch, schema.version, Lsn(0), schema.relation)

    def follow_write(self, written: Step, step: Step) -> Step:
        """Check that a write before the rows was committed, and return the step for the rows."""
        check_written(self.zone, self.task.path, written)
        return replace(step, number=written.number + 1)

    def replace_table(
        self, state: ScdState | None, rows: DataFrame, schema: TableSchema, step: Step
    ) -> None:
        """Write the numbered columns as the table's whole contents, in a table of this schema."""
        path = self.task.path
        if state is None:
            create_or_replace(path, rows, schema, step)
            return
        owned = find_owned(
            state.schema, state.properties, versions_of_table(self.zone, *self.task.name)
        )
        replace_table(self.spark, rows, schema, state, owned, step)

    def empty(self, state: ScdState | None, step: Step) -> Counts:
        """Delete all rows, if the changes are TRUNCATEs alone; the columns stay."""
        overwrite(self.read_table().where("false"), self.task.path, step)
        return Counts(deleted=rows_in(state))

    def may_rewrite(self, state: ScdState, schema: TableSchema) -> bool:
        """Return whether unchanged rows can be rewritten together with changed rows.

        A table with columns of its owner cannot: only a MERGE keeps their values.
        """
        known = {field.name for field in schema.fields} | {name for name, _, _ in self.system}
        properties = state.properties
        sees = any(properties.get(name, "").lower() == "true" for name in _SEES_EVERY_ROW)
        return known.issuperset(state.columns) and not sees

    def read_table(self) -> DataFrame:
        """Read the table as it is."""
        return self.spark.read.format("delta").load(self.task.path)


def _with_chosen_types(task: MergeTask, schema: TableSchema) -> TableSchema:
    """Return a schema with the types of the settings, which may name columns as they once were."""
    types = task.plan.target.types
    names = resolve_names(tuple(types), schema.relation, task.relations)
    return choose_types(schema, dict(zip(names, types.values(), strict=True)))
