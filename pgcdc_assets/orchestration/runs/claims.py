"""Claims of runs: process and heartbeat in the run's tags, and cancellation after an interrupt.

A killed run keeps the status "started" in the instance. On the same machine, the process in the
run's tags shows that the run is dead; on another machine, the heartbeat shows it. A thread writes
the heartbeat, so a long merge or landing does not delay it.

SIGINT or SIGTERM is a request to end, so an interrupted run is canceled and not failed. Dagster
reports a run as canceled only after a request for its cancellation, which this module makes.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import dagster as dg
from dagster import DagsterEventType, DagsterRun, DagsterRunStatus
from dagster._core.errors import DagsterExecutionInterruptedError, DagsterUserCodeProcessError
from dagster._core.utils import make_new_run_id
from dagster._utils.interrupts import capture_interrupts, pop_captured_interrupt
from dagster_shared.error import SerializableErrorInfo

from pgcdc_assets.orchestration.runs.interrupt_log import hide_interrupts
from pgcdc_assets.orchestration.runs.lost_interrupts import repeat_lost_interrupts
from pgcdc_assets.processes import ProcessIdentity, has_no_process

PROCESS_TAG = "pgcdc/process"
HEARTBEAT_TAG = "pgcdc/heartbeat"

BEAT_SECONDS = 15.0

_INTERRUPTED = "The run was interrupted. Its commits remain, and the rest is requested again."

# Dagster cannot remove a tag.
_NO_CLAIM = {PROCESS_TAG: "", HEARTBEAT_TAG: ""}

# The event is never cleared, because the process ends with its run.
_interrupted = threading.Event()

_log = logging.getLogger(__name__)


class RunInterrupted(DagsterExecutionInterruptedError, DagsterUserCodeProcessError):
    """The error of an interrupted run, which Dagster shows without a stack trace."""

    def __init__(self) -> None:
        shown = SerializableErrorInfo(_INTERRUPTED, [], DagsterExecutionInterruptedError.__name__)
        DagsterUserCodeProcessError.__init__(  # type: ignore[no-untyped-call]
            self, _INTERRUPTED, user_code_process_error_infos=[shown]
        )


def process_tag(pid: int | None = None) -> str:
    """Return the tag of a process; the default is this process."""
    return str(ProcessIdentity.of(pid))


def claim_tags(run_id: str) -> dict[str, str]:
    """Return the tags of a run that this process begins to execute."""
    return {PROCESS_TAG: process_tag(), HEARTBEAT_TAG: f"{time.time():.0f} {run_id}"}


def new_claim() -> tuple[str, dict[str, str]]:
    """Create the id and the tags of a run that this process executes.

    The run has the tags from its start, because a step may wait for its pool before it claims the
    run.
    """
    run_id = make_new_run_id()
    return run_id, claim_tags(run_id)


def last_heartbeat(run: DagsterRun) -> float | None:
    """Return the time of a run's newest heartbeat; None if the run has not written a heartbeat.

    Dagster copies the tags of a run, with its heartbeat, to a run that repeats it.
    """
    seconds, _, run_id = run.tags.get(HEARTBEAT_TAG, "").partition(" ")
    return float(seconds) if run_id == run.run_id and seconds.isdigit() else None


@contextmanager
def claimed_run(instance: dg.DagsterInstance, run: DagsterRun) -> Iterator[None]:
    """Write a run's heartbeat inside the block, and cancel the run after an interrupt.

    Blocks of one run may be nested.
    """
    hide_interrupts()
    repeat_lost_interrupts()
    with writing_heartbeat(instance, run.run_id):
        try:
            yield
        except (KeyboardInterrupt, DagsterExecutionInterruptedError) as interrupt:
            # A terminal and Dagster may both send a signal: ignore the second one.
            with capture_interrupts():
                _cancel(instance, run.run_id)
            if isinstance(interrupt, RunInterrupted):
                raise
            raise RunInterrupted from None


@contextmanager
def claim_run(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> Iterator[None]:
    """Claim the run of a step for this process, independently of the executor.

    Raises:
        RunInterrupted: a signal has arrived before the step, or during the block.
    """
    instance, run = context.instance, context.run
    with _claim_of_step(instance, run.run_id), claimed_run(instance, run):
        if _interrupted.is_set():
            raise RunInterrupted
        yield


@contextmanager
def _claim_of_step(instance: dg.DagsterInstance, run_id: str) -> Iterator[None]:
    """Remove the claim after the block, unless the executor has claimed the run.

    Other executors may give each step a process or a container of its own, which ends before the
    run. With its claim, the run would count as dead during the later steps. The process that starts
    the processes of steps lives as long as the run, so its claim replaces that of the step.
    """
    is_of_step = not _heartbeats.is_written(run_id)
    try:
        yield
    finally:
        if is_of_step:
            try:
                instance.add_run_tags(run_id, _claim_after_step(instance, run_id))
            except Exception as error:
                # The run may be deleted, or the storage unavailable.
                _log.debug("Claim of run %s not removed: %s", run_id, type(error).__name__)


def _claim_after_step(instance: dg.DagsterInstance, run_id: str) -> dict[str, str]:
    """Return the tags of a run whose step ends, and that this process does not execute."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid not in _find_executors(instance, run_id):
        return _NO_CLAIM
    # If the parent was killed before, the claim of this process shows it soon.
    return {} if has_no_process(parent.pid) else {**_NO_CLAIM, PROCESS_TAG: process_tag(parent.pid)}


