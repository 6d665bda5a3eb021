"""Retention of Dagster's records of a capture: runs with their events and logs, results of checks.

Dagster itself deletes no runs and events. A window adds an event for each table that a merge
materialises, and three results of checks, so the records of a day may exceed the changes.

A run is deleted if it has ended before a time, and before the oldest window with a partition key
was landed: the UI shows the partitions of all keys. The newest materialisation of an asset, the
newest result of a check, and the runs of snapshots are kept. So are runs of other jobs, such as the
job of "Materialize" in the UI.

Dagster's public methods delete neither the results of checks nor the observations of sensors, so
these are deleted from the tables of an event log in SQL.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import sqlalchemy as sa
from dagster import DagsterEventType, RunsFilter
from dagster._core.instance.utils import RUNLESS_RUN_ID
from dagster._core.storage.event_log import SqlEventLogStorage, SqliteEventLogStorage
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    AssetEventTagsTable,
    SqlEventLogStorageTable,
)

from pgcdc_assets import failpoints
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.partitions import parse_windows
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG, FINISHED
from pgcdc_assets.settings import CdcCapture

# The oldest keys may belong to windows that are not landed yet.
_EXAMINED_KEYS = 100

RECORDS_AT_ONCE = 500

# No time zone differs more from UTC.
_ZONES = dt.timedelta(hours=15)


@dataclass(frozen=True)
class RecordReport:
    """The number of deleted records."""

    runs: int = 0
    check_results: int = 0
    sensor_events: int = 0


def delete_old_records(
    instance: dg.DagsterInstance,
    capture: CdcCapture,
    raw: dg.AssetKey,
    others: Collection[dg.AssetKey],
    older_than: dt.datetime,
) -> RecordReport:
    """Delete the old records of a capture, and return their number.

    Args:
        raw: the raw asset.
        others: the other assets whose partitions are windows: of the tables, of the messages.
        older_than: records from before this time are deleted.

    Raises:
        NotImplementedError: the instance's storage cannot delete runs.
    """
    keys = [raw, *others]
    before = min(older_than, _oldest_shown(instance, capture, raw) or older_than)
    runs = _find_old_runs(instance, capture, keys, before)
    for run_id in runs:
        _delete_run(instance, run_id)
    storage = instance.event_log_storage
    if not isinstance(storage, SqlEventLogStorage):
        return RecordReport(len(runs))
    names = [key.to_string() for key in keys]
    at = before.astimezone(dt.UTC).replace(tzinfo=None)
    return RecordReport(
        len(runs),
        _delete_check_results(storage, names, at),
        _delete_sensor_events(storage, raw, names, at),
    )


def _oldest_shown(
    instance: dg.DagsterInstance, capture: CdcCapture, raw: dg.AssetKey
) -> dt.datetime | None:
    """Return the time at which the oldest window with a partition key was landed."""
    windows = sorted(parse_windows(instance.get_dynamic_partitions(capture.windows_name)))
    keys = [window.key for window in windows[:_EXAMINED_KEYS]]
    if not keys:
        return None
    oldest = dg.AssetRecordsFilter(asset_key=raw, asset_partitions=keys)
    records = instance.fetch_materializations(oldest, limit=1, ascending=True).records
    return dt.datetime.fromtimestamp(records[0].timestamp, dt.UTC) if records else None


def _find_old_runs(
    instance: dg.DagsterInstance,
    capture: CdcCapture,
    keys: Collection[dg.AssetKey],
    before: dt.datetime,
) -> list[str]:
    """List the runs to delete."""
    tags = {CAPTURE_TAG: capture.name}
    # Of the times of a run, Dagster stores only the end without the time zone of the session.
    old = RunsFilter(tags=tags, statuses=FINISHED, updated_before=before + _ZONES)
    snapshots = RunsFilter(job_name=Names.of(capture).snapshot_job)
    kept = set(instance.get_run_ids(snapshots)) | set(_newest_runs(instance, keys))
    ended = (each for each in _page(instance, old) if _ended_at(each) < before.timestamp())
    return [run_id for each in ended if (run_id := each.dagster_run.run_id) not in kept]


def _page(instance: dg.DagsterInstance, filters: RunsFilter) -> Iterator[dg.RunRecord]:
    """Yield the records of runs; a record has all tags of its run, and runs may be many."""
    cursor: str | None = None
    while records := instance.get_run_records(filters, limit=RECORDS_AT_ONCE, cursor=cursor):
        yield from records
        cursor = records[-1].dagster_run.run_id


def _ended_at(record: dg.RunRecord) -> float:
    return record.update_timestamp.timestamp() if record.end_time is None else record.end_time


def _newest_runs(instance: dg.DagsterInstance, keys: Collection[dg.AssetKey]) -> Iterator[str]:
    """Yield the runs of the newest materialisations."""
    for record in instance.get_asset_records(list(keys)):
        newest = record.asset_entry.last_materialization
        if newest is not None:
            yield newest.run_id


def _delete_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run; the run itself last, so that the next call repeats an interrupted deletion."""
    storage = instance.event_log_storage
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    if isinstance(storage, SqliteEventLogStorage):
        # The run's database would keep its size, so its file is deleted.
        with storage.index_connection() as conn:
            storage.delete_events_for_run(conn, run_id)
        for ending in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(storage.path_for_shard(run_id) + ending).unlink()
    else:
        storage.delete_events(run_id)
    failpoints.reach(failpoints.AFTER_EVENTS_DELETED)
    instance.run_storage.delete_run(run_id)


