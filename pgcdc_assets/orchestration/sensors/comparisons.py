"""Requests of comparisons: tables whose values USING may have changed.

A run evaluates the check `equals_source` of one table, and records the result.
"""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg
from dagster import RunsFilter

from pgcdc_assets.orchestration.checks.scd import EQUALS_SOURCE
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs.records import (
    UNFINISHED,
    attempts_for,
    is_left_over,
    requested_tags,
)
from pgcdc_assets.orchestration.sensors.snapshot_requests import (
    EVENT_TAG,
    TABLES_TAG,
    event_key,
)
from pgcdc_assets.orchestration.state import find_uncertain_tables
from pgcdc_assets.raw.relations.uncertain_values import not_comparable
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.verify import is_comparable

PURPOSE = "compare"


def request_comparisons(
    instance: dg.DagsterInstance,
    zone: RawZone,
    capture: CdcCapture,
    scds: Mapping[tuple[CdcTable, int], dg.AssetKey],
) -> list[dg.RunRequest]:
    """Return a request per table whose values are uncertain, with a pause after each attempt.

    A table that cannot be compared gets a new snapshot instead.
    """
    requests = []
    for table, event in find_uncertain_tables(zone, capture).items():
        if not is_comparable(zone, table):
            zone.schema_events.record([not_comparable(event)])
            continue
        tags = {EVENT_TAG: event_key(event), TABLES_TAG: table.partition_key}
        past = attempts_for(instance, capture.name, PURPOSE, tags)
        since, pause = past.seconds_since_end, capture.windows.backoff(past.count)
        tags |= requested_tags(capture.name, PURPOSE)
        records = instance.get_run_records(RunsFilter(tags=tags, statuses=UNFINISHED))
        is_running = any(not is_left_over(instance, record) for record in records)
        if is_running or (since is not None and since < pause):
            continue
        requests.append(
            dg.RunRequest(
                run_key=f"{capture.name}:compare:{table.partition_key}:{tags[EVENT_TAG]}:"
                f"{past.newest}",
                job_name=Names.of(capture).check_job,
                asset_selection=[],
                asset_check_keys=[dg.AssetCheckKey(scds[table, 1], EQUALS_SOURCE)],
                tags=tags,
            )
        )
    return requests