def _find_executors(instance: dg.DagsterInstance, run_id: str) -> set[int]:
    """Return the ids of the processes that have begun to execute the steps of a run.

    The parent of a process may be another one, such as the code server that has started the run.
    """
    entries = instance.all_logs(run_id, of_type=DagsterEventType.ENGINE_EVENT)
    events = [entry.dagster_event for entry in entries if entry.dagster_event is not None]
    found = [event.engine_event_data.metadata.get("pid") for event in events]
    return {int(pid.text) for pid in found if isinstance(pid, dg.TextMetadataValue) and pid.text}


def claimed_step(step: Callable[[dg.AssetExecutionContext], Iterator[Any]]) -> Any:
    """Claim the run for a step that yields events, and end the step after an interrupt."""

    @wraps(step)
    def claimed(context: dg.AssetExecutionContext) -> Any:
        with claim_run(context):
            events = step(context)
            for event in events:
                yield event
                if _interrupted.is_set():
                    events.close()  # type: ignore[attr-defined]
                    raise RunInterrupted

    return claimed


def is_interrupted() -> bool:
    """Return whether a signal has arrived."""
    if threading.current_thread() is threading.main_thread() and pop_captured_interrupt():
        interrupt_steps()
    return _interrupted.is_set()


def interrupt_steps() -> None:
    """End the step of this process after its current event, and each later step at its start."""
    _interrupted.set()


@contextmanager
def writing_heartbeat(instance: dg.DagsterInstance, run_id: str) -> Iterator[None]:
    """Write a run's heartbeat inside the block, from the start of the run."""
    with _heartbeats.writing_heartbeat(instance, run_id):
        yield


def _cancel(instance: dg.DagsterInstance, run_id: str) -> None:
    run = instance.get_run_by_id(run_id)
    if run is not None and run.status in (DagsterRunStatus.STARTING, DagsterRunStatus.STARTED):
        instance.report_run_canceling(run, "The run's process was interrupted.")


@dataclass
class _Heartbeat:
    """The heartbeat of one run.

    Attributes:
        holders: number of open blocks.
    """

    instance: dg.DagsterInstance
    run_id: str
    holders: int = 0
    _ending: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._write()
        name = f"heartbeat-{self.run_id[:8]}"
        self._thread = threading.Thread(target=self._beat, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(BEAT_SECONDS)

    def _beat(self) -> None:
        while not self._ending.wait(BEAT_SECONDS):
            self._write()

    def _write(self) -> None:
        try:
            self.instance.add_run_tags(self.run_id, claim_tags(self.run_id))
        except Exception as error:
            # The storage may be unavailable for some time: a later heartbeat is sufficient.
            _log.debug("No heartbeat of run %s: %s", self.run_id, type(error).__name__)


class _Heartbeats:
    """The heartbeats of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_run: dict[str, _Heartbeat] = {}

    def is_written(self, run_id: str) -> bool:
        """Return whether a block of this process writes the heartbeat of a run."""
        with self._lock:
            return run_id in self._by_run

    @contextmanager
    def writing_heartbeat(self, instance: dg.DagsterInstance, run_id: str) -> Iterator[None]:
        with self._lock:
            heartbeat = self._by_run.setdefault(run_id, _Heartbeat(instance, run_id))
            heartbeat.holders += 1
            is_first = heartbeat.holders == 1
        try:
            if is_first:
                heartbeat.start()
            yield
        finally:
            with self._lock:
                heartbeat.holders -= 1
                is_last = heartbeat.holders == 0
                if is_last:
                    del self._by_run[run_id]
            if is_last:
                heartbeat.stop()


_heartbeats = _Heartbeats()
