"""The maintenance job `<name>_upkeep` and its schedule: delete expired data, compact files.

If a retention is set, the first step deletes expired raw windows and their partition keys, with one
commit per epoch. The step holds the merge's pool, so no watermark moves back during the step. Then
the step deletes the snapshots that are useless without these windows. The next run retries a failed
deletion. The second step compacts files and runs VACUUM, whatever the first step has done. It takes
longer, and runs beside captures and merges. A step beside them deletes old records of Dagster.
"""

import datetime as dt
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.orchestration.jobs.schedules import build_schedule
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.partitions import find_used_window, parse_windows
from pgcdc_assets.orchestration.project.record_errors import explained_record_errors
from pgcdc_assets.orchestration.resources import LakeResource, SparkResource
from pgcdc_assets.orchestration.runs.claims import claim_run
from pgcdc_assets.orchestration.runs.executor import run_executor
from pgcdc_assets.orchestration.runs.failures import dagster_failures, raise_failed
from pgcdc_assets.orchestration.runs.record_retention import delete_old_records
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG
from pgcdc_assets.orchestration.state import lowest_watermark, read_state
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.retention import (
    RetentionReport,
    remove_partial_snapshots,
    remove_snapshots,
    remove_windows,
)
from pgcdc_assets.raw.staging import STALE_AFTER, remove_stale
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.maintenance import maintain_table
from pgcdc_assets.tables.messages import MessageTable
from pgcdc_assets.tables.spark_watermarks import renew_watermark
from pgcdc_assets.tables.state import read_scd_state, table_path


def build_maintenance_job(
    capture: CdcCapture,
    raw: dg.AssetKey,
    keys: Mapping[tuple[str, str, int], dg.AssetKey],
    messages: dg.AssetKey | None,
) -> tuple[dg.JobDefinition, dg.ScheduleDefinition]:
    """Build the job and its schedule.

    Args:
        raw: the raw asset, which gets an observation after a deletion of windows.
        keys: the SCD assets.
        messages: the asset of the logical messages; None without this table.
    """
    names = Names.of(capture)
    policy = capture.retention

    @dg.op(
        name=f"{capture.name}_remove_old_windows",
        # A run that waits for the pool ends the merge that runs.
        pool=None if policy.raw_days is None else names.merge_pool,
        required_resource_keys={names.lake},
        out=dg.Out(dg.Nothing),
    )
    def remove_old_windows(context: dg.OpExecutionContext) -> None:
        if policy.raw_days is None:
            context.log.info("All windows are kept: `retention.raw_days` is not set")
            return
        lake: LakeResource = getattr(context.resources, names.lake)
        with claim_run(context), dagster_failures(capture.name):
            zone = lake.zone(capture.name)
            lowest = lowest_position(zone, capture)
            if lowest is None:
                context.log.info(
                    "All windows are kept: a table was never merged, cannot be read, or is "
                    "ahead of the raw zone"
                )
                return
            if capture.has_message_table:
                # The watermark moves with messages. Windows without messages are removed too.
                MessageTable(zone).append_merged(lowest)
            older_than = dt.datetime.now(dt.UTC) - dt.timedelta(days=policy.raw_days)
            for report in apply_retention(zone, lowest, older_than):
                pruned = _prune(context.instance, capture, report)
                if report.missing_count:
                    context.log.warning(
                        f"{report.missing_count} rows of the {report.window_count} removed windows "
                        f"below {report.floor} (epoch {report.epoch}) were missing: another "
                        "program had deleted them from raw/changes"
                    )
                if report.window_count or pruned:
                    context.log_event(dg.AssetObservation(raw, metadata=_metadata(report, pruned)))
            copies = remove_snapshots(zone, _merged_images(zone, capture))
            copies += remove_partial_snapshots(zone)
            if copies:
                context.log.info(f"Removed {copies} snapshots that no table can be built from")

    @dg.op(
        name=f"{capture.name}_tidy_up",
        pool=names.maintenance_pool,
        required_resource_keys={names.lake, names.spark},
        out=dg.Out(dg.Nothing),
    )
    def tidy_up(context: dg.OpExecutionContext) -> None:
        lake: LakeResource = getattr(context.resources, names.lake)
        spark: SparkResource = getattr(context.resources, names.spark)
        zone = lake.zone(capture.name)
        session = partial(spark.session, zone.lake)
        failures: list[tuple[str, Exception]] = []
        with claim_run(context), dagster_failures(capture.name):
            # Whatever is wrong with one part, the others are maintained.
            with _noting(failures, "raw zone"):
                raw_report = maintain_raw_zone(zone, minimum_log_entries=1)
                context.log.info(
                    f"Raw zone: {raw_report.files_merged} files merged, "
                    f"{raw_report.files_removed} removed"
                )
            with _noting(failures, "temporary folders"):
                remove_stale(zone.lake, zone.name, STALE_AFTER)
            if capture.has_message_table:
                with _noting(failures, "logical messages"):
                    MessageTable(zone).maintain()
            for schema, table, scd in sorted(keys):
                path = table_path(zone.lake, zone.name, schema, table, scd)
                with _noting(failures, str(TableName(schema, table))):
                    state = read_scd_state(zone.lake, zone.name, path)
                    if state is None:
                        continue
                    renew_watermark(session, zone, state)
                    report = maintain_table(session, zone.lake, path, policy.keep_hours)
                    context.log.info(
                        f"{TableName(schema, table)} (scd{scd}): "
                        + (
                            "postponed, because a merge changed the same files"
                            if report.is_postponed
                            else f"{report.files_before} files became {report.files_after}"
                        )
                    )
        if failures:
            raise_failed("Not maintained", failures, capture.name)

    @dg.op(name=f"{capture.name}_delete_old_records", out=dg.Out(dg.Nothing))
    def delete_records(context: dg.OpExecutionContext) -> None:
        if policy.record_days is None:
            context.log.info("All records of Dagster are kept: `retention.record_days` is not set")
            return
        older_than = dt.datetime.now(dt.UTC) - dt.timedelta(days=policy.record_days)
        others = [*keys.values(), *([] if messages is None else [messages])]
        home = Path(context.instance.root_directory)
        with (
            claim_run(context),
            dagster_failures(capture.name),
            explained_record_errors(home),
        ):
            try:
                deleted = delete_old_records(context.instance, capture, raw, others, older_than)
            except NotImplementedError:
                context.log.info("The storage of this Dagster instance cannot delete runs")
                return
        context.log.info(
            f"Deleted {deleted.runs} runs, {deleted.check_results} results of checks and "
            f"{deleted.sensor_events} events of sensors"
        )

    @dg.job(
        name=names.maintenance_job,
        description="Deletes windows past retention, compacts small files, deletes replaced files "
        "and old records.",
        executor_def=run_executor,
        tags={CAPTURE_TAG: capture.name},
    )
    def maintenance_job() -> None:
        # Without a dependency, a failure of a step does not prevent the other steps.
        remove_old_windows()
        tidy_up()
        delete_records()

    return maintenance_job, build_schedule(capture.name, maintenance_job, policy.schedule)


