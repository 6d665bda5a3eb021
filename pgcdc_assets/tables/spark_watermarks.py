"""Watermarks that would expire, and that the daily maintenance and merges write again.

delta-rs writes the second commit of a merge, which records the watermark as an application
transaction (`fence.py`). delta-rs cannot write some tables, such as tables with clustering or row
tracking, so their watermark is only in the log entry of the newest write. Spark deletes expired
entries, so a table without changes would lose its watermark. A Spark commit without rows therefore
advances the watermark, or writes the same watermark again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from deltalake import DeltaTable

from pgcdc_assets.errors import TableDamaged, TransientError
from pgcdc_assets.lsn import Position
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.fence import (
    Step,
    fence_app_id,
    is_watermark_recorded,
    newest_write_time,
    read_fence,
)
from pgcdc_assets.tables.properties import (
    LOG_RETENTION,
    TRANSACTION_RETENTION,
    interval_hours,
)
from pgcdc_assets.tables.read_errors import explain_read_errors
from pgcdc_assets.tables.state import (
    ScdState,
    advance_watermark,
    open_table,
    read_position,
    record_watermark,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The maintenance shortens a longer retention, unless the owner of the table has set it.
_LOG_HOURS = 168.0
# The daily maintenance may fail, or be late, several times before the entry expires.
_PART_OF_RETENTION = 0.25


def advance_by_spark(
    spark: SparkSession, zone: RawZone, path: str, before: Position | None, after: Position
) -> None:
    """Advance the watermark of a table without changes, by one commit of Spark without rows.

    Args:
        before: a table at another position is left unchanged.
        after: may be equal: the log then has the watermark in a new entry.

    Raises:
        TransientError: the table cannot be written.
    """
    from pgcdc_assets.spark.errors import describe_failure, is_conflict

    table = open_table(zone.lake, path)
    if table is None or read_position(zone, table, path) != before:
        return
    fence = read_fence(zone.lake, table, path, zone.name)
    step = Step(fence_app_id(zone.name), fence + 1, after, has_changes=False)
    try:
        nothing = spark.read.format("delta").load(path).where("false")
        # Delta skips the write if another merge has committed since.
        nothing.write.format("delta").mode("append").options(**step.options).save(path)
    except Exception as error:
        if not is_conflict(error):
            raise TransientError(
                reason=f"The watermark of the Delta table {path} cannot be written: "
                f"{describe_failure(error)}. No row is lost; run it again."
            ) from error


def renew_watermark(spark: Callable[[], SparkSession], zone: RawZone, state: ScdState) -> bool:
    """Write the watermark of a table again, if what has the watermark would expire.

    The log entry of the newest write expires if the entry alone has the watermark. Application
    transactions expire if the owner of the table has set a limit.

    Args:
        spark: returns the session, if one is needed.

    Returns:
        Whether the watermark was written again.

    Raises:
        TableDamaged: the log cannot be read.
        TransientError: the table cannot be written.
    """
    limit = state.properties.get(TRANSACTION_RETENTION)
    if state.watermark is None or (state.is_watermark_recorded and limit is None):
        return False
    record_watermark(zone, state.path)
    table = open_table(zone.lake, state.path)
    if table is None or (limit is None and is_watermark_recorded(table, zone.name)):
        return False
    hours = min(_LOG_HOURS, *map(_hours, (limit, state.properties.get(LOG_RETENTION))))
    if time.time() - _written_at(zone, table, state.path) < hours * 3600 * _PART_OF_RETENTION:
        return False
    if advance_watermark(zone, state.path, state.watermark, state.watermark):
        return True
    from pgcdc_assets.spark.session import own_sessions

    with own_sessions(spark(), 1) as (session,):
        advance_by_spark(session, zone, state.path, state.watermark, state.watermark)
    return True


def _hours(interval: str | None) -> float:
    """Return the hours of a property; 0 if its form is not known."""
    return _LOG_HOURS if interval is None else interval_hours(interval) or 0.0


def _written_at(zone: RawZone, table: DeltaTable, path: str) -> float:
    """Return when the newest write was written; 0 if its entry is gone."""
    with explain_read_errors(path):
        try:
            return newest_write_time(zone.lake, table, path, zone.name)
        except TableDamaged:
            if not is_watermark_recorded(table, zone.name):
                raise
            return 0.0
