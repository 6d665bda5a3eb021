"""The merge sensor: request a merge when landed windows wait, and never delay the capture.

A run merges every table that needs a merge, from the oldest unmerged window of any table through
the newest landed window. After each failed merge a table waits longer. The other tables continue.
A run at the end of its time gets a successor, which waits for the pool (`long_runs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus, RunRecord

from pgcdc_assets.lsn import LsnWindow
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
from pgcdc_assets.orchestration.runs.long_runs import find_outgoing, may_continue
from pgcdc_assets.orchestration.runs.records import (
    CAPTURE_TAG,
    MERGE_PURPOSE,
    PURPOSE_TAG,
    THROUGH_TAG,
    attempts_for,
    recent_runs,
    requested_tags,
    seconds_since_end,
    unfinished_runs,
)
from pgcdc_assets.orchestration.runs.snapshot_runs import SNAPSHOTS_TAG, RunningSnapshots
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress, sync_progress
from pgcdc_assets.orchestration.sensors.quiet_ticks import QuietTicks, read_versions
from pgcdc_assets.orchestration.state import CaptureState, TableState, read_state
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture

MINIMUM_INTERVAL_SECONDS = 2

_IS_MERGING = "a merge is running"
_ALL_MERGED = "every table is merged through the newest window"


def build_merge_sensor(
    capture: CdcCapture,
    keys: Mapping[tuple[str, str, int], dg.AssetKey],
    snapshot: dg.AssetKey,
    job: Any,
) -> dg.SensorDefinition:
    """Build the sensor.

    Args:
        keys: the SCD assets by schema, table and kind.
        snapshot: the snapshot asset.
    """
    names = Names.of(capture)
    copying = RunningSnapshots(capture, snapshot)
    quiet = QuietTicks()

    @dg.sensor(
        name=names.merge_sensor,
        description="Requests a merge of the windows that are captured and not merged.",
        job=job,
        minimum_interval_seconds=MINIMUM_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={names.lake},
        tags={CAPTURE_TAG: capture.name, PURPOSE_TAG: "merge"},
    )
    @tick_failures(capture.name)
    def merges(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        lake: LakeResource = getattr(context.resources, names.lake)
        progress = sync_progress.get()
        close_dead_runs(context.instance, capture.name, frozenset(keys.values()))
        # Look for a running merge before the state is read. Otherwise the sensor would request the
        # windows again that a merge has finished in between.
        running = list(
            unfinished_runs(context.instance, names.merge_work, frozenset(keys.values()))
        )
        is_merging = bool(running)
        outgoing = find_outgoing(context.instance, running, names.merge_pool)
        if is_merging and progress is None and outgoing is None:
            # Most evaluations end here while changes arrive, and `read_state` opens every table.
            return dg.SkipReason(_IS_MERGING)
        zone = lake.zone(capture.name)
        may_be_quiet = progress is None and outgoing is None
        if may_be_quiet and quiet.is_quiet(zone):
            return dg.SkipReason(_ALL_MERGED)
        versions = read_versions(zone) if may_be_quiet else ()
        state = read_state(zone, capture)
        if progress is not None:
            epoch = state.epoch.epoch if state.epoch is not None else 0
            progress.is_merged = all(progress.has_merged(table, epoch) for table in state.tables)
        copied = copying.find(context.instance, zone)
        tick = _Tick(
            *(capture, dict(keys), context.instance, zone, copying),
            *(state, progress, is_merging, outgoing, copied),
        )
        answer = tick.run()
        is_merged = isinstance(answer, dg.SkipReason) and answer.skip_message == _ALL_MERGED
        if may_be_quiet and is_merged:
            quiet.remember(zone, versions)
        else:
            quiet.forget(zone)
        if progress is not None and isinstance(answer, dg.SkipReason):
            progress.waiting = answer.skip_message or ""
        return answer

    return merges


@dataclass
class _Tick:
    """One evaluation of the sensor.

    Attributes:
        outgoing: a running merge that needs a successor.
        copied: tables with a running re-snapshot.
    """

    capture: CdcCapture
    keys: dict[tuple[str, str, int], dg.AssetKey]
    instance: dg.DagsterInstance
    zone: RawZone
    copying: RunningSnapshots
    state: CaptureState
    progress: SyncProgress | None
    is_merging: bool
    outgoing: dg.DagsterRun | None
    copied: frozenset[str]

    def run(self) -> dg.SensorResult | dg.SkipReason:
        if self.state.captured_through is None:
            return dg.SkipReason("nothing is captured yet")
        # The outgoing run may have merged everything at this moment.
        succeeds = self.outgoing is not None and self.progress is None
        behind = [table for table in self.state.tables if table.needs_merge]
        if not behind and not succeeds:
            return dg.SkipReason(self._waits_for_snapshots() or _ALL_MERGED)
        behind = [table for table in behind if not self._is_copied(table)]
        if not behind and not succeeds:
            if self.progress is not None:
                self.progress.is_blocked = True
            return dg.SkipReason(f"re-snapshot running: {', '.join(sorted(self.copied))}")
        known = self.instance.get_dynamic_partitions(self.capture.windows_name)
        windows = parse_windows(known)
        landed = select_landed(self.zone, windows, self.state.captured_through)
        if not landed:
            return dg.SkipReason("no window is landed yet")
        if self.progress is not None and self.is_merging:
            self.progress.is_blocked = True
            return dg.SkipReason(_IS_MERGING)
        ready, pause = behind, math.inf
        if self.progress is None:
            pauses = [(table, self._pause_left(table)) for table in behind]
            ready = [table for table, left in pauses if not left]
            pause = min((left for _, left in pauses if left), default=math.inf)
        if not ready and not succeeds:
            return dg.SkipReason("the newest merges failed, and are retried later")
        selected = self._select(ready)
        if not selected:
            # The outgoing run ends without a successor, because all tables are copied or fail.
            # Dagster would take an empty selection for all tables.
            return dg.SkipReason(_IS_MERGING)
        request = self._request(known, landed, ready, selected, pause)
        return dg.SensorResult(run_requests=[request])

    def _waits_for_snapshots(self) -> str:
        """Name the tables that wait for an automatic re-snapshot; empty if none does."""
        waiting = {t.table.qualified_name for t in self.state.tables if t.is_held}
        return f"waiting for a re-snapshot: {', '.join(sorted(waiting))}" if waiting else ""

    def _select(self, ready: Sequence[TableState]) -> list[dg.AssetKey]:
        """Return the tables to merge.

        Include idle tables: their merge is cheap, and the UI shows their partitions as merged.
        """
        failing = {self._key(t) for t in self.state.tables if t.needs_merge and t not in ready}
        uncopied = {
            self._key(t)
            for t in self.state.tables
            if self._is_copied(t) or ((t.snapshot_at is None or t.is_held) and not t.needs_merge)
        }
        return [key for key in self.keys.values() if key not in failing | uncopied]

    def _request(
        self,
        keys: Sequence[str],
        landed: list[LsnWindow],
        ready: list[TableState],
        selected: list[dg.AssetKey],
        pause: float,
    ) -> dg.RunRequest:
        """Request a merge.

        Args:
            keys: the partition keys of all windows, in the order in which they were added.
            ready: the tables that wait for a merge.
            selected: the assets to merge.
            pause: the run does not continue longer, because a table that it leaves out is then
                retried.
        """
        last = landed[-1]
        unmerged = landed[landed.index(self._first_unmerged(landed, ready)) :]
        shown = find_shown_windows(unmerged, len(selected))
        past = attempts_for(self.instance, self.capture.name, "merge", {THROUGH_TAG: last.key})
        return dg.RunRequest(
            run_key=f"{self.capture.name}:merge:{last.key}:{past.newest}",
            job_name=Names.of(self.capture).merge_job,
            asset_selection=selected,
            # A selection of assets includes all their checks, and most checks read whole tables.
            # The merge evaluates the cheap checks without a selection.
            asset_check_keys=[],
            tags={
                **build_shown_range_tags(keys, shown),
                **requested_tags(self.capture.name, MERGE_PURPOSE),
                THROUGH_TAG: last.key,
                SNAPSHOTS_TAG: self.copying.digest(self.zone, self.copied),
                **may_continue(self.capture.windows, self.progress, pause),
            },
        )

    def _first_unmerged(self, landed: list[LsnWindow], ready: list[TableState]) -> LsnWindow:
        """Return the oldest landed window that the instance does not show as merged everywhere.

        Args:
            ready: the tables; if there is none, the newest landed window is returned.
        """
        if not ready:
            return landed[-1]
        shown = [self._shown_through(table) for table in ready]
        marks = [window for window in shown if window is not None]
        if len(marks) < len(ready):
            return landed[0]
        later = [window for window in landed if window > min(marks)]
        return later[0] if later else landed[-1]

    def _shown_through(self, table: TableState) -> LsnWindow | None:
        if table.watermark is None:
            return None
        return find_shown_through(self.instance, self._key(table))

    def _pause_left(self, table: TableState) -> float:
        """Return the seconds until a table may be merged again; 0 without a failure."""
        failures = [record for record in self._recent if self._failed(record, table)]
        since = seconds_since_end(failures)
        pause = self.capture.windows.backoff(len(failures))
        return 0.0 if since is None else max(0.0, pause - since)

    @cached_property
    def _recent(self) -> list[RunRecord]:
        return recent_runs(self.instance, self.capture.name, "merge")

    def _failed(self, record: RunRecord, table: TableState) -> bool:
        """Return whether a finished run should have merged the table and failed."""
        run = record.dagster_run
        selection = run.asset_selection
        if selection is not None and self._key(table) not in selection:
            return False
        if run.status == DagsterRunStatus.SUCCESS:
            return False
        through = LsnWindow.parse(run.tags[THROUGH_TAG]).end_position
        return table.merged_through is None or table.merged_through < through

    def _is_copied(self, table: TableState) -> bool:
        return table.table.partition_key in self.copied

    def _key(self, table: TableState) -> dg.AssetKey:
        return self.keys[table.table.schema, table.table.table, table.scd]