@contextmanager
def _noting(failures: list[tuple[str, Exception]], what: str) -> Iterator[None]:
    """Note an error in the block, in place of raising it."""
    try:
        yield
    except (PgcdcError, OSError) as error:
        failures.append((what, error))


def lowest_position(zone: RawZone, capture: CdcCapture) -> Position | None:
    """Return the lowest watermark of all declared SCD tables; None if a table was never merged.

    The first merge of a table needs every window, and so does a rebuild that takes a table back to
    the end of an older raw zone.
    """
    tables = read_state(zone, capture).tables
    # A table that left the publication needs no further window once it is merged.
    needed = [table for table in tables if table.needs_merge or not table.has_left]
    marks = [None if table.is_broken else table.watermark for table in needed]
    known = [mark for mark in marks if mark is not None]
    return min(known) if known and len(known) == len(marks) else None


def _merged_images(zone: RawZone, capture: CdcCapture) -> dict[TableName, Position]:
    """Return the watermarks of the tables that a snapshot replaces completely."""
    merged = {}
    for table in capture.tables:
        lowest = lowest_watermark(zone, table)
        if lowest is not None and not any(map(table.keeps_history, table.scd)):
            merged[table.name] = lowest
    return merged


def apply_retention(
    zone: RawZone, lowest: Position, older_than: dt.datetime
) -> list[RetentionReport]:
    """Delete old windows that are merged into every table, in all epochs.

    Raises:
        TransientError: the lake is not writable.
    """
    return [
        remove_windows(zone, epoch, lowest.lsn if epoch == lowest.epoch else None, older_than)
        for epoch in range(1, lowest.epoch + 1)
    ]


def _prune(instance: dg.DagsterInstance, capture: CdcCapture, report: RetentionReport) -> int:
    """Delete the partition keys of deleted windows; return their number."""
    floor = Position(report.epoch, report.floor or Lsn(0))
    keys = instance.get_dynamic_partitions(capture.windows_name)
    windows = sorted(parse_windows(keys))
    used = find_used_window(instance, windows)
    old = [w.key for w in windows if _is_below(w, floor) and (used is None or w < used)]
    for key in old:
        instance.delete_dynamic_partition(capture.windows_name, key)
    return len(old)


def _is_below(window: LsnWindow, floor: Position) -> bool:
    return window.epoch == floor.epoch and window.end <= floor.lsn


def _metadata(report: RetentionReport, pruned: int) -> dict[str, Any]:
    return {
        "epoch": str(report.epoch),
        "kept_from": str(report.floor),
        "windows_removed": report.window_count,
        "changes_removed": float(report.row_count),
        "changes_missing": float(report.missing_count),
        "files_removed": report.file_count,
        "partition_keys_removed": pruned,
    }
