"""The lag sensor: read the slot and the lake, and open at most one window to capture.

The sensor keeps no cursor. It reads the runs first, then the slot, the lake, and the keys of the
instance. Each later reading can only be ahead of the earlier readings, so a capture that lands in
between does not look like a gap. A running capture opens its further windows itself
(`long_runs.py`); the sensor then opens no window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.partitions import build_range_tags
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.runs.dead_runs import close_dead_runs
from pgcdc_assets.orchestration.runs.failures import tick_failures
from pgcdc_assets.orchestration.runs.long_runs import find_outgoing, may_continue
from pgcdc_assets.orchestration.runs.records import (
    CAPTURE_TAG,
    PURPOSE_TAG,
    THROUGH_TAG,
    attempts_for,
    find_unfinished,
    requested_tags,
    seconds_since,
    unfinished_runs,
)
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress, sync_progress
from pgcdc_assets.orchestration.sensors.catalog_poll import CatalogPoll
from pgcdc_assets.orchestration.sensors.comparisons import request_comparisons
from pgcdc_assets.orchestration.sensors.lag_observation import LagObservation
from pgcdc_assets.orchestration.sensors.next_window import (
    Capture,
    CaptureProgress,
    Discard,
    Wait,
    plan_window,
)
from pgcdc_assets.orchestration.sensors.restored_lakes import RestoredLakes
from pgcdc_assets.orchestration.sensors.schema_observation import observe_schema_changes
from pgcdc_assets.orchestration.sensors.snapshot_requests import SnapshotNeeds
from pgcdc_assets.orchestration.sensors.source_status import read_source_status
from pgcdc_assets.orchestration.sensors.sync_barrier import fix_events, move_barrier
from pgcdc_assets.orchestration.sensors.unrecorded_snapshots import UnrecordedSnapshots
from pgcdc_assets.orchestration.sensors.window_keys import WindowKeys
from pgcdc_assets.orchestration.state import (
    captured_through,
    left_tables,
    newest_snapshots,
    read_gates,
)
from pgcdc_assets.postgres.slots.health import SlotProblem, slot_health
from pgcdc_assets.postgres.slots.status import SlotStatus
from pgcdc_assets.postgres.wal.positions import read_written_lsn
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable

MINIMUM_INTERVAL_SECONDS = 2


@dataclass(frozen=True)
class LagSensorAssets:
    """The assets and jobs of the sensor."""

    raw: dg.AssetKey
    snapshot: dg.AssetKey
    scds: Mapping[tuple[CdcTable, int], dg.AssetKey]
    sources: Mapping[CdcTable, dg.AssetKey]
    jobs: tuple[Any, ...]


def build_lag_sensor(capture: CdcCapture, targets: LagSensorAssets) -> dg.SensorDefinition:
    """Build the sensor that opens windows and requests snapshots."""
    names = Names.of(capture)
    poll = CatalogPoll(capture)
    unrecorded = UnrecordedSnapshots(capture, targets.snapshot)
    restored = RestoredLakes()

    @dg.sensor(
        name=names.lag_sensor,
        description=f"Reads the status of slot {capture.slot}, records its lag, opens windows by "
        "bytes or age, and requests missing snapshots.",
        jobs=list(targets.jobs),
        minimum_interval_seconds=MINIMUM_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={names.postgres, names.lake},
        tags={CAPTURE_TAG: capture.name, PURPOSE_TAG: "lag"},
    )
    @tick_failures(capture.name)
    def lag(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        postgres: PostgresResource = getattr(context.resources, names.postgres)
        lake: LakeResource = getattr(context.resources, names.lake)
        zone = lake.zone(capture.name)
        progress = sync_progress.get()
        close_dead_runs(context.instance, capture.name, {targets.raw, targets.snapshot})
        # Look for a running capture first, because a capture opens windows itself: if none runs,
        # the later readings cannot be stale.
        running = list(unfinished_runs(context.instance, names.capture_work, {targets.raw}))
        try:
            with postgres.query_connection("sensor") as conn:
                status, flush_lsn = read_source_status(conn, zone, capture.slot, progress)
                notes = poll.report(context, conn, zone, progress)
        except TransientError as error:
            if progress is not None:
                raise
            return dg.SkipReason(str(error))
        outgoing = find_outgoing(context.instance, running, names.slot_pool)
        tick = _Tick(
            capture,
            targets,
            context,
            zone,
            postgres,
            status,
            flush_lsn,
            progress,
            bool(running),
            outgoing if progress is None else None,
            notes,
            unrecorded,
            restored,
        )
        return tick.run()

    return lag


@dataclass
class _Tick:
    """One evaluation of the sensor.

    Attributes:
        outgoing: a running capture that needs a successor.
    """

    capture: CdcCapture
    targets: LagSensorAssets
    context: dg.SensorEvaluationContext
    zone: RawZone
    postgres: PostgresResource
    status: SlotStatus | None
    flush_lsn: Lsn
    progress: SyncProgress | None
    is_capturing: bool
    outgoing: dg.DagsterRun | None
    reasons: list[str]
    unrecorded: UnrecordedSnapshots
    restored: RestoredLakes

    def __post_init__(self) -> None:
        self.names = Names.of(self.capture)
        self.requests: list[dg.RunRequest] = []
        self.partitions: list[Any] = []
        self.events: list[Any] = []
        self.observation = LagObservation(
            self.context.instance, self.capture, self.targets.raw, self.targets.scds
        )

    def run(self) -> dg.SensorResult:
        epoch = self.zone.epochs.latest()
        if self.progress is not None and epoch is not None:
            fix_events(self.progress, self.zone, epoch)
        self._request_snapshots(epoch)
        if epoch is not None:
            self.events += self.unrecorded.find(self.context.instance, self.zone, epoch)
            self._watch(epoch)
            if self.progress is None:
                self.requests += request_comparisons(
                    self.context.instance, self.zone, self.capture, self.targets.scds
                )
        reason = "; ".join(self.reasons) or "nothing to do"
        if self.progress is not None:
            self.progress.waiting = reason
        return dg.SensorResult(
            run_requests=self.requests,
            dynamic_partitions_requests=self.partitions,
            asset_events=self.events,
            skip_reason=None if self.requests else dg.SkipReason(reason),
        )

    def _watch(self, epoch: Epoch) -> None:
        through = captured_through(self.zone, epoch)
        status = self._read_usable_slot(through.lsn)
        self.restored.check(self.zone, self.capture, through)
        if self.progress is not None:
            move_barrier(self.progress, self.zone, self.capture, epoch, through, self.flush_lsn)
            self.progress.captured_through = through.lsn
        keys = WindowKeys(self.context, self.capture, self.zone, epoch, through)
        if not self.is_capturing:
            keys.delete_foreign(self._read_written_lsn)
        added = keys.add_landed(self.targets.raw)
        self.events += added
        if not (added or self.is_capturing):
            self.events += keys.record_landed(self.targets.raw)
        landed_ago = self._seconds_since_landing()
        lag_seconds = 0.0 if status.current_lsn <= through.lsn else landed_ago or 0.0
        self._observe(status, through.lsn, lag_seconds)
        self._open_window(epoch, keys, through, landed_ago)
        keys.prune()
        self.partitions += keys.requests

    def _read_usable_slot(self, through: Lsn) -> SlotStatus:
        """Return the slot's status.

        Raises:
            SlotMissing: the slot from which the raw zone was filled does not exist.
            SlotLost: the server removed WAL that the slot needs.
            SlotAdvanced: the slot is confirmed beyond the landed windows.
            RawZoneError: the server's WAL ends before the newest landed window.
        """
        health = slot_health(self.status, through)
        error = health.error(self.capture.slot, self.zone.uri, self.capture.name)
        # A running capture may have landed a window in between. A standby catches up.
        is_behind_for_now = health.problem is SlotProblem.REPLAYING or (
            health.problem is SlotProblem.SERVER_BEHIND and self.is_capturing
        )
        if error is not None and not is_behind_for_now:
            self.observation.record_unusable_slot(health, error)
            raise error
        if health.is_at_risk:
            self.context.log.warning(f"{health.risk} {health.risk_remedy}")
        assert health.status is not None
        return health.status

    def _request_snapshots(self, epoch: Epoch | None) -> None:
        tables = self.capture.tables
        copied = newest_snapshots(self.zone, epoch) if epoch is not None else {}
        gates = read_gates(self.zone, self.capture) if epoch is not None else {}
        left = left_tables(self.zone, self.capture)
        needs = SnapshotNeeds(
            [table.partition_key for table in tables],
            [t.partition_key for t in tables if t.name not in copied and t.name not in left],
            {
                name.partition_key: gate
                for name, gate in gates.items()
                if name not in left and (self.progress is None or self.progress.heals(gate))
            },
        )
        wanted = needs.plan()
        if not wanted:
            return
        instance = self.context.instance
        if find_unfinished(instance, self.names.snapshot_work, {self.targets.snapshot}):
            self._block("snapshots of tables are running")
            return
        for request in wanted:
            past = attempts_for(instance, self.capture.name, "snapshot", request.tags)
            pause = self.capture.windows.backoff(past.count)
            since = past.seconds_since_end if self.progress is None else None
            if since is not None and since < pause:
                self.reasons.append(f"the snapshot of {request.first} failed, and is retried later")
                continue
            if request.reason:
                self.context.log.warning(f"Re-snapshot requested. {request.reason}")
            self.requests.append(
                dg.RunRequest(
                    run_key=f"{self.capture.name}:copy:{request.key}:{past.newest}",
                    job_name=self.names.snapshot_job,
                    tags={
                        **build_range_tags(request.first, request.last),
                        **requested_tags(self.capture.name, "snapshot"),
                        **request.tags,
                        **request.reason_tags,
                    },
                )
            )

    def _open_window(
        self, epoch: Epoch, keys: WindowKeys, through: Position, landed_ago: float | None
    ) -> None:
        instance, open_windows = self.context.instance, keys.open
        past = None
        if open_windows and not self.is_capturing:
            past = attempts_for(
                instance, self.capture.name, "capture", {THROUGH_TAG: open_windows[0].key}
            )
        plan = plan_window(
            CaptureProgress(
                epoch=epoch.epoch,
                captured_through=through.lsn,
                flush_lsn=self.flush_lsn,
                open_windows=open_windows,
                attempts=past.count if past else 0,
                # `pgcdc sync` does not wait for the pause after an earlier failure.
                seconds_since_attempt=past.seconds_since_end
                if past and self.progress is None
                else None,
                seconds_since_landing=landed_ago,
                is_capturing=self.is_capturing,
            ),
            self.capture.windows,
            self.progress.barrier if self.progress is not None else None,
        )
        if isinstance(plan, Wait):
            if self.outgoing is not None:
                self._succeed(self.outgoing, keys.landed)
            elif self.is_capturing:
                self._block(plan.reason)
            else:
                self.reasons.append(plan.reason)
            return
        if isinstance(plan, Discard):
            reason = f"window {plan.window.key} overlaps a captured window and is discarded"
            self.context.log.warning(reason)
            self.reasons.append(reason)
            keys.delete(plan.window.key)
            return
        if plan.is_new:
            keys.add(plan.window)
        self._capture(plan)

    def _block(self, reason: str) -> None:
        self.reasons.append(reason)
        if self.progress is not None:
            self.progress.is_blocked = True

    def _capture(self, plan: Capture) -> None:
        key, instance = plan.window.key, self.context.instance
        past = attempts_for(instance, self.capture.name, "capture", {THROUGH_TAG: key})
        self._request(key, f"{plan.attempt}:{past.newest}")

    def _succeed(self, outgoing: dg.DagsterRun, landed: list[LsnWindow]) -> None:
        """Request the successor of a running capture, which verifies the newest landed window.

        A new window could overlap the next window of the running capture.
        """
        if landed:
            self._request(landed[-1].key, f"after {outgoing.run_id}")

    def _request(self, key: str, occasion: str) -> None:
        """Request a capture of a window; Dagster ignores a second request for an occasion."""
        tags = {
            **requested_tags(self.capture.name, "capture"),
            THROUGH_TAG: key,
            **may_continue(self.capture.windows, self.progress),
        }
        run_key = f"{self.capture.name}:{key}:{occasion}"
        job_name = self.names.capture_job
        self.requests.append(
            dg.RunRequest(run_key=run_key, job_name=job_name, partition_key=key, tags=tags)
        )

    def _read_written_lsn(self) -> Lsn:
        with self.postgres.query_connection("sensor") as conn:
            return read_written_lsn(conn)

    def _observe(self, status: SlotStatus, through: Lsn, lag_seconds: float) -> None:
        observation = self.observation
        observation.observe(self.postgres.settings(), self.zone, status, through, lag_seconds)
        for error in observation.moved:
            self.context.log.error(str(error))
            self.reasons.append(str(error))
        self.events += observation.events
        if observation.events or self.progress is not None:
            self.events += observe_schema_changes(
                self.context.instance,
                self.zone,
                self.capture,
                self.targets.snapshot,
                self.targets.sources,
                self.targets.scds,
            )

    def _seconds_since_landing(self) -> float | None:
        event = self.context.instance.get_latest_materialization_event(self.targets.raw)
        return None if event is None else seconds_since(event.timestamp)