def _delete_check_results(
    storage: SqlEventLogStorage, keys: Collection[str], before: dt.datetime
) -> int:
    """Delete old results of checks, except the newest result of each check."""
    table = AssetCheckExecutionsTable.c
    ours = table.asset_key.in_(keys)
    newest = (
        sa.select(sa.func.max(table.id)).where(ours).group_by(table.asset_key, table.check_name)
    )
    with storage.index_connection() as conn:
        # The time of creation is in the time zone of the session: compare the time of the event.
        # MySQL cannot read the table from which a statement deletes.
        kept = [row[0] for row in conn.execute(newest)]
        old = sa.and_(ours, table.evaluation_event_timestamp < before, table.id.not_in(kept))
        return int(conn.execute(sa.delete(AssetCheckExecutionsTable).where(old)).rowcount)


def _delete_sensor_events(
    storage: SqlEventLogStorage, raw: dg.AssetKey, keys: Collection[str], before: dt.datetime
) -> int:
    """Delete the old events of the lag sensor, which belong to no run.

    The log has no column for the asset of a check's result.
    """
    table = SqlEventLogStorageTable.c
    of_slot = sa.and_(
        table.dagster_event_type == DagsterEventType.ASSET_CHECK_EVALUATION.value,
        table.event.contains(f'"path": {raw.to_string()}', autoescape=True),
    )
    observed = sa.and_(
        table.dagster_event_type == DagsterEventType.ASSET_OBSERVATION.value,
        table.asset_key.in_(keys),
    )
    old = sa.and_(
        table.run_id == RUNLESS_RUN_ID, table.timestamp < before, sa.or_(of_slot, observed)
    )
    with storage.index_connection() as conn:
        deleted = _delete_events(conn, old)
    if storage.is_run_sharded:
        with storage.run_connection(RUNLESS_RUN_ID) as conn:
            _delete_events(conn, old)
    return deleted


def _delete_events(conn: Any, old: sa.ColumnElement[bool]) -> int:
    tags = AssetEventTagsTable
    ids = sa.select(SqlEventLogStorageTable.c.id).where(old)
    conn.execute(sa.delete(tags).where(tags.c.event_id.in_(ids)))
    return int(conn.execute(sa.delete(SqlEventLogStorageTable).where(old)).rowcount)
