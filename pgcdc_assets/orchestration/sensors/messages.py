"""The sensor of logical messages: request an append when landed messages wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from pgcdc_assets.lsn import LsnWindow, Position
from pgcdc_assets.orchestration.data_versions import find_shown_through
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.partitions import (
    build_shown_range_tags,
    find_shown_windows,
    parse_windows,
    select_landed,
)
from pgcdc_assets.orchestration.resources import LakeResource
from pgcdc_assets.orchestration.runs.dead_runs import close_dead_runs
from pgcdc_assets.orchestration.runs.failures import tick_failures
from pgcdc_assets.orchestration.runs.long_runs import may_continue
from pgcdc_assets.orchestration.runs.records import (
    CAPTURE_TAG,
    MESSAGES_PURPOSE,
    PURPOSE_TAG,
    THROUGH_TAG,
    attempts_for,
    find_unfinished,
    requested_tags,
)
from pgcdc_assets.orchestration.runs.sync_progress import sync_progress
from pgcdc_assets.orchestration.state import captured_through
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture
from pgcdc_assets.tables.messages import MessageTable

MINIMUM_INTERVAL_SECONDS = 5

_NOTHING_WAITS = "no logical message waits"


def build_messages_sensor(
    capture: CdcCapture, messages: dg.AssetKey, job: Any
) -> dg.SensorDefinition:
    """Build the sensor.

    Args:
        messages: the asset of logical messages.
    """
    names = Names.of(capture)
    waiting = WaitingMessages(capture, messages)

    @dg.sensor(
        name=names.messages_sensor,
        description="Requests an append of the logical messages that are landed.",
        job=job,
        minimum_interval_seconds=MINIMUM_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={names.lake},
        tags={CAPTURE_TAG: capture.name, PURPOSE_TAG: MESSAGES_PURPOSE},
    )
    @tick_failures(capture.name)
    def appends(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        lake: LakeResource = getattr(context.resources, names.lake)
        keys = frozenset({messages})
        close_dead_runs(context.instance, capture.name, keys)
        if find_unfinished(context.instance, names.messages_work, keys) is not None:
            return dg.SkipReason("an append is running")
        return waiting.find_request(context.instance, lake.zone(capture.name))

    return appends


class WaitingMessages:
    """The landed messages that are not in their table yet.

    A heartbeat of the package is a logical message too, and is no row of the table. For each
    watermark, a position below which nothing else waits is remembered, so that heartbeats are read
    once.

    A run that was killed after its append has materialised nothing. Its windows are requested
    again, although none of their messages waits.
    """

    def __init__(self, capture: CdcCapture, messages: dg.AssetKey) -> None:
        """Create the answer for one evaluation or more.

        Args:
            messages: the asset of logical messages.
        """
        self._capture = capture
        self._messages = messages
        self._watermark: Position | None = None
        self._none_below: Position | None = None

    def find_request(
        self, instance: dg.DagsterInstance, zone: RawZone
    ) -> dg.RunRequest | dg.SkipReason:
        """Return the request for an append, or the reason why none is necessary or possible."""
        epoch = zone.epochs.latest()
        if epoch is None:
            return dg.SkipReason("nothing is captured yet")
        through = captured_through(zone, epoch)
        table = MessageTable(zone)
        mark = table.watermark()
        if mark != self._watermark:
            # Messages were appended, or the table was deleted.
            self._watermark, self._none_below = mark, None
        is_waiting = table.find_waiting(self._none_below or mark, through) is not None
        if not is_waiting:
            self._none_below = through
        shown = self._shown_through(instance, mark)
        if not is_waiting and shown == mark:
            return dg.SkipReason(_NOTHING_WAITS)
        known = instance.get_dynamic_partitions(self._capture.windows_name)
        landed = select_landed(zone, parse_windows(known), through)
        if not landed:
            return dg.SkipReason("no window is landed yet")
        later = [window for window in landed if shown is None or window.end_position > shown]
        if not is_waiting:
            # Keys may be missing: the windows above the watermark would be requested repeatedly.
            later = [window for window in later if mark is not None and window.end_position <= mark]
            if not later:
                return dg.SkipReason(_NOTHING_WAITS)
        return self._request(instance, known, later or landed[-1:])

    def _shown_through(
        self, instance: dg.DagsterInstance, mark: Position | None
    ) -> Position | None:
        """Return the end of the appended windows that the instance shows as materialised."""
        shown = find_shown_through(instance, self._messages)
        if mark is None or shown is None:
            return None
        return min(mark, shown.end_position)

    def _request(
        self,
        instance: dg.DagsterInstance,
        keys: Sequence[str],
        windows: Sequence[LsnWindow],
    ) -> dg.RunRequest | dg.SkipReason:
        """Return the request to materialise windows, or the reason for a pause.

        Args:
            keys: the partition keys of all windows, in the order in which they were added.
        """
        capture, last = self._capture, windows[-1]
        past = attempts_for(instance, capture.name, MESSAGES_PURPOSE, {THROUGH_TAG: last.key})
        pause, progress = capture.windows.backoff(past.count), sync_progress.get()
        since = past.seconds_since_end if progress is None else None
        if since is not None and since < pause:
            return dg.SkipReason("the newest append failed, and is retried later")
        shown = find_shown_windows(windows, 1)
        return dg.RunRequest(
            run_key=f"{capture.name}:{MESSAGES_PURPOSE}:{last.key}:{past.newest}",
            job_name=Names.of(capture).messages_job,
            tags={
                **build_shown_range_tags(keys, shown),
                **requested_tags(capture.name, MESSAGES_PURPOSE),
                THROUGH_TAG: last.key,
                **may_continue(capture.windows, progress),
            },
        )
