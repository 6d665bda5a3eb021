"""Random DDL and random row changes, while syncs run and are killed.

In the end, each SCD1 table equals its source, the current rows of each history equal SCD1, and the
versions equal an audit of the source.

`--seed N` repeats a seed. `PGCDC_SOAK_SECONDS` sets the duration of the long test.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from pgcdc_assets.orchestration.settings_metadata import write_capture_settings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.convergence.history_audit import compare_history
from pgcdc_assets_tests.support.convergence.schema_steps import DISRUPTIVE, PUBLICATION
from pgcdc_assets_tests.support.convergence.schema_workload import (
    NAMES,
    TABLES,
    SchemaWorkload,
)
from pgcdc_assets_tests.support.database import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

# A sync makes up to three passes while DDL continues.
CHILD_SECONDS = 800

# A table was created again and renamed before the snapshot of the new table.
_MISSING = r"Table public\.\w+ (does not exist|was dropped,)"
# A table has no primary key between two transactions.
_LOST_KEY = (
    r"Not merged: [\w., ]+\. Table \w+\.\w+ has replica identity \w+: it has no primary key, and "
    r"no key is configured, [^.]+\. Change it with: ALTER TABLE \.\.\. ADD PRIMARY KEY \(\.\.\.\), "
    r"or name the key in the settings"
)
_ALTERED = r"Altered at the source during the run: [\w., ]+\. The next run continues .*"
# The rows of a partition that was attached, or of a table that was published again, change before
# the snapshot that has them.
_AWAITED = (
    r"Not merged: [\w., ]+\. Table public\.\w+ was not merged: an update leaves out a TOASTed value"
    r"[^.]+\. The table waits for a snapshot, [^.]+\. "
)
_REPORTED = re.compile(
    rf"(FailedRun|TableMoved): ((?!.*Not merged).*{_MISSING}"
    rf"|{_LOST_KEY}(\. (Not copied: [\w., ]+\. )?{_MISSING}.*|\. {_ALTERED}|\.?)$"
    rf"|(Not copied: [\w., ]+\. {_MISSING}((?!Not merged).)*)?"
    rf"{_AWAITED}((?!Not merged).)*{_ALTERED})",
    re.MULTILINE,
)


@dataclass
class Run:
    """One random history: the source, the lake, the Dagster instance and the processes."""

    live: Orchestrated
    home: Path
    seed: int
    kills: int = 0
    reports: int = 0
    decide: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.decide = random.Random(self.seed)

    def sync(self, kill_after: float | None = None, *, is_quiet: bool = True) -> None:
        """Run a sync in a child process, and kill the process after some time.

        Args:
            is_quiet: no DDL runs at the same time. Concurrent DDL may leave a table without a
                relation of its name, or without a key, for a moment, which the sync reports.
        """
        facts = {
            "capture": write_capture_settings(self.live.capture).data,
            "conninfo": self.live.database.conninfo,
            "lake": self.live.lake.uri,
            "home": str(self.home),
        }
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pgcdc_assets_tests.support.convergence.dagster_sync"),
                json.dumps(facts),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        while (line := process.stdout.readline()) not in ("ready\n", ""):
            pass
        if line and kill_after is not None:
            time.sleep(kill_after)
            process.kill()
        try:
            output, _ = process.communicate(timeout=CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            # The killed Spark session prints stack traces, which would hide the sync's own lines.
            output = re.sub(r"^\s+at .*\n", "", process.communicate()[0], flags=re.MULTILINE)
            pytest.fail(f"A sync did not end within {CHILD_SECONDS} s: {output[-5000:]}")
        if not is_quiet and _REPORTED.search(output):
            self.reports += 1
            return
        assert process.returncode in (0, -signal.SIGKILL), output[-3000:]
        self.kills += process.returncode != 0

    def check(self, spark: SparkSession) -> None:
        """Compare SCD1 with the source, and the histories with SCD1 and with the audit."""
        for table in self.live.capture.tables:
            assert self.live.equals_source(table.table), table.qualified_name
            for scd in table.scd:
                findings = check_all(spark, self.live.zone, table, scd)
                assert findings.is_sound, (table.qualified_name, scd, findings)
            difference = compare_history(spark, self.live.database, self.live.zone, table.name)
            assert not difference.missing, (table.qualified_name, difference.missing[:5])
            assert not difference.invented, (table.qualified_name, difference.invented[:5])

    @property
    def snapshots(self) -> int:
        """Return the number of snapshots of tables."""
        return len(self.live.zone.snapshots.complete_snapshots())


@pytest.fixture
def run(
    database: Database, lake: Lake, instance: dg.DagsterInstance, tmp_path: Path, seed: int
) -> Run:
    database.execute(TABLES)
    database.execute(
        f"create publication {PUBLICATION} for table {', '.join(NAMES)} "
        "with (publish_via_partition_root)"
    )
    tables = tuple(CdcTable("public", name, scd=(1, 2)) for name in NAMES)
    capture = CdcCapture(
        NAME,
        PUBLICATION,
        tables,
        slot=f"s_{database.name}",
        windows=WindowPolicy(max_age_seconds=0, retry_seconds=0),
    )
    return Run(Orchestrated(database, lake, instance, capture), tmp_path / "dagster", seed)


@pytest.mark.soak
def test_tables_follow_random_schema_changes(run: Run, spark: SparkSession) -> None:
    """C10, C11, E3, E5, F1 to F11."""
    run.sync()
    first = run.snapshots
    with SchemaWorkload(run.live.database.conninfo, run.seed, pause_seconds=0.15) as workload:
        for kill_after in (None, run.decide.uniform(1, 25)):
            run.sync(kill_after, is_quiet=False)
    run.sync()
    print(
        f"{dict(workload.outcomes)}, {run.kills} kills, {run.reports} reports, "
        f"{run.snapshots - first} new snapshots"
    )
    run.check(spark)
    assert workload.ddl_count > 20
    assert workload.outcomes["rows"] > 50
    assert run.snapshots - first <= _most_snapshots(workload)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_tables_follow_random_schema_changes_over_a_long_time(
    run: Run, spark: SparkSession
) -> None:
    """Run for minutes, with repeated comparisons."""
    deadline = time.monotonic() + float(os.environ.get("PGCDC_SOAK_SECONDS", "600"))
    run.sync()
    before = run.snapshots
    total = 0
    number = 0
    while time.monotonic() < deadline:
        number += 1
        first = run.snapshots
        with SchemaWorkload(run.live.database.conninfo, run.seed + number) as workload:
            for _ in range(3):
                kill_after = run.decide.choice([None, run.decide.uniform(1, 60)])
                run.sync(kill_after, is_quiet=False)
        run.sync()
        run.check(spark)
        total += workload.ddl_count
        assert run.snapshots - first <= _most_snapshots(workload)
        print(
            f"round {number}: {total} schema changes, {run.kills} kills, {run.reports} reports, "
            f"{run.snapshots - before} new snapshots"
        )


def _most_snapshots(workload: SchemaWorkload) -> int:
    """Return an upper bound of the automatic snapshots: one per change that needs a snapshot."""
    return sum(workload.outcomes[step] for step in DISRUPTIVE) + len(NAMES)
