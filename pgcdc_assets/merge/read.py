"""The input of one table's merge: the columns of the table, its snapshot and its changes."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.merge.change_stats import COPIED, read_change_stats
from pgcdc_assets.merge.lost_changes import miscount_error
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.raw.delta.scan import ChangeFiles, change_files
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.schema import CHANGES
from pgcdc_assets.raw.snapshots import Snapshot, SnapshotStore
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.parquet import read_parquet
from pgcdc_assets.spark.sql import schema_ddl, string, timestamp
from pgcdc_assets.tables.properties import RELATION_ID, RELATION_VERSION
from pgcdc_assets.tables.source_columns import TableColumn, read_table_columns, source_prefix
from pgcdc_assets.tables.state import ScdState

# Given to Spark, which would otherwise open a file for it before it plans the merge.
_RAW = schema_ddl(CHANGES)
_READ = "commit_lsn ordinal commit_ts op relation_version old_kind old new unchanged".split()


def read_past(task: MergeTask, state: ScdState, newest: RelationVersion) -> list[TableColumn]:
    """Read the columns of a table, with the source columns that they are.

    Args:
        newest: the relation version that the table is to follow.
    """
    properties = state.properties
    recorded = None
    if state.watermark is not None and state.watermark.epoch == newest.epoch:
        identity = int(properties.get(RELATION_ID, 0)), int(properties.get(RELATION_VERSION, 0))
        recorded = next(
            (v for v in task.relations if (v.relation.relation_id, v.version) == identity), None
        )
    return read_table_columns(state.schema, properties, source_prefix(newest), recorded)


def read_snapshot(spark: SparkSession, zone: RawZone, snapshot: Snapshot) -> DataFrame:
    """Read the tuples of a snapshot, column `new`."""
    return _read_of_store(spark, zone.snapshots, snapshot).select("new")


def read_partial_snapshot(spark: SparkSession, zone: RawZone, task: MergeTask) -> DataFrame:
    """Read the rows of the plan's partial snapshot as changes at its LSN.

    As a row of a snapshot, such a row has no commit time in SCD1. In SCD2 it may begin a version,
    whose time is that of the snapshot.
    """
    snapshot, at = task.plan.partial, task.snapshot_at
    assert snapshot is not None
    return _read_of_store(spark, zone.partial_snapshots, snapshot).selectExpr(
        "snapshot_lsn AS commit_lsn",
        "CAST(-1 AS BIGINT) AS ordinal",
        f"{'CAST(NULL AS TIMESTAMP)' if at is None else timestamp(at)} AS commit_ts",
        f"'{COPIED}' AS op",
        "relation_version",
        "CAST(NULL AS STRING) AS old_kind",
        "CAST(NULL AS ARRAY<STRING>) AS old",
        "new",
        "CAST(NULL AS ARRAY<INT>) AS unchanged",
    )


def _read_of_store(spark: SparkSession, store: SnapshotStore, snapshot: Snapshot) -> DataFrame:
    return (
        spark.read.format("delta")
        .load(store.table.uri)
        .where(
            f"epoch = {snapshot.epoch} AND snapshot_lsn = {int(snapshot.snapshot_lsn)} "
            f"AND schema = {string(snapshot.schema)} AND table = {string(snapshot.table)} "
            f"AND relation_version = {snapshot.relation_version}"
        )
    )


def _check_count(zone: RawZone, task: MergeTask, files: ChangeFiles) -> None:
    """Count the landed rows again if the files are not those in which they were counted.

    A large merge may wait for hours behind others. Later changes of the log do not matter, because
    Spark reads the files that are listed now.

    Raises:
        PgcdcError: the number of rows differs.
    """
    plan, rows = task.plan, task.plan.landed
    if rows is None or task.counted_in is None:
        return
    table = zone.changes.table
    if files == change_files(table, plan.epoch, plan.first_change, plan.end, task.counted_in):
        return
    count = read_change_stats(zone, {}, [rows]).row_counts.get(rows, 0)
    if count != rows.row_count:
        raise miscount_error(zone, plan, rows, count)


def read_changes(
    spark: SparkSession, zone: RawZone, task: MergeTask, *, keeps_truncated: bool = False
) -> DataFrame:
    """Read the table's changes of the range, or the rows of the plan's partial snapshot.

    Spark reads the files directly. Delta would need three Spark jobs and about a second to find the
    files, longer than a small merge. LSNs are compared only if necessary: each is a constant in
    generated Java source, which Spark would compile again for every merge.

    Args:
        keeps_truncated: read also the changes before the last TRUNCATE.

    Raises:
        PgcdcError: another program has deleted or added changes since the count.
    """
    plan, stats = task.plan, task.stats
    assert stats is not None
    if plan.partial is not None:
        return read_partial_snapshot(spark, zone, task)
    files = change_files(zone.changes.table, plan.epoch, plan.first_change, plan.end)
    _check_count(zone, task, files)
    # The OID selects the rows. The names skip the row groups of other tables as well.
    names = " OR ".join(
        f"(schema = {string(schema)} AND table = {string(table)})"
        for schema, table in sorted(stats.names)
    )
    conditions = [
        f"epoch = {plan.epoch} AND relation_id = {task.followed.relation_id} AND ({names})"
    ]
    if not files.are_inside:
        conditions.append(
            f"commit_lsn >= {int(plan.first_change)} AND commit_lsn < {int(plan.end)}"
        )
    if stats.truncates and not keeps_truncated:
        lsn, ordinal = stats.truncates[-1].commit_lsn, stats.truncates[-1].ordinal
        conditions.append(
            f"commit_lsn >= {lsn} AND (commit_lsn > {lsn} OR (commit_lsn = {lsn} "
            f"AND ordinal > {ordinal}))"
        )
    rows = read_parquet(spark, files.addresses, _RAW)
    return rows.where(" AND ".join(conditions)).select(*_READ)
