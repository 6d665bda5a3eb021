"""One shot: everything committed before the start is captured and merged, through Dagster.

The same sensors that the daemon ticks are ticked here, and what they ask for is executed in this
process on the persistent instance, so that runs, partitions and lag show in the UI as usual. The
WAL position at the first tick is the barrier: a run ends when it is reached, however busy the
writers are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterEventType

from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.orchestration.failures import error_named
from pgcdc_assets.orchestration.loading import CodeLocation, LoadedCapture
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.output import stderr_to
from pgcdc_assets.orchestration.progress import SyncProgress, sync_progress
from pgcdc_assets.orchestration.runs import PROCESS_TAG, process_tag

Say = Callable[[str], None]


@dataclass(frozen=True)
class SyncLimits:
    """When a one-shot run gives up.

    Attributes:
        wait_seconds: for runs of others (the daemon's, another sync's) that are in the way.
        idle_seconds: for progress when nobody is in the way.
        poll_seconds: between two looks while waiting.
    """

    wait_seconds: float = 600.0
    idle_seconds: float = 30.0
    poll_seconds: float = 1.0


@dataclass
class SyncReport:
    """What a one-shot run did, and where its time went.

    Attributes:
        seconds: wall time by part: `sensors`, `snapshot`, `capture`, `session` (starting Spark),
            `merge`.
    """

    name: str
    barrier: str = ""
    window_count: int = 0
    change_count: int = 0
    merge_count: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    run_ids: list[str] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        """Sum of the parts."""
        return sum(self.seconds.values())


def sync_capture(
    instance: dg.DagsterInstance,
    location: CodeLocation,
    loaded: LoadedCapture,
    *,
    say: Say = lambda line: None,
    limits: SyncLimits | None = None,
    spark_log: Path | None = None,
) -> SyncReport:
    """Bring one capture through the WAL position at the start.

    Args:
        spark_log: where an embedded Spark session writes what it has to say; None: to the terminal.

    Raises:
        PgcdcError: the error that a run ended with, or that a sensor raised.
    """
    return _Sync(instance, location, loaded, say, limits or SyncLimits(), spark_log).run()


class _Sync:
    def __init__(
        self,
        instance: dg.DagsterInstance,
        location: CodeLocation,
        loaded: LoadedCapture,
        say: Say,
        limits: SyncLimits,
        spark_log: Path | None,
    ) -> None:
        self.instance = instance
        self.repository = location.repository
        self.loaded = loaded
        self.name = loaded.capture.name
        self.names = Names.of(loaded.capture)
        self.say = say
        self.limits = limits
        self.spark_log = spark_log
        self.progress = SyncProgress(self.name)
        self.report = SyncReport(self.name)

    def run(self) -> SyncReport:
        token = sync_progress.set(self.progress)
        try:
            waiting_since: float | None = None
            while True:
                self.progress.is_blocked = False
                acted = self._tick(self.names.lag_sensor)
                why_no_capture = self.progress.waiting
                acted = self._tick(self.names.merge_sensor) or acted
                if self.progress.is_merged and not acted:
                    break
                if acted:
                    waiting_since = None
                    continue
                waiting_since = waiting_since or time.monotonic()
                self._wait(waiting_since, why_no_capture)
        finally:
            sync_progress.reset(token)
        self.report.barrier = str(self.progress.barrier)
        return self.report

    def _tick(self, sensor_name: str) -> bool:
        """Evaluate a sensor and execute what it asks for; whether it asked for anything."""
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
                self._change_partitions(request)
        for run_request in data.run_requests or []:
            self._execute(sensor, run_request)
        return bool(data.run_requests)

    def _change_partitions(self, request: Any) -> None:
        if isinstance(request, dg.AddDynamicPartitionsRequest):
            self.instance.add_dynamic_partitions(
                request.partitions_def_name, list(request.partition_keys)
            )
            return
        for key in request.partition_keys:
            self.instance.delete_dynamic_partition(request.partitions_def_name, key)

    def _execute(self, sensor: dg.SensorDefinition, request: dg.RunRequest) -> None:
        job_name = request.job_name or sensor.job_name or ""
        self._announce(job_name, request)
        if job_name == self.names.merge_job:
            with self._timed("session"), stderr_to(self.spark_log):
                self.loaded.spark.session()
        tags = {**request.tags, PROCESS_TAG: process_tag()}
        if request.run_key is not None:
            tags["dagster/run_key"] = request.run_key
        part = job_name.removeprefix(f"{self.name}_")
        with self._timed(part):
            result = requested_job(self.repository, job_name, request).execute_in_process(
                run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
                instance=self.instance,
                tags=tags,
                raise_on_error=False,
            )
        self.report.run_ids.append(result.run_id)
        self._note(part, result)
        if not result.success:
            raise error_of_run(result)

    def _announce(self, job_name: str, request: dg.RunRequest) -> None:
        first = request.tags.get("dagster/asset_partition_range_start")
        last = request.tags.get("dagster/asset_partition_range_end")
        what = request.partition_key or request.tags.get("dagster/partition")
        if what is None:
            what = first if first == last else f"{first} to {last}"
        self.say(f"{job_name}: {what}")

    def _note(self, part: str, result: dg.ExecuteInProcessResult) -> None:
        if part == "merge":
            self.report.merge_count += 1
        if part != "capture":
            return
        for event in result.get_asset_materialization_events():
            metadata = event.materialization.metadata
            self.report.window_count += 1
            count = metadata["dagster/partition_row_count"]
            if isinstance(count, dg.IntMetadataValue):
                self.report.change_count += count.value or 0

    def _wait(self, since: float, reason: str) -> None:
        """Wait for what is in the way, a run of the daemon as a rule.

        Raises:
            TransientError: it took too long.
        """
        limits = self.limits
        limit = limits.wait_seconds if self.progress.is_blocked else limits.idle_seconds
        if time.monotonic() - since > limit:
            raise TransientError(
                reason=f"Capture {self.name} did not get through WAL position "
                f"{self.progress.barrier} within {limit:g} s: "
                f"{reason or self.progress.waiting}. Run it again."
            )
        time.sleep(self.limits.poll_seconds)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self.report.seconds[part] = self.report.seconds.get(part, 0.0) + seconds


def requested_job(
    repository: dg.RepositoryDefinition, job_name: str, request: dg.RunRequest
) -> dg.JobDefinition:
    """Give the part of a job that a sensor asked for."""
    job = repository.get_job(job_name)
    if not request.asset_selection:
        return job
    # execute_in_process can select assets too, but adds every check of theirs.
    return job.get_subset(
        asset_selection=frozenset(request.asset_selection),
        asset_check_selection=frozenset(request.asset_check_keys or ()),
    )


def error_of_run(result: dg.ExecuteInProcessResult) -> PgcdcError:
    """Rebuild the error that ended a run, from its event."""
    for event in result.all_events:
        if event.event_type != DagsterEventType.STEP_FAILURE:
            continue
        data = event.step_failure_data
        error = data.error
        if error is not None and error.cls_name == "DagsterExecutionInterruptedError":
            raise KeyboardInterrupt
        while error is not None:
            kind = error_named(error.cls_name or "")
            if kind is not None:
                # Our own Failure says more than its cause: which tables it was about.
                said = data.user_failure_data.description if data.user_failure_data else None
                return _FailedRun.of(kind, said or _sentence(error.message), result.run_id)
            error = error.cause
        if data.error is not None:
            last = data.error
            while last.cause is not None:
                last = last.cause
            return PgcdcError(
                reason=f"Run {result.run_id} failed with an unexpected error: "
                f"{last.message.strip()}"
            )
    return PgcdcError(reason=f"Run {result.run_id} failed without saying why")


def _sentence(message: str) -> str:
    """Take the class off an error's text as a traceback ends with it."""
    return message.partition(": ")[2].strip() or message.strip()


class _FailedRun(PgcdcError):
    """An error read back from a run's events: its sentence and its kind's exit status."""

    @classmethod
    def of(cls, kind: type[PgcdcError], sentence: str, run_id: str) -> PgcdcError:
        error = cls(reason=sentence, run_id=run_id, kind=kind.__name__)
        error.__dict__["exit_status"] = kind.exit_status
        return error
