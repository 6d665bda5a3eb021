"""What one table's merge reads: the layouts of its tuples, its snapshot and its changes."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.errors import MergeConflict, RawZoneError, SchemaChangeError
from pgcdc_assets.merge.fold.chosen_types import check_chosen, choose_types
from pgcdc_assets.merge.fold.schema import build_schema
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.raw.scan import change_files
from pgcdc_assets.raw.schema import CHANGES
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.sql import schema_ddl, string
from pgcdc_assets.tables.columns import SystemColumns
from pgcdc_assets.tables.properties import KEY, RELATION_ID, RELATION_VERSION
from pgcdc_assets.tables.state import ScdState

# Given to Spark, which would otherwise open a file for it before it plans the merge.
_RAW = schema_ddl(CHANGES)
_READ = "commit_lsn ordinal commit_ts op relation_version old_kind old new unchanged".split()


def is_made_by_its_changes(task: MergeTask) -> bool:
    """Return whether the snapshot is empty and changes follow: then one commit writes both."""
    snapshot = task.plan.snapshot
    return snapshot is not None and snapshot.row_count == 0 and bool(task.version_order)


def build_changes_schema(
    task: MergeTask, state: ScdState | None, system: SystemColumns
) -> TableSchema:
    """Build the schema from the relation version of the table and the versions of the changes.

    Args:
        state: the table; None if the changes create it.

    Raises:
        MergeConflict: the Delta table was not made by this package.
        SchemaChangeError: the source table was re-created, or its change cannot be replayed.
        RawZoneError: a relation version is not described.
    """
    assert task.stats is not None
    name = task.plan.target.qualified_name
    known_key = None
    if state is None:
        copied = task.snapshot_version
        assert copied is not None
        relation_id, made_with = copied.relation.relation_id, copied.version
    else:
        properties = state.properties
        if RELATION_ID not in properties:
            raise MergeConflict(
                table=name,
                reason=f"the Delta table {task.path} was not made by this package. Move it to "
                "another folder",
            )
        relation_id = int(properties[RELATION_ID])
        made_with = int(properties[RELATION_VERSION])
        known_key = properties.get(KEY)
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
        raise RawZoneError(
            raw_zone=task.path,
            reason=f"relation version {missing[0]} of {name} is not described in raw/relations.",
        )
    ordered = [versions[number] for number in order]
    schema = build_schema(ordered, task.plan.target.key, known_key, system, task.relations)
    schema = choose_types(schema, task.plan.target.types)
    if state is not None:
        check_chosen(schema, state.properties, state.schema)
    return schema


def read_snapshot(spark: SparkSession, zone: RawZone, snapshot: Snapshot) -> DataFrame:
    """Read the tuples of a snapshot, column `new`."""
    return (
        spark.read.format("delta")
        .load(zone.snapshots.table.uri)
        .where(
            f"epoch = {snapshot.epoch} AND snapshot_lsn = {int(snapshot.snapshot_lsn)} "
            f"AND schema = {string(snapshot.schema)} AND table = {string(snapshot.table)} "
            f"AND relation_version = {snapshot.relation_version}"
        )
        .select("new")
    )


def read_changes(
    spark: SparkSession, zone: RawZone, task: MergeTask, *, keeps_truncated: bool = False
) -> DataFrame:
    """Read the table's changes of the range.

    Spark reads the files directly. Delta would need three Spark jobs and about a second to find the
    files, longer than a small merge. LSNs are compared only if necessary: each is a constant in
    generated Java source, which Spark would compile again for every merge.

    Args:
        keeps_truncated: read also the changes before the last TRUNCATE.
    """
    plan, stats = task.plan, task.stats
    assert stats is not None
    files = change_files(zone.changes.table, plan.epoch, plan.first_change, plan.end)
    # The OID selects the rows. The names skip the row groups of other tables as well.
    names = " OR ".join(
        f"(schema = {string(schema)} AND table = {string(table)})"
        for schema, table in sorted(stats.names)
    )
    conditions = [
        f"epoch = {plan.epoch} AND relation_id = {task.followed.relation_id} AND ({names})"
    ]
    if not files.lie_inside:
        conditions.append(
            f"commit_lsn >= {int(plan.first_change)} AND commit_lsn < {int(plan.end)}"
        )
    if stats.truncates and not keeps_truncated:
        lsn, ordinal = stats.truncates[-1].commit_lsn, stats.truncates[-1].ordinal
        conditions.append(
            f"commit_lsn >= {lsn} AND (commit_lsn > {lsn} OR (commit_lsn = {lsn} "
            f"AND ordinal > {ordinal}))"
        )
    rows = spark.read.schema(_RAW).parquet(*files.addresses)
    return rows.where(" AND ".join(conditions)).select(*_READ)
