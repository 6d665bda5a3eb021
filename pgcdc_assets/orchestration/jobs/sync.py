"""One-shot sync: capture and merge, through Dagster, everything committed before the start.

This module evaluates the sensors that the daemon evaluates. It executes the requested runs in this
process on the persistent instance, so the UI shows runs, partitions and lag as usual. The barrier
is the WAL position at the first evaluation. The sync ends at the barrier, even if writers continue.

If the snapshot or the merge of a table fails, the sync skips the table from then on and raises its
error at the end. The capture and the other tables continue, so the server does not retain WAL for
the failed table. A failed capture ends the sync at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import dagster as dg

from pgcdc_assets.activity import activity
from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.orchestration.assets.scd import find_scd_tables
from pgcdc_assets.orchestration.checks.source_tables import find_declared_moves
from pgcdc_assets.orchestration.jobs.in_process import build_pool_wait, run_in_process
from pgcdc_assets.orchestration.jobs.requested_job import requested_job
from pgcdc_assets.orchestration.jobs.sync_comparisons import compare_uncertain_tables
from pgcdc_assets.orchestration.jobs.sync_merges import find_behind
from pgcdc_assets.orchestration.jobs.sync_messages import find_message_requests
from pgcdc_assets.orchestration.jobs.sync_passes import FailedParts, Request, run_passes
from pgcdc_assets.orchestration.jobs.sync_report import SyncLimits, SyncReport
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.partitions import (
    PARTITION_TAG,
    RANGE_TAGS,
    build_range_tags,
    change_partitions,
    covered_keys,
    group_neighbours,
)
from pgcdc_assets.orchestration.project.code_location import CodeLocation, LoadedCapture
from pgcdc_assets.orchestration.runs.dead_runs import close_dead_runs
from pgcdc_assets.orchestration.runs.errors import error_of_run, join_errors, name_tables
from pgcdc_assets.orchestration.runs.partial_request import PartialRequest, partial_request
from pgcdc_assets.orchestration.runs.records import (
    ADOPT_SLOT_TAG,
    CAPTURE_TAG,
    PARTIAL_TAG,
    PURPOSE_TAG,
    THROUGH_TAG,
    find_unfinished,
)
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress, sync_progress
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.settings import CdcTable

Say = Callable[[str], None]


def sync_capture(
    instance: dg.DagsterInstance,
    location: CodeLocation,
    loaded: LoadedCapture,
    *,
    say: Say = lambda line: None,
    limits: SyncLimits | None = None,
    resnapshot: Sequence[CdcTable] = (),
    partial: PartialRequest | None = None,
    adopt_slot: bool = False,
    barrier: Lsn | None = None,
) -> SyncReport:
    """Capture and merge one capture through the WAL position at the start.

    Args:
        say: function that prints a line of progress.
        resnapshot: tables to re-snapshot first.
        partial: a partial snapshot to take first.
        adopt_slot: take over a slot that another consumer has read.
        barrier: the LSN at which capture and merge end, in place of the current WAL position.

    Raises:
        PgcdcError: a run or a sensor failed. Of several errors, the worst is raised with the
            sentences of all. After the error of a snapshot or a merge, all other work is done.
    """
    tags = {ADOPT_SLOT_TAG: "true"} if adopt_slot else {}

    def begin(end: Lsn | None) -> _Sync:
        sync = _Sync(instance, location, loaded, say, limits or SyncLimits(), tags)
        sync.progress.barrier = end
        return sync

    def bring_through(end: Lsn | None, request: Request | None = None) -> SyncReport:
        return run_passes(loaded, lambda: begin(end), request, say)

    report = bring_through(barrier, (resnapshot, partial))
    # A run through a given LSN serves a comparison.
    return report if barrier else compare_uncertain_tables(loaded, bring_through, report)


class _Sync:
    def __init__(
        self,
        instance: dg.DagsterInstance,
        location: CodeLocation,
        loaded: LoadedCapture,
        say: Say,
        limits: SyncLimits,
        run_tags: dict[str, str],
    ) -> None:
        self.instance = instance
        self.repository = location.repository
        self.loaded = loaded
        self.name = loaded.capture.name
        self.names = Names.of(loaded.capture)
        self.say = say
        self.limits = limits
        self.pool_wait = build_pool_wait(
            instance, self.repository, self.name, limits.wait_seconds, say=say
        )
        self.run_tags = run_tags
        self.progress = SyncProgress(self.name)
        self.report = SyncReport(self.name)
        self.failures: list[PgcdcError] = []
        self.failed_snapshots: set[str] = set()
        self.took_snapshot = False
        self.failed_merges: set[dg.AssetKey] = set()
        self.merged: dict[dg.AssetKey, LsnWindow] = {}

    def run(
        self, resnapshot: Sequence[CdcTable] = (), partial: PartialRequest | None = None
    ) -> SyncReport:
        token, partial_token = sync_progress.set(self.progress), partial_request.set(partial)
        try:
            if resnapshot:
                self._resnapshot(resnapshot)
            if partial is not None:
                self._resnapshot([partial.table], {PARTIAL_TAG: "true"})
            self._run_to_barrier()
            for request in find_message_requests(self.instance, self.repository, self.loaded):
                self._execute(request)
            settings, zone = self.loaded.postgres.settings(), self.loaded.lake.zone(self.name)
            self.failures += find_declared_moves(settings, zone, self.loaded.capture, "sync")
        except PgcdcError as error:
            self.failures.append(error)
        finally:
            sync_progress.reset(token)
            partial_request.reset(partial_token)
        if self.failures:
            raise join_errors(self.failures)
        self.report.barrier = str(self.progress.barrier)
        return self.report

    def _run_to_barrier(self) -> None:
        progress = self.progress
        waiting_since: float | None = None
        while True:
            progress.is_blocked, self.took_snapshot = False, False
            acted = self._execute_all(self._tick(self.names.lag_sensor))
            why_no_capture, progress.waiting = progress.waiting, ""
            merges = self._tick(self.names.merge_sensor)
            # The next tick moves the barrier behind a snapshot that was taken in this one.
            if not self.took_snapshot and self._is_through(merges):
                return
            acted = self._execute_all(merges) or acted
            if acted:
                waiting_since = None
                continue
            if self.failures and progress.captured_through is None and not progress.is_blocked:
                # All first snapshots failed, so there is no epoch to capture.
                return
            waiting_since = waiting_since or time.monotonic()
            self._wait(waiting_since, why_no_capture)

    def _resnapshot(
        self, tables: Sequence[CdcTable], further_tags: Mapping[str, str] | None = None
    ) -> None:
        """Re-snapshot tables by the job that materialises partitions of the snapshot asset."""
        if self.loaded.lake.zone(self.name).epochs.latest() is None:
            # The sensor requests the first snapshots of all tables.
            return
        job = self.repository.get_job(self.names.snapshot_job)
        keys = job.asset_layer.selected_asset_keys
        began = time.monotonic()
        while find_unfinished(self.instance, self.names.snapshot_work, keys) is not None:
            close_dead_runs(self.instance, self.name, keys)
            if time.monotonic() - began > self.limits.wait_seconds:
                raise TransientError(
                    reason=f"Another run takes snapshots of capture {self.name}, and did not end "
                    f"within {self.limits.wait_seconds:g} s. Run the command again."
                )
            time.sleep(self.limits.poll_seconds)
        order = [table.partition_key for table in self.loaded.capture.tables]
        for first, last in group_neighbours(order, [table.partition_key for table in tables]):
            tags = {
                CAPTURE_TAG: self.name,
                PURPOSE_TAG: "resnapshot",
                **build_range_tags(first, last),
                **(further_tags or {}),
            }
            self._execute(dg.RunRequest(job_name=self.names.snapshot_job, tags=tags))

    def _is_through(self, merges: Sequence[dg.RunRequest]) -> bool:
        """Return whether all changes before the barrier are captured, and merged if possible.

        If the daemon captures too and writers continue, the merge sensor requests a merge at each
        evaluation. A request alone does not show that a change before the barrier waits.
        """
        if not self.progress.is_captured or self.progress.barrier is None:
            return False
        if not merges and not self.failures:
            return self.progress.is_merged
        barrier = self.progress.barrier
        state = read_state(self.loaded.lake.zone(self.name), self.loaded.capture)
        assert state.epoch is not None
        epoch = state.epoch.epoch
        behind = [
            table
            for table in state.tables
            if table.table.partition_key not in self.failed_snapshots
            and not self.progress.has_merged(table, epoch)
        ]
        if not behind:
            return True
        # A table that did not fail is behind: it waits for a snapshot.
        if not merges or len(behind) > len(self.failed_merges):
            return False
        wanted = {key for request in merges for key in request.asset_selection or ()}
        return all(
            key in self.merged and self.merged[key].end >= barrier
            for key in wanted - self.failed_merges
        )

    def _tick(self, sensor_name: str) -> list[dg.RunRequest]:
        """Evaluate a sensor, apply its other requests, and return its run requests."""
        with self._timed("sensors"):
            sensor = self.repository.get_sensor_def(sensor_name)
            known = self.repository.get_top_level_resources()
            with dg.build_sensor_context(
                instance=self.instance,
                instance_ref=self.instance.get_ref(),
                repository_def=self.repository,
                sensor_name=sensor_name,
                resources={key: known[key] for key in sensor.required_resource_keys},
            ) as context:
                data = sensor.evaluate_tick(context)
            for event in data.asset_events:
                self.instance.report_runless_asset_event(event)
            for request in data.dynamic_partitions_requests or []:
                change_partitions(self.instance, request)
        return list(data.run_requests or [])

    def _execute_all(self, requests: Sequence[dg.RunRequest]) -> bool:
        """Execute the requests without their finished parts; return whether a run was executed."""
        remaining = [part for part in map(self._select_remaining, requests) if part is not None]
        for request in remaining:
            self._execute(request)
        return bool(remaining)

    def _select_remaining(self, request: dg.RunRequest) -> dg.RunRequest | None:
        """Return a request without tables that failed; None for a capture beyond the barrier."""
        if request.job_name == self.names.capture_job:
            return None if self.progress.is_captured else request
        if request.job_name == self.names.snapshot_job:
            has_failed = self.failed_snapshots.issuperset(self._requested_tables(request))
            return None if has_failed else request
        if not self.failed_merges:
            return request
        # The sensor requests a failed table at each evaluation, together with all idle tables.
        through = LsnWindow.parse(request.tags[THROUGH_TAG])
        left = [
            key
            for key in request.asset_selection or ()
            if key not in self.failed_merges and self.merged.get(key) != through
        ]
        if not left:
            return None
        checks = [key for key in request.asset_check_keys or () if key.asset_key in left]
        return request.with_replaced_attrs(asset_selection=left, asset_check_keys=checks)

    def _execute(self, request: dg.RunRequest) -> None:
        job_name = request.job_name or ""
        self._announce(job_name, request)
        if job_name == self.names.merge_job:
            self._merge(job_name, request)
        elif job_name == self.names.snapshot_job:
            self._take_snapshots(job_name, request)
        elif not (result := self._run(job_name, request)).success:
            raise error_of_run(result)

    def _take_snapshots(self, job_name: str, request: dg.RunRequest) -> None:
        result = self._run(job_name, request)
        self.took_snapshot = True
        if result.success:
            return
        events = result.get_asset_materialization_events()
        missed = set(self._requested_tables(request)) - {event.partition or "" for event in events}
        self.failed_snapshots |= missed
        tables = self.loaded.capture.tables
        names = [table.qualified_name for table in tables if table.partition_key in missed]
        self._defer(name_tables("Not copied", names, error_of_run(result)))

    def _merge(self, job_name: str, request: dg.RunRequest) -> None:
        wanted = set(request.asset_selection or ())
        try:
            with self._timed("session"), activity("start of the Spark session"):
                self.loaded.spark.session(self.loaded.lake.lake())
        except PgcdcError as error:
            self.failed_merges |= wanted
            self._defer(error)
            return
        result = self._run(job_name, request)
        events = result.get_asset_materialization_events()
        merged = {event.materialization.asset_key for event in events}
        through = LsnWindow.parse(request.tags[THROUGH_TAG])
        self.merged.update(dict.fromkeys(merged, through))
        if not result.success:
            # If the run failed after its last table, each further run would fail too.
            missed = find_behind(self.repository, self.loaded, wanted - merged) or wanted
            self.failed_merges |= missed
            names = {".".join(key.path[1:] or key.path) for key in missed}
            self._defer(name_tables("Not merged", names, error_of_run(result)))

    def _defer(self, error: PgcdcError) -> None:
        """Report an error, and keep it for the end of the sync."""
        self.say(f"{str(error).rstrip('.')}. Continuing with the rest.")
        self.failures.append(error)

    def _requested_tables(self, request: dg.RunRequest) -> list[str]:
        return covered_keys(request.tags, [t.partition_key for t in self.loaded.capture.tables])

    def _run(self, job_name: str, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        tags = {**request.tags, **self.run_tags}
        if request.run_key is not None:
            tags["dagster/run_key"] = request.run_key
        part = job_name.removeprefix(f"{self.name}_")
        with self._timed(part):
            job = requested_job(self.repository, job_name, request)
            result = run_in_process(job, self.instance, tags, wait=self.pool_wait)
        self.report.run_ids.append(result.run_id)
        self._note(part, result)
        return result

    def _announce(self, job_name: str, request: dg.RunRequest) -> None:
        first, last = (request.tags.get(tag) for tag in RANGE_TAGS)
        what = request.partition_key or request.tags.get(PARTITION_TAG)
        if what is None:
            what = first if first == last else f"{first} to {last}"
        self.say(f"{job_name}: {what}")

    def _note(self, part: str, result: dg.ExecuteInProcessResult) -> None:
        if part == "merge":
            self.report.merge_count += 1
        if part != "capture":
            return
        for event in result.get_asset_materialization_events():
            self.report.add_window(event.materialization.metadata)

    def _wait(self, since: float, reason: str) -> None:
        """Wait for other runs, usually runs of the daemon.

        Args:
            since: the start of the wait.
            reason: the reason why nothing was captured.

        Raises:
            TransientError: the wait reached its limit.
        """
        limits = self.limits
        limit = limits.wait_seconds if self.progress.is_blocked else limits.idle_seconds
        if time.monotonic() - since > limit:
            # After the capture only the merge sensor's reason counts.
            reasons = [*([] if self.progress.is_captured else [reason]), self.progress.waiting]
            raise TransientError(
                reason=f"Capture {self.name} did not get through WAL position "
                f"{self.progress.barrier} within {limit:g} s: "
                f"{'; '.join(filter(None, reasons)) or reason}. Run the command again."
            )
        time.sleep(self.limits.poll_seconds)

    @property
    def failed(self) -> FailedParts:
        """The failed parts of the run."""
        tables = find_scd_tables(self.repository, self.loaded.capture)
        merges = [tables[key] for key in self.failed_merges if key in tables]
        return FailedParts(self.failures, self.failed_snapshots, merges)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self.report.seconds[part] = self.report.seconds.get(part, 0.0) + seconds
