"""The raw asset: one partition is one window of WAL, which is landed once.

A run lands one window, or several windows in stream order, over one stream. A window that was
landed before is verified and reported with the same figures, so a partition can be materialised
again. A run that the lag sensor requested also opens and lands further windows by the rules of the
sensor. So does a run of `pgcdc sync`, through the barrier.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg

from pgcdc_assets.capture.cancellation import CancellationToken, Work
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.capture.window import NOT_ACKNOWLEDGED
from pgcdc_assets.errors import PgcdcError, TransientError, WindowUnavailable
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.orchestration.checks.raw import (
    COUNTED_AS_DECODED,
    NO_PARKED_ROWS,
    WITHOUT_GAPS,
    check_windows,
    evaluation_of,
    rows_missing,
)
from pgcdc_assets.orchestration.metadata import capture_metadata
from pgcdc_assets.orchestration.names import Names, StepKeys
from pgcdc_assets.orchestration.partitions import parse_windows, read_run_windows
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.runs.claims import claimed_step
from pgcdc_assets.orchestration.runs.failures import dagster_failures
from pgcdc_assets.orchestration.runs.long_runs import LongRun
from pgcdc_assets.orchestration.runs.records import ADOPT_SLOT_TAG
from pgcdc_assets.orchestration.runs.run_reports import RunReports
from pgcdc_assets.orchestration.runs.sync_progress import sync_progress
from pgcdc_assets.orchestration.sensors.next_window import (
    Capture,
    CaptureProgress,
    may_wait_for_changes,
    plan_window,
)
from pgcdc_assets.orchestration.sensors.window_keys import find_unrecorded
from pgcdc_assets.postgres.stream.plugin_options import Origin, PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.raw.changes import Recount
from pgcdc_assets.raw.maintenance import RawMaintenanceReport, maintain_raw_zone
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import StreamPolicy


def build_raw_asset(
    capture: CdcCapture,
    spec: dg.AssetSpec,
    sources: Mapping[CdcTable, dg.AssetKey],
    partitions: dg.PartitionsDefinition[str],
) -> dg.AssetsDefinition:
    """Build the asset that lands windows.

    Args:
        sources: the source tables' keys, on which the asset depends.
    """
    names = Names.of(capture)
    step = StepKeys(capture.name)

    @dg.multi_asset(
        name=names.land_step,
        specs=[spec.replace_attributes(deps=step.sources(sources))],
        partitions_def=partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        check_specs=[
            dg.AssetCheckSpec(
                WITHOUT_GAPS,
                asset=spec.key,
                description="The landed windows follow each other without a gap or an overlap.",
            ),
            dg.AssetCheckSpec(
                COUNTED_AS_DECODED,
                asset=spec.key,
                description="The files of the raw zone hold as many rows of the window as were "
                "decoded.",
            ),
            dg.AssetCheckSpec(
                NO_PARKED_ROWS,
                asset=spec.key,
                description="No table waits for a new snapshot because of rows that cannot be "
                "decoded. Such rows are in raw/changes with their bytes, as operation P.",
            ),
        ],
        pool=names.slot_pool,
        required_resource_keys={names.postgres, names.lake},
    )
    @claimed_step
    def raw(context: dg.AssetExecutionContext) -> Any:
        postgres: PostgresResource = getattr(context.resources, names.postgres)
        lake: LakeResource = getattr(context.resources, names.lake)
        following = LongRun.of(context, names.slot_pool, capture.windows)
        with dagster_failures(capture.name), ExitStack() as held:
            windows = read_run_windows(context.partition_keys)
            zone = lake.zone(capture.name)
            adopts = capture.adopt_slot or ADOPT_SLOT_TAG in context.run.tags
            limits = replace(
                capture_limits(capture.stream),
                heartbeat=capture.heartbeat,
                messages=capture.messages,
                failover=capture.failover,
                adopt_slot=adopts,
            )
            session = held.enter_context(
                CaptureSession(
                    postgres.settings(),
                    zone,
                    capture.slot,
                    capture.publication,
                    limits,
                    on_report=RunReports(context, spec.key).record,
                )
            )
            landing = _Landing(context, capture, zone, session)
            landing.check_written(windows[-1])
            recounts = []
            for window in windows:
                metadata, recount = yield from _land_or_judge(landing, window, spec.key)
                recounts.append(recount)
                context.add_asset_metadata(metadata, asset_key=spec.key, partition_key=window.key)
            checks = check_windows(landing.zone, spec.key, recounts, capture.table_names)
            yield from _stop_if_incomplete(recounts, checks)
            yield dg.MaterializeResult(asset_key=spec.key, check_results=checks)
            landing.maintain_raw_zone()
            for window in landing.next_windows(following, spec.key):
                metadata, recount = yield from _land_or_judge(landing, window, spec.key)
                checks = check_windows(landing.zone, spec.key, [recount], capture.table_names)
                yield from _stop_if_incomplete([recount], checks)
                yield dg.AssetMaterialization(spec.key, partition=window.key, metadata=metadata)
                for check in checks:
                    yield evaluation_of(check, window)
                landing.maintain_raw_zone()
            landing.finish()

    return step.restore(raw)


def _land_or_judge(
    landing: "_Landing", window: LsnWindow, raw: dg.AssetKey
) -> Generator[dg.AssetCheckEvaluation, None, tuple[dict[str, Any], Recount]]:
    """Land a window; if its rows are gone, record a failed check of the asset.

    Raises:
        WindowUnavailable: the window was captured before, and its rows are gone.
    """
    try:
        return landing.land(window)
    except WindowUnavailable as error:
        yield evaluation_of(rows_missing(landing.zone.name, raw, error))
        raise


def _stop_if_incomplete(
    recounts: Sequence[Recount], checks: Sequence[dg.AssetCheckResult]
) -> Iterator[dg.AssetCheckEvaluation]:
    """Fail the run, and record the failed checks, if decoded rows are missing.

    Raises:
        WindowUnavailable: the raw zone lacks decoded rows.
    """
    if all(recount.is_complete for recount in recounts):
        return
    for check in checks:
        yield evaluation_of(check)
    for recount in recounts:
        recount.check()


@dataclass
class _Landing:
    """The landings of one run."""

    context: dg.AssetExecutionContext
    capture: CdcCapture
    zone: RawZone
    session: CaptureSession
    _last: LsnWindow | None = None
    _opened_at: float = field(default_factory=time.monotonic)

    def land(self, window: LsnWindow) -> tuple[dict[str, Any], Recount]:
        """Land a window; return its metadata, and its rows as counted again."""
        self._last, self._opened_at = window, time.monotonic()
        report = self.session.land(window)
        recount = self.zone.changes.recount(window)
        self.context.log.info(
            f"Window {window.key}: {report.row_count} changes in "
            f"{report.transaction_count} transactions"
            + (", captured before" if report.already_captured else "")
        )
        for warning, count in sorted(report.warnings.items()):
            self.context.log.warning(f"Window {window.key}: {warning} ({count})")
        return capture_metadata(report, recount.decoded), recount

    def check_written(self, window: LsnWindow) -> None:
        """Check that the server has written the WAL of a requested window.

        The landing of a later window, whose key a person has typed in the UI, would wait without an
        end, and no other window would be captured.

        Raises:
            TransientError: the server may write the WAL later.
        """
        epoch = self.zone.epochs.latest()
        if epoch is None or window.epoch != epoch.epoch:
            return
        captured = self.zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
        if window.end <= captured:
            return
        written = self.session.read_written_lsn()
        # If the server has lost captured WAL, the landing raises the error.
        if captured <= written < window.end:
            raise TransientError(
                reason=f"Window {window.key} ends at {window.end}, but the server has written WAL "
                f"through {written} only. Select a window that the lag sensor has opened."
            )

    def next_windows(self, following: LongRun, raw: dg.AssetKey) -> Iterator[LsnWindow]:
        """Yield further windows to land, as long as the run may continue.

        The partition key is added before the window is landed. If the run is killed in between, the
        sensor requests the open window again.

        Windows that the run before this one has landed until now are skipped. If it was killed, it
        has not recorded the newest of them: these windows are verified and recorded.

        Args:
            raw: the raw asset.
        """
        landed = self._find_landed()
        keys = set(self.context.instance.get_dynamic_partitions(self.capture.windows_name))
        shown = [window for window in landed if window.key in keys]
        yield from find_unrecorded(self.context.instance, raw, shown)
        if landed:
            # The next window need not wait.
            due = time.monotonic() - self.capture.windows.max_age_seconds
            self._last, self._opened_at = landed[-1], due
        while (window := self._next(following)) is not None:
            self.context.instance.add_dynamic_partitions(self.capture.windows_name, [window.key])
            yield window

    def _find_landed(self) -> list[LsnWindow]:
        """Return the windows that are landed after the requested windows."""
        assert self._last is not None
        landed = self.zone.changes.landed_windows(self._last.epoch, self._last.end)
        return [summary.window for summary in landed]

    def _next(self, following: LongRun) -> LsnWindow | None:
        one_shot = sync_progress.get()
        try:
            if one_shot is not None:
                return self._opened(following, one_shot.barrier)
            return following.find(lambda: self._opened(following))
        except TransientError as error:
            # All open windows are landed. The sensor continues after the outage.
            self.context.log.info(f"No further window: {error}")
            return None

    def _opened(self, following: LongRun, barrier: Lsn | None = None) -> LsnWindow | None:
        assert self._last is not None
        progress = CaptureProgress(
            epoch=self._last.epoch,
            captured_through=self._last.end,
            flush_lsn=self.session.read_current_lsn(),
            seconds_since_landing=time.monotonic() - self._opened_at,
        )
        policy = self.capture.windows
        # The last window of a run has all that waits.
        through = progress.flush_lsn if following.is_ending else barrier
        plan = plan_window(progress, policy, through)
        if barrier is None and may_wait_for_changes(plan, progress, policy):
            if not self.session.has_changes():
                # The end of the run would cause another run, with a window.
                following.stay()
                return None
        if not isinstance(plan, Capture):
            return None
        epoch = self.zone.epochs.latest()
        keys = self.context.instance.get_dynamic_partitions(self.capture.windows_name)
        is_newest = max(parse_windows(keys), default=self._last) == self._last
        if epoch is None or epoch.epoch != self._last.epoch or not is_newest:
            # The sensor chooses the next window.
            following.stop()
            return None
        return plan.window

    def finish(self) -> None:
        """End the stream; a lost confirmation does not affect the landed windows."""
        try:
            if not self.session.finish():
                self.context.log.warning(f"End of the stream: {NOT_ACKNOWLEDGED}")
        except TransientError as error:
            self.context.log.info(f"End of the stream: {error}")

    def maintain_raw_zone(self) -> None:
        """Maintain the raw zone if necessary; an error does not affect the landed window."""
        try:
            # A write to the lake must not delay the termination of the run.
            report = Work(CancellationToken()).call(lambda: maintain_raw_zone(self.zone))
        except PgcdcError as error:
            self.context.log.warning(f"Maintenance of the raw zone was postponed: {error}")
            return
        if report != RawMaintenanceReport():
            self.context.log.info(
                f"Maintenance: {report.files_merged} files merged, {report.log_entries_saved} log "
                f"entries saved, {report.files_removed} files removed"
            )


def capture_limits(policy: StreamPolicy) -> CaptureLimits:
    """Return the limits of a capture from the declared settings."""
    return CaptureLimits(
        total_seconds=policy.total_seconds,
        slot_wait_seconds=policy.slot_wait_seconds,
        resume_seconds=policy.resume_seconds,
        resume_pause_seconds=policy.resume_pause_seconds,
        report_seconds=policy.report_seconds,
        malformed_folder=policy.malformed_folder,
        stream=StreamSettings(
            status_seconds=policy.status_seconds,
            silence_seconds=policy.silence_seconds,
            wire=WireSettings(batch_bytes=policy.batch_bytes),
            plugin=PluginOptions(
                Streaming(policy.streaming), policy.two_phase, Origin(policy.origin)
            ),
        ),
    )
