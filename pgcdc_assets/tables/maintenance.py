"""Maintenance of an SCD table: OPTIMIZE, VACUUM, and removal of old log entries.

OPTIMIZE compacts small files. VACUUM deletes files that no recent version references. It needs
sixty stages of Spark for the smallest table, so it runs only if the folder has such a file. Log
entries older than the table's `delta.logRetentionDuration` are removed.

Maintenance may run beside merges. If OPTIMIZE and a merge change the same files at the same time,
Delta refuses one of them: OPTIMIZE is postponed to the next maintenance, and the sensor runs a
refused merge again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.delta.log_cleanup import shorten_log
from pgcdc_assets.raw.delta.refused_commits import WRITTEN_FEATURES
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.sql import delta_table, string
from pgcdc_assets.tables.checkpoints import delete_checksum_of_hint
from pgcdc_assets.tables.checksums import (
    delete_checksums_of_log,
    delete_checksums_without_files,
    delete_drafts_of_log,
)
from pgcdc_assets.tables.compaction import needs_optimize, optimize
from pgcdc_assets.tables.properties import (
    FILE_RETENTION,
    LOG_RETENTION,
    OWN_FILE_RETENTION,
    OWN_LOG_RETENTION,
    interval_hours,
)
from pgcdc_assets.tables.state import open_table
from pgcdc_assets.tables.vacuum import delete_replaced_files, has_unknown_files, owner_hours

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Table features of which a checkpoint by delta-rs has everything.
_FEATURES = WRITTEN_FEATURES - {"v2Checkpoint"}

# Delta's property: whether a checkpoint deletes log entries that are past their retention.
_LOG_CLEANUP = "delta.enableExpiredLogCleanup"
# Delta's check refuses a shorter retention, because a reader or writer could still use the files.
_CHECKED_HOURS = 168.0
# VACUUM also deletes files that no commit references yet. No merge takes so long.
_LEAST_HOURS = 24.0


@dataclass(frozen=True)
class MaintenanceReport:
    """The outcome of the maintenance of one SCD table.

    Attributes:
        is_postponed: a merge changed the same files; nothing was compacted.
    """

    path: str
    files_before: int = 0
    files_after: int = 0
    is_postponed: bool = False


def maintain_table(
    spark: Callable[[], SparkSession], lake: Lake, path: str, keep_hours: float
) -> MaintenanceReport:
    """Compact a table's small files, and delete files that only old versions reference.

    A table without small files, and without files that a VACUUM could delete, needs no Spark.

    Args:
        spark: returns the session, if one is needed.
        keep_hours: versions that were replaced within so many hours stay readable.

    Raises:
        TableDamaged: the table's log cannot be read.
        TransientError: Spark or the lake failed; no row is lost.
    """
    delete_replaced_files(lake, path, keep_hours)
    table = open_table(lake, path)
    if table is None:
        return MaintenanceReport(path)
    properties = table.metadata().configuration
    # Delta ignores a fraction of an hour.
    keep_hours = math.ceil(max(keep_hours, owner_hours(properties), _LEAST_HOURS))
    limits = _find_limits(properties, keep_hours)
    has_small_files = needs_optimize(lake, path, table)
    report = MaintenanceReport(path)
    if limits or has_small_files or _needs_vacuum(lake, path, table, keep_hours):
        report = _maintain_by_spark(spark(), path, keep_hours, limits, has_small_files)
    _clean_log(lake, path)
    return report


def _needs_vacuum(lake: Lake, path: str, table: DeltaTable, keep_hours: float) -> bool:
    try:
        return has_unknown_files(lake, path, table, keep_hours)
    except OSError as error:
        raise TransientError(
            reason=f"The folder of the Delta table {path} cannot be listed "
            f"({error.strerror or type(error).__name__}). No row is harmed; the next maintenance "
            "continues."
        ) from error


def _maintain_by_spark(
    spark: SparkSession,
    path: str,
    keep_hours: float,
    limits: Mapping[str, str],
    has_small_files: bool,
) -> MaintenanceReport:
    from pgcdc_assets.spark.session import own_sessions

    report = MaintenanceReport(path)
    failures: list[TransientError] = []
    with own_sessions(spark, 1) as (session,):
        if limits:
            with _deferring(failures):
                _set_properties(session, path, limits)
        # Delta 4.4 would ignore RETAIN, and keep files for a week.
        session.conf.set("spark.databricks.delta.vacuum.retentionWindowIgnore.enabled", "false")
        if keep_hours < _CHECKED_HOURS:
            session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
        with _deferring(failures):
            _vacuum(session, path, keep_hours)
        if has_small_files:
            with _deferring(failures):
                report = _merge_files(session, path)
    if failures:
        raise failures[0]
    return report


@contextmanager
def _deferring(failures: list[TransientError]) -> Iterator[None]:
    """Keep the failure of a step, because the next step may free the space of a full disk."""
    try:
        yield
    except TransientError as error:
        failures.append(error)


def _vacuum(session: SparkSession, path: str, keep_hours: float) -> None:
    try:
        session.sql(f"VACUUM {delta_table(path)} RETAIN {keep_hours} HOURS").collect()
    except Exception as error:
        raise _failure(path, error) from error


def _find_limits(properties: Mapping[str, str], keep_hours: float) -> dict[str, str]:
    """Return how long entries of the log and removals in checkpoints shall be kept, as properties.

    A version cannot be read without its files, so entries older than a week are of little use. With
    Delta's default of 30 days and a merge every five seconds, a log has half a million entries. A
    checkpoint repeats all removals of files within the retention of files, a week by default, and
    each opening of the table reads it. Settings of the table's owner stay.
    """
    # Delta refuses a limit of the log below the retention of files.
    limits = {
        LOG_RETENTION: (OWN_LOG_RETENTION, max(_CHECKED_HOURS, keep_hours)),
        FILE_RETENTION: (OWN_FILE_RETENTION, keep_hours),
    }
    wanted: dict[str, str] = {}
    for name, (own, hours) in limits.items():
        current = properties.get(name)
        if current != properties.get(own):
            continue
        if current is None or interval_hours(current) != math.ceil(hours):
            value = _own_interval(name, math.ceil(hours))
            wanted |= {name: value, own: value}
    return wanted


def _own_interval(name: str, hours: int) -> str:
    """Return an interval as the value of a property.

    An owner's value "interval 24 hours" must differ from the value of this package: the owner's
    value also keeps files from the merges. A table of an earlier release keeps its value in hours.
    """
    return f"interval {60 * hours} minutes" if name == FILE_RETENTION else f"interval {hours} hours"


def _set_properties(session: SparkSession, path: str, wanted: Mapping[str, str]) -> None:
    settings = ", ".join(f"{string(name)} = {string(value)}" for name, value in wanted.items())
    try:
        session.sql(f"ALTER TABLE {delta_table(path)} SET TBLPROPERTIES ({settings})").collect()
    except Exception as error:
        from pgcdc_assets.spark.errors import is_conflict

        # A merge has committed at the same time: the next maintenance tries again.
        if not is_conflict(error):
            raise _failure(path, error) from error


def _clean_log(lake: Lake, path: str) -> None:
    """Delete old log entries, and checksums whose files are deleted.

    Spark deletes them only when it writes a checkpoint, and delta-rs writes most checkpoints here,
    with the watermarks. A table with further features keeps its log, until Spark deletes entries.
    The owner of a table can switch the deletion off, as in Delta: `_LOG_CLEANUP`.
    """
    table = open_table(lake, path)
    if table is not None:
        is_on = table.metadata().configuration.get(_LOG_CLEANUP, "true").lower() != "false"
        if is_on and _FEATURES.issuperset(table.protocol().writer_features or ()):
            with suppress(DeltaError, OSError):
                delete_checksum_of_hint(lake, path)
                shorten_log(lake, path, table)
        with suppress(DeltaError, OSError):
            delete_checksums_of_log(lake, path)
            if lake.is_local:
                delete_checksums_without_files(path)
                delete_drafts_of_log(path)


def _merge_files(session: SparkSession, path: str) -> MaintenanceReport:
    from pgcdc_assets.spark.errors import is_conflict

    try:
        return MaintenanceReport(path, *optimize(session, path))
    except Exception as error:
        if not is_conflict(error):
            raise _failure(path, error) from error
        return MaintenanceReport(path, is_postponed=True)


def _failure(path: str, error: Exception) -> TransientError:
    from pgcdc_assets.spark.errors import describe_failure

    return TransientError(
        reason=f"The maintenance of {path} failed: {describe_failure(error)}. No row is "
        "harmed; the next maintenance continues."
    )
