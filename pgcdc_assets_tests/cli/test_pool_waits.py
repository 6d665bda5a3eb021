"""Commands that wait for a pool which another run uses, or which a dead run has left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
from dagster import DagsterEvent, DagsterEventType
from pyspark.sql import SparkSession

from pgcdc_assets.cli import main
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.project.code_location import load_location
from pgcdc_assets.orchestration.project.home import CONFIG, open_instance
from pgcdc_assets.orchestration.runs.claims import PROCESS_TAG, process_tag
from pgcdc_assets_tests.orchestration.runs.test_records import dead_process
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.orchestration.location import Locations
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

NAMES = Names("mine")
MODULE = """
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions

defs = build_cdc_definitions(
    CdcCapture("mine", "pub", (CdcTable("public", "t"),), slot="{slot}")
)
"""


@dataclass(frozen=True)
class Merged:
    """A capture whose table is merged, and its Dagster instance."""

    database: Database
    module: str
    folder: Path
    instance: dg.DagsterInstance

    def hold_pools(self, job: str, process: str) -> dg.DagsterRun:
        """Record a started run of a process, which holds the pools of merges and maintenance."""
        definition = load_location(self.module).repository.get_job(job)
        tags = {**definition.run_tags, PROCESS_TAG: process}
        run = self.instance.create_run_for_job(definition, tags=tags)
        event = DagsterEvent(DagsterEventType.RUN_START.value, job_name=job)
        self.instance.report_dagster_event(event, run.run_id)
        storage = self.instance.event_log_storage
        for pool in (NAMES.merge_pool, NAMES.maintenance_pool):
            storage.initialize_concurrency_limit_to_default(pool)
            assert storage.claim_concurrency_slot(pool, run.run_id, "step").is_claimed
        return run

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "pgcdc_assets.cli", *arguments, "-m", self.module],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def has_waiting(self) -> bool:
        """Return whether a run waits for the pool of merges."""
        storage = self.instance.event_log_storage
        return bool(storage.get_concurrency_info(NAMES.merge_pool).pending_run_ids)

    def status(self, run_id: str) -> dg.DagsterRunStatus | None:
        """Return the status of a run."""
        run = self.instance.get_run_by_id(run_id)
        return None if run is None else run.status


@pytest.fixture
def merged(
    database: Database, locations: Locations, spark: SparkSession, tmp_path: Path
) -> Iterator[Merged]:
    """Capture and merge a table."""
    database.execute("create table t (id int primary key, v text); insert into t values (1, 'a')")
    database.execute("create publication pub for table t")
    module = locations.write(database, MODULE.format(slot=f"s_{database.name}"))
    # Without the file, no pool has a limit.
    shutil.copyfile(CONFIG, Path(os.environ["DAGSTER_HOME"]) / CONFIG.name)
    assert main(["sync", "-m", module]) == 0
    with open_instance() as instance:
        yield Merged(database, module, tmp_path, instance)


@pytest.mark.sampled
@pytest.mark.parametrize("command", [("rebuild", "mine"), ("upkeep",)])
def test_a_command_closes_the_dead_run_that_holds_its_pool(
    merged: Merged, command: tuple[str, ...]
) -> None:
    """No daemon runs: `pgcdc sync` was killed in a merge."""
    dead = merged.hold_pools(NAMES.merge_job, dead_process())
    process = merged.start(*command)
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert merged.status(dead.run_id) == dg.DagsterRunStatus.FAILURE


@pytest.mark.sampled
def test_a_command_that_waits_for_a_live_run_ends_by_its_limit_or_by_ctrl_c(
    merged: Merged,
) -> None:
    holder = merged.hold_pools(NAMES.rebuild_job, process_tag())
    rebuild = merged.start("rebuild", "mine")
    try:
        wait_until(merged.has_waiting, "the rebuild to wait", limit_seconds=240)
        assert rebuild.stdout is not None
        (_, said) = rebuild.stdout.readline().split(" ", 1)
        user = f"run {holder.run_id} of mine_rebuild"
        assert said == f"Waiting for pool {NAMES.merge_pool}, which is used by {user}\n"
        rebuild.send_signal(signal.SIGINT)
        out, _ = rebuild.communicate(timeout=60)
    finally:
        rebuild.kill()
    assert rebuild.returncode == 130, out
    assert out == "pgcdc: Interrupted.\n"
    (run, *_) = merged.instance.get_runs(dg.RunsFilter(job_name=NAMES.rebuild_job))
    assert run.status == dg.DagsterRunStatus.CANCELED

    merged.database.execute("insert into t values (2, 'b')")
    sync = merged.start("sync", "--wait-seconds", "5")
    try:
        wait_until(merged.has_waiting, "the merge to wait", limit_seconds=240)
        began = time.monotonic()
        out, _ = sync.communicate(timeout=120)
    finally:
        sync.kill()
    assert sync.returncode == 3, out
    assert 4 < time.monotonic() - began < 60
    assert "Not merged: scd1.public.t." in out
    assert f"run {holder.run_id} of mine_rebuild" in out
    assert "within 5 s" in out
    assert not merged.has_waiting()
    assert merged.status(holder.run_id) == dg.DagsterRunStatus.STARTED
    merged.instance.event_log_storage.free_concurrency_slots_for_run(holder.run_id)
    assert main(["sync", "-m", merged.module]) == 0
