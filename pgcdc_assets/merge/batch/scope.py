"""The merges that need no Spark job for each table.

Spark merges the unusual cases: many changes or rows, a change of columns, a re-snapshot, soft
deletes, a table without a key, and a table with features or columns of its owner. In a history,
Spark also merges tracked columns, a TRUNCATE, whole old rows, and columns that the source has
dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.batch.column_types import find_arrow_type
from pgcdc_assets.merge.batch.spark_fallback import NotInScope
from pgcdc_assets.merge.column_changes import find_column_changes
from pgcdc_assets.merge.comments import find_changes
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.kinds.base import TableKind
from pgcdc_assets.merge.read import read_past
from pgcdc_assets.merge.schema_evolution import fields_to_fill, follows_relation
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.merge.write import table_properties
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.compaction import needs_compaction
from pgcdc_assets.tables.properties import CONSTRAINT, MAPPING, is_append_only
from pgcdc_assets.tables.state import ScdState

# With the value `apart` of this environment variable, Spark merges each table.
SMALL_TABLES = "PGCDC_MERGE_SMALL_TABLES"
APART = "apart"

# Of one table in one step.
MOST_CHANGES = 50_000
# By an estimate from the WAL, which has whole pages after each checkpoint of the server: 801
# changes had 20 MB. `read_input` bounds what is read.
MOST_CHANGE_BYTES = 64 * 1024 * 1024
MOST_TABLE_BYTES = 16 * 1024 * 1024

# Table features that do not concern a writer of whole files. delta-rs adds `variantType` to a table
# whose properties it sets. Spark writes a table with such a column.
_FEATURES = frozenset(
    {"appendOnly", "deletionVectors", "invariants", "timestampNtz", "variantType"}
)
# The highest version of a writer without a list of features whose only features are among these.
_PLAIN_WRITER = 2
_CONSTRAINTS = (CONSTRAINT, "delta.generationExpression", "delta.invariants")


# Chooses the class that writes a table; None for a kind of table that only Spark merges.
ChooseKind = Callable[[MergeTask], TableKind | None]


@dataclass(frozen=True)
class SmallMerge:
    """A merge that needs no Spark job of its own.

    Attributes:
        schema: of the table after the step.
        fold: of the changes; None without inserts, updates and deletes.
    """

    task: MergeTask
    schema: TableSchema
    fold: Fold | None


def find_small_merge(zone: RawZone, task: MergeTask, choose_kind: ChooseKind) -> SmallMerge:
    """Return the merge of a task.

    Raises:
        NotInScope: Spark has to merge the table.
        PgcdcError: the merge by Spark raises the same error.
    """
    if os.environ.get(SMALL_TABLES) == APART:
        raise NotInScope(f"{SMALL_TABLES} is {APART}")
    if task.state is None and not zone.lake.is_local:
        raise NotInScope("the table is new, and the lake is an object store")
    _check(_size_reasons(task))
    kind = choose_kind(task)
    if kind is None:
        raise NotInScope("it has soft deletes, no key, or a history of some columns only")
    if find_changes(task) is not None:
        raise NotInScope("comments of the source have changed")
    schema = _find_schema(kind)
    _check(_column_reasons(task, schema))
    if task.state is not None:
        _check(_table_reasons(kind, task.state, schema))
    if task.stats is None or not task.version_order:
        return SmallMerge(task, schema, None)
    fold = Fold(schema, task.stats)
    _check(_fold_reasons(fold, task.scd))
    return SmallMerge(task, schema, fold)


def _check(reasons: Iterator[str]) -> None:
    for reason in reasons:
        raise NotInScope(reason)


def _size_reasons(task: MergeTask) -> Iterator[str]:
    plan, state = task.plan, task.state
    if task.blocked_by is not None:
        yield "its changes cannot be folded"
    if task.stats is None and plan.snapshot is None:
        yield "it has no change to fold"
    if plan.partial is not None:
        yield "some of its rows have a new snapshot"
    if state is not None and plan.snapshot is not None:
        yield "the table has a new snapshot"
    if task.row_count > MOST_CHANGES:
        yield f"the step has more than {MOST_CHANGES:,} changes and rows of a snapshot"
    if plan.change_bytes > MOST_CHANGE_BYTES:
        yield f"its changes have more than {MOST_CHANGE_BYTES:,} bytes"
    if state is not None and state.size_bytes > MOST_TABLE_BYTES:
        yield f"its files have more than {MOST_TABLE_BYTES:,} bytes"
    if task.scd == 2 and task.stats is not None and task.stats.truncates:
        yield "a TRUNCATE ends versions of a history"


def _find_schema(kind: TableKind) -> TableSchema:
    """Find the schema of the table after the step.

    Raises:
        NotInScope: the columns change during the step.
    """
    task = kind.task
    if task.state is not None:
        # A step of TRUNCATEs alone has no relation version.
        return kind.build_changes_schema(task.state)
    if kind.merges_snapshot_with_changes:
        return kind.build_changes_schema(None)
    assert task.snapshot_version is not None
    if not set(task.version_order) <= {task.snapshot_version.version}:
        raise NotInScope("the definition changed after the first snapshot")
    return kind.build_snapshot_schema()


def _column_reasons(task: MergeTask, schema: TableSchema) -> Iterator[str]:
    if not schema.key:
        yield "the table has no key"
    if schema.nullable_key:
        yield "a column of the key of its settings may be NULL"
    if task.plan.target.key and schema.relation.has_full_identity:
        yield "the table has a key of the settings and REPLICA IDENTITY FULL"
    for field in schema.fields:
        if find_arrow_type(field.type.ddl) is None:
            yield f'only Spark writes the type {field.type.ddl} of column "{field.name}"'
    for index in schema.key:
        found = find_arrow_type(schema.fields[index].type.ddl)
        # 0 and -0 are one value.
        if pa.types.is_floating(found) or pa.types.is_nested(found):
            yield f'equal values of the key "{schema.fields[index].name}" may have different texts'
    if MAPPING in table_properties(schema):
        yield "the names of its columns need Delta's column mapping"


def _table_reasons(kind: TableKind, state: ScdState, schema: TableSchema) -> Iterator[str]:
    """Yield what differs from a table of exactly the schema's columns without special features."""
    features = state.table.protocol().writer_features
    if features is None and state.table.protocol().min_writer_version > _PLAIN_WRITER:
        yield "the table has a protocol version that needs Spark"
    if further := sorted(set(features or ()) - _FEATURES):
        yield f"the table has Delta features: {', '.join(further)}"
    if lacking := sorted({name for name, _, _ in schema.system} - set(state.columns)):
        yield f"the table lacks system columns: {', '.join(lacking)}"
    # Only Spark compacts the files of the ended versions, to which each step adds one.
    if kind.partitioned_by and needs_compaction(state.path, state.files):
        yield "many small files have to be compacted"
    version = RelationVersion(schema.epoch, schema.version, Lsn(0), schema.relation)
    changes = find_column_changes(read_past(kind.task, state, version), schema)
    if (
        changes.needs_rewrite
        or changes.missing
        or fields_to_fill(state, schema)
        or not follows_relation(state, schema)
    ):
        yield "the definition has changed"
    if not kind.may_rewrite(state, schema):
        yield "the table has columns of its owner, a change feed or row tracking"
    if state.has_deletion_vectors:
        yield "the table has deletion vectors"
    if state.table.metadata().partition_columns != list(kind.partitioned_by):
        yield "the table is partitioned by its owner"
    folder = "".join(f"{column}=true/" for column in kind.partitioned_by)
    names = state.current_files.column("path").to_pylist()
    if any(set("/:%") & set(name.removeprefix(folder)) for name in names):
        yield "another tool has written files in other folders"
    yield from _property_reasons(state)


def _property_reasons(state: ScdState) -> Iterator[str]:
    properties = state.properties
    if MAPPING in properties:
        yield "the table has Delta's column mapping"
    if is_append_only(properties):
        yield "the table is append-only"
    if any(name.startswith(_CONSTRAINTS) for name in properties) or any(
        mark in state.schema for mark in _CONSTRAINTS
    ):
        yield "the table has constraints or generated columns"


def _fold_reasons(fold: Fold, scd: int) -> Iterator[str]:
    is_full = fold.stats.is_full
    if is_full and len(fold.common_fields) < len(fold.schema.fields):
        yield "the definition changed under REPLICA IDENTITY FULL"
    if any(layout.conversions for layout in fold.layouts) or any(
        field.convert_default for field in fold.schema.fields
    ):
        yield "the type of a column has changed"
    if set(fold.unchanged) & set(fold.identity):
        yield "a change lacks a value of its key"
    if not set(fold.further_identity) <= set(fold.common_fields):
        yield "older changes lack a column of the replica identity"
    if scd == 2 and is_full:
        yield "the history has changes with whole old rows"
    if scd == 2 and fold.schema.retained:
        yield "the history has columns that the source has dropped"
