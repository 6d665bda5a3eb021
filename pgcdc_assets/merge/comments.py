"""Update of an existing table's comments to those of the source, in commits without rows."""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql import SparkSession

from pgcdc_assets.merge.read import read_past
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.sql import delta_table, identifier, string
from pgcdc_assets.tables.comments import CommentChanges, find_comment_changes
from pgcdc_assets.tables.properties import COMMENTS
from pgcdc_assets.tables.state import overtaken_error, read_scd_state


def find_changes(task: MergeTask) -> CommentChanges | None:
    """Find the comments that a task's table lacks; None if it lacks no known comment."""
    state = task.state
    if state is None or task.comments is None or not task.relations:
        return None
    columns = read_past(task, state, task.relations[-1])
    return find_comment_changes(
        columns, state.description, state.properties, task.relations, task.comments
    )


def follow_comments(spark: SparkSession, zone: RawZone, task: MergeTask) -> MergeTask:
    """Write the comments that a table lacks; return the task with the new state of the table.

    For a column `a` the statements are

        ALTER TABLE t SET TBLPROPERTIES ('pgcdc.comments' = '["0f..."]', 'comment' = 'orders')
        ALTER TABLE t ALTER COLUMN `a` COMMENT 'in cents'
    """
    changes = find_changes(task)
    if changes is None:
        return task
    table = delta_table(task.path)
    properties = f"{string(COMMENTS)} = {string(changes.digests)}"
    if changes.description is not None:
        properties += f", 'comment' = {string(changes.description)}"
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ({properties})")
    if changes.columns:
        altered = ", ".join(
            f"{identifier(name)} COMMENT {string(text)}" for name, text in changes.columns.items()
        )
        spark.sql(f"ALTER TABLE {table} ALTER COLUMN {altered}")
    state = read_scd_state(zone.lake, zone.name, task.path)
    if state is None:
        raise overtaken_error(task.path)
    return replace(task, state=state)
