"""Upkeep of an SCD table: small files become few, files that no version of late names are deleted,
and so are entries of its log that are older than the table's `delta.logRetentionDuration`.

Both may run beside merges. OPTIMIZE changes no row, and of it and a merge that touch the same files
at the same time one is refused by Delta: OPTIMIZE then waits for its next turn, a merge is run
again by its sensor.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.state import open_table
from pgcdc_assets.tables.vacuum import delete_replaced_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Delta refuses a shorter time as long as its check is on: a reader or writer could still be at it.
_CHECKED_HOURS = 168.0
# VACUUM deletes files that no commit has named yet as well: no merge runs for so long.
_LEAST_HOURS = 24.0
# Delta's default of 1 GB would put recent rows and old ones into one file, and each merge reads the
# files in which a changed row may lie as a whole, for the keys in them.
_FILE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class MaintenanceReport:
    """What upkeep did to one SCD table.

    Attributes:
        is_postponed: a merge was faster; the files are as they were.
    """

    path: str
    files_before: int = 0
    files_after: int = 0
    is_postponed: bool = False


def maintain_table(
    spark: SparkSession, lake: Lake, path: str, keep_hours: float
) -> MaintenanceReport:
    """Merge a table's small files, and delete those that only older versions name.

    Args:
        keep_hours: versions that were replaced later than that stay readable.

    Raises:
        TransientError: Spark could not do it; no row is harmed.
    """
    from pgcdc_assets.spark.session import own_sessions

    delete_replaced_files(lake, path, keep_hours)
    keep_hours = max(keep_hours, _LEAST_HOURS)
    with own_sessions(spark, 1) as (session,):
        if keep_hours < _CHECKED_HOURS:
            session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
        for name in ("minFileSize", "maxFileSize"):
            session.conf.set(f"spark.databricks.delta.optimize.{name}", str(_FILE_BYTES))
        # Else the next OPTIMIZE would put together again what this one split.
        session.conf.set("spark.sql.files.maxRecordsPerFile", "0")
        report = _merge_files(session, path)
        try:
            session.sql(f"VACUUM {delta_table(path)} RETAIN {keep_hours:g} HOURS").collect()
        except Exception as error:
            raise _failure(path, error) from error
    _clean_log(lake, path)
    return report


def _clean_log(lake: Lake, path: str) -> None:
    """Delete old entries of the log, which Spark does only with checkpoints that it writes.

    Most checkpoints are written with watermarks, by delta-rs. A table with features that delta-rs
    does not write keeps its log.
    """
    table = open_table(lake, path)
    if table is not None:
        with suppress(DeltaError):
            table.cleanup_metadata()


def _merge_files(session: SparkSession, path: str) -> MaintenanceReport:
    from pgcdc_assets.spark.errors import is_conflict

    try:
        metrics = session.sql(f"OPTIMIZE {delta_table(path)}").collect()[0]["metrics"]
    except Exception as error:
        if not is_conflict(error):
            raise _failure(path, error) from error
        return MaintenanceReport(path, is_postponed=True)
    return MaintenanceReport(path, int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"]))


def _failure(path: str, error: Exception) -> TransientError:
    from pgcdc_assets.spark.errors import condition_of

    return TransientError(
        reason=f"The maintenance of {path} failed: Spark reported {condition_of(error)}. No row is "
        "harmed; the next maintenance continues."
    )
