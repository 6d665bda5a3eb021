"""The merges that need no Spark job for each table.

Spark merges the unusual cases: a change of columns, a re-snapshot, and a table with features or
columns of its owner. In a history, Spark also merges a TRUNCATE, whole old rows, and columns that
the source has dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.batch.column_types import find_arrow_type, has_known_types
from pgcdc_assets.merge.column_changes import find_column_changes
from pgcdc_assets.merge.comments import find_changes
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.kinds.base import TableKind
from pgcdc_assets.merge.read import read_past
from pgcdc_assets.merge.schema_evolution import fields_to_fill, follows_relation
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.merge.write import table_properties
from pgcdc_assets.raw.relations import RelationVersion
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.compaction import needs_compaction
from pgcdc_assets.tables.properties import MAPPING
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
# whose properties it sets. `has_known_types` leaves tables with such a column to Spark.
_FEATURES = frozenset(
    {"appendOnly", "deletionVectors", "invariants", "timestampNtz", "variantType"}
)
# The highest version of a writer without a list of features whose only features are among these.
_PLAIN_WRITER = 2
_CONSTRAINTS = ("delta.constraints.", "delta.generationExpression", "delta.invariants")


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


def find_small_merge(zone: RawZone, task: MergeTask, choose_kind: ChooseKind) -> SmallMerge | None:
    """Return the merge of a task, if it is in scope; otherwise None."""
    if os.environ.get(SMALL_TABLES) == APART:
        return None
    if not _is_small(task) or (task.state is None and not zone.lake.is_local):
        return None
    try:
        kind = choose_kind(task)
        if kind is None or find_changes(task) is not None:
            return None
        schema = _find_schema(kind)
    except PgcdcError:
        # The merge by Spark raises the error.
        return None
    if schema is None or not _has_usual_columns(task, schema):
        return None
    if task.state is not None and not _is_usual_table(kind, task.state, schema):
        return None
    if task.stats is None or not task.version_order:
        return SmallMerge(task, schema, None)
    fold = Fold(schema, task.stats)
    is_usual = _is_usual_fold(fold) and (task.scd == 1 or _is_usual_history(fold))
    return SmallMerge(task, schema, fold) if is_usual else None


def _is_small(task: MergeTask) -> bool:
    plan = task.plan
    return (
        task.blocked_by is None
        and (task.stats is not None or plan.snapshot is not None)
        and plan.partial is None
        and (task.state is None or plan.snapshot is None)
        and task.row_count <= MOST_CHANGES
        and plan.change_bytes <= MOST_CHANGE_BYTES
        and (task.state is None or task.state.size_bytes <= MOST_TABLE_BYTES)
        and (task.scd == 1 or task.stats is None or not task.stats.truncates)
    )


def _find_schema(kind: TableKind) -> TableSchema | None:
    """Find the schema of the table after the step; None if its columns change during the step."""
    task = kind.task
    if task.state is not None:
        # A step of TRUNCATEs alone has no relation version.
        return kind.build_changes_schema(task.state)
    if kind.merges_snapshot_with_changes:
        return kind.build_changes_schema(None)
    assert task.snapshot_version is not None
    if not set(task.version_order) <= {task.snapshot_version.version}:
        return None
    return kind.build_snapshot_schema()


def _has_usual_columns(task: MergeTask, schema: TableSchema) -> bool:
    if not schema.key or schema.nullable_key or not has_known_types(schema):
        return False
    if task.plan.target.key and schema.relation.has_full_identity:
        return False
    for index in schema.key:
        found = find_arrow_type(schema.fields[index].type.ddl)
        # 0 and -0 are one value.
        if pa.types.is_floating(found) or pa.types.is_nested(found):
            return False
    return MAPPING not in table_properties(schema)


def _is_usual_table(kind: TableKind, state: ScdState, schema: TableSchema) -> bool:
    """Return whether the table has exactly the columns of the schema, and no special features."""
    version = RelationVersion(schema.epoch, schema.version, Lsn(0), schema.relation)
    changes = find_column_changes(read_past(kind.task, state, version), schema)
    protocol, properties = state.table.protocol(), state.properties
    if protocol.writer_features is None:
        is_plain = protocol.min_writer_version <= _PLAIN_WRITER
    else:
        is_plain = _FEATURES.issuperset(protocol.writer_features)
    names = state.current_files.column("path").to_pylist()
    folder = "".join(f"{column}=true/" for column in kind.partitioned_by)
    return (
        is_plain
        and {name for name, _, _ in schema.system} <= set(state.columns)
        # Only Spark compacts the files of the ended versions, to which each step adds one.
        and not (kind.partitioned_by and needs_compaction(state.path, state.files))
        and not changes.needs_rewrite
        and not changes.missing
        and not fields_to_fill(state, schema)
        and follows_relation(state, schema)
        and kind.may_rewrite(state, schema)
        and not state.has_deletion_vectors
        and not any(set("/:%") & set(name.removeprefix(folder)) for name in names)
        and MAPPING not in properties
        and properties.get("delta.appendOnly", "").lower() != "true"
        and not any(name.startswith(_CONSTRAINTS) for name in properties)
        and not any(mark in state.schema for mark in _CONSTRAINTS)
        and state.table.metadata().partition_columns == list(kind.partitioned_by)
    )


def _is_usual_fold(fold: Fold) -> bool:
    return (
        not (fold.stats.is_full and len(fold.common_fields) < len(fold.schema.fields))
        and not any(layout.conversions for layout in fold.layouts)
        and not any(field.convert_default for field in fold.schema.fields)
        and not set(fold.unchanged) & set(fold.schema.key)
    )


def _is_usual_history(fold: Fold) -> bool:
    return not fold.stats.is_full and not fold.schema.retained
