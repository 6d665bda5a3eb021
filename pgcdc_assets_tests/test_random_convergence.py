"""Random transactions, while processes are killed at random times and at every failpoint.

In the end, each change is in the raw zone exactly once, and each SCD1 table equals its source.

`--seed N` repeats a seed. `PGCDC_SOAK_SECONDS` sets the duration of the long test.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import compare_table
from pgcdc_assets_tests.support import capture_failpoints
from pgcdc_assets_tests.support.convergence.oracle import (
    create_oracle,
    expected_changes,
    landed_changes,
)
from pgcdc_assets_tests.support.convergence.workload import KEYED, TABLES, Workload
from pgcdc_assets_tests.support.database import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

PUBLICATION = "pub"
COPY_FAILPOINTS = (
    "after_slot_creation",
    "after_epoch_commit",
    "mid_copy",
    "before_copy_commit",
    "after_copy_commit",
)
CAPTURE_FAILPOINTS = (*capture_failpoints.MID_STREAM, *capture_failpoints.LANDING)
CHILD_SECONDS = 500


@dataclass
class Run:
    """One random history: the source, the lake, and the processes."""

    database: Database
    zone: RawZone
    seed: int
    decide: random.Random = field(init=False)
    kills: int = 0

    def __post_init__(self) -> None:
        self.decide = random.Random(self.seed)

    @property
    def slot(self) -> str:
        return f"s_{self.database.name}"

    def process(self, failpoint: str = "", *options: str) -> subprocess.Popen[str]:
        """Start a sync in a child process, and wait until its imports are done."""
        facts = {
            "conninfo": self.database.conninfo,
            "lake": self.zone.lake.uri,
            "slot": self.slot,
            "publication": PUBLICATION,
            "seed": self.decide.random(),
        }
        module = "pgcdc_assets_tests.support.convergence.sync_process"
        process = subprocess.Popen(
            [sys.executable, "-m", module, *options, json.dumps(facts)],
            env={**os.environ, "PGCDC_FAILPOINT": failpoint},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise AssertionError(process.communicate()[1])
        return process

    def sync_to_failpoint(self, failpoint: str) -> None:
        """Run a sync until the failpoint kills the process."""
        process = self.process(failpoint)
        _, errors = process.communicate(timeout=CHILD_SECONDS)
        assert process.returncode == -signal.SIGKILL, f"{failpoint} was not reached: {errors}"
        self.kills += 1

    def sync_and_kill(self, longest_seconds: float, *options: str) -> None:
        """Kill a sync at a random time, possibly after its end."""
        process = self.process("", *options)
        try:
            process.wait(self.decide.random() * longest_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        _, errors = process.communicate(timeout=CHILD_SECONDS)
        assert process.returncode in (0, -signal.SIGKILL), errors
        self.kills += process.returncode != 0

    def sync(self, *options: str) -> None:
        """Run a sync to its end."""
        process = self.process("", *options)
        _, errors = process.communicate(timeout=CHILD_SECONDS)
        assert process.returncode == 0, errors

    def merge(self, spark: SparkSession, *, all_of_it: bool = False) -> None:
        """Merge some or all tables through a captured window, possibly an old window."""
        windows = [summary.window for summary in self.zone.changes.windows(1)]
        tables = list(KEYED)
        through = windows[-1]
        if not all_of_it:
            tables = self.decide.sample(tables, self.decide.randint(1, len(tables)))
            through = self.decide.choice(windows)
        targets = [CdcTable("public", table) for table in tables]
        for report in merge_tables(spark, self.zone, targets, through):
            assert isinstance(report, MergeReport), report.error

    def check(self) -> None:
        """Compare the raw zone with the second slot, and SCD1 with the source."""
        epoch = self.zone.epochs.latest()
        end = self.zone.changes.captured_through(1)
        assert epoch is not None and end is not None
        expected = expected_changes(
            self.database, oracle_of(self.slot), PUBLICATION, epoch.start_lsn, end
        )
        found = landed_changes(self.zone)
        # Compare row by row, because the difference of two long lists takes too long to print.
        assert len(found) == len(expected)
        for index, (row, wanted) in enumerate(zip(found, expected, strict=True)):
            assert row == wanted, f"row {index}"
        windows = [summary.window for summary in self.zone.changes.windows(1)]
        assert windows[0].start == epoch.start_lsn
        assert all(one.end == next_one.start for one, next_one in pairwise(windows))
        assert sum(s.row_count for s in self.zone.changes.windows(1)) == len(expected)
        for table in KEYED:
            settings = self.database.settings()
            comparison = compare_table(settings, self.zone, PUBLICATION, "public", table)
            assert comparison.is_equal, comparison
        operations = {(row["table"], row["op"]) for row in found}
        assert {op for _, op in operations} >= set("IUDM")
        assert any(row["unchanged"] for row in found)


def oracle_of(slot: str) -> str:
    return f"{slot}_oracle"


@pytest.fixture
def run(database: Database, zone: RawZone, seed: int) -> Run:
    database.execute(TABLES)
    database.execute(f"create publication {PUBLICATION} for all tables")
    create_oracle(database, oracle_of(f"s_{database.name}"))
    return Run(database, zone, seed)


def test_killed_syncs_land_each_change_once_and_converge(run: Run, spark: SparkSession) -> None:
    """A2, A3, A5 to A7, A17, C1, C2, D1 to D6, D9, D14, H1, H2."""
    began = time.monotonic()
    with Workload(run.database.conninfo, run.seed, connections=3) as workload:
        for failpoint in COPY_FAILPOINTS:
            run.sync_to_failpoint(failpoint)
        run.sync()
        steps = [*CAPTURE_FAILPOINTS, *["random"] * 4, *["merge"] * 3]
        run.decide.shuffle(steps)
        for step in steps:
            print(f"{time.monotonic() - began:.1f} s: {step}")
            if step == "merge":
                with workload.paused():
                    run.merge(spark)
            elif step == "random":
                run.sync_and_kill(longest_seconds=1.0)
            else:
                run.sync_to_failpoint(step)
    print(f"{time.monotonic() - began:.1f} s: the last sync")
    run.sync()
    run.merge(spark, all_of_it=True)
    print(f"{time.monotonic() - began:.1f} s: comparing")
    run.check()
    assert workload.outcomes["committed"] > 100
    assert run.kills >= len(COPY_FAILPOINTS) + len(CAPTURE_FAILPOINTS)
    print(f"{dict(workload.outcomes)} transactions, {run.kills} kills")


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_killed_syncs_and_merges_converge_over_a_long_time(run: Run, spark: SparkSession) -> None:
    """Run for minutes, with merges in the killed processes and repeated comparisons."""
    deadline = time.monotonic() + float(os.environ.get("PGCDC_SOAK_SECONDS", "600"))
    round_number = 0
    while time.monotonic() < deadline:
        round_number += 1
        seed = run.seed + round_number
        with Workload(run.database.conninfo, seed, connections=6) as workload:
            run.sync()
            for _ in range(8):
                step = run.decide.choice([*CAPTURE_FAILPOINTS, "random", "random", "merge", "own"])
                if step == "merge":
                    with workload.paused():
                        run.merge(spark)
                elif step == "random":
                    run.sync_and_kill(longest_seconds=2.0)
                elif step == "own":
                    run.sync_and_kill(40.0, "--merge")
                else:
                    run.sync_to_failpoint(step)
        run.sync("--merge")
        run.check()
    print(f"{round_number} rounds, {run.kills} kills")
