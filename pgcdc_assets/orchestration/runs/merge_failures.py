"""Reasons of failed merges, read from the failed runs."""

from __future__ import annotations

from collections.abc import Collection

import dagster as dg
from dagster import DagsterEventType, DagsterRunStatus, RunsFilter

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.runs.failures import FAILED_TABLES
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG, PURPOSE_TAG, THROUGH_TAG
from pgcdc_assets.orchestration.state import TableState

_RUNS_TO_READ = 20


def find_merge_failures(
    instance: dg.DagsterInstance, capture: str, tables: Collection[TableState]
) -> dict[str, str]:
    """Find the newest failure of each table that has not been merged since.

    Returns:
        Sentences by qualified name of the table.
    """
    waiting = {state.table.qualified_name: state for state in tables if state.needs_merge}
    if not waiting:
        return {}
    tags = {CAPTURE_TAG: capture, PURPOSE_TAG: "merge"}
    failed = RunsFilter(tags=tags, statuses=[DagsterRunStatus.FAILURE])
    found: dict[str, str] = {}
    for run in instance.get_runs(failed, limit=_RUNS_TO_READ):
        through = LsnWindow.parse(run.tags[THROUGH_TAG]).end_position
        for table, reason in _failed_tables(instance, run.run_id).items():
            state = waiting.get(table)
            if state is None or table in found:
                continue
            if state.watermark is None or state.watermark < through:
                found[table] = reason
    return found


def _failed_tables(instance: dg.DagsterInstance, run_id: str) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.STEP_FAILURE):
        event = entry.dagster_event
        failure = event.step_failure_data.user_failure_data if event is not None else None
        value = failure.metadata.get(FAILED_TABLES) if failure is not None else None
        if isinstance(value, dg.TableMetadataValue):
            for record in value.records:
                reasons[str(record.data["table"])] = str(record.data["reason"])
    return reasons
