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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from pgcdc_assets.merge import rebuild_table
from pgcdc_assets.orchestration.settings_metadata import write_capture_settings
from pgcdc_assets.policies import WindowPolicy
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.convergence.history_audit import compare_history
from pgcdc_assets_tests.support.convergence.schema_steps import (
    DISRUPTIVE,
    PUBLICATION,
    create_publication_again,
)
from pgcdc_assets_tests.support.convergence.schema_workload import (
    NAMES,
    TABLES,
    SchemaWorkload,
)
from pgcdc_assets_tests.support.database import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

CHILD_SECONDS = 500

# A table was created again and renamed before the snapshot of the new table.
_MISSING = re.compile(
    r"(FailedRun|TableMoved): (?!.*Not merged).*Table public\.\w+ (does not exist|was dropped,)"
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
                relation of its name for a moment, which the sync reports.
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
            pytest.fail(f"A sync did not end: {process.communicate()[0][-5000:]}")
        if not is_quiet and _MISSING.search(output):
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

    def check_rebuilt(self, spark: SparkSession) -> None:
        """Build each table from the raw zone alone, and compare again."""
        for table in self.live.capture.tables:
            for scd in table.scd:
                rebuild_table(spark, self.live.zone, table, scd)
        self.check(spark)

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
@pytest.mark.timeout(900)
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
    run.check_rebuilt(spark)
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
    total: Counter[str] = Counter()
    number = 0
    began, first_snapshots = time.monotonic(), run.snapshots
    while time.monotonic() < deadline:
        number += 1
        first = run.snapshots
        with SchemaWorkload(run.live.database.conninfo, run.seed + number) as workload:
            for _ in range(3):
                kill_after = run.decide.choice([None, run.decide.uniform(1, 60)])
                run.sync(kill_after, is_quiet=False)
        run.sync()
        run.check(spark)
        total["schema changes"] += workload.ddl_count
        total["transactions of rows"] += workload.outcomes["rows"]
        assert run.snapshots - first <= _most_snapshots(workload)
        print(
            f"round {number}: {time.monotonic() - began:.0f} s, {dict(total)}, {run.kills} kills, "
            f"{run.reports} reports, {run.snapshots - first_snapshots} new snapshots"
        )
    run.check_rebuilt(spark)


def _most_snapshots(workload: SchemaWorkload) -> int:
    """Return an upper bound of the automatic snapshots: one per change that needs a snapshot."""
    of_all = len(NAMES) * (1 + workload.outcomes[create_publication_again.__name__])
    return sum(workload.outcomes[step] for step in DISRUPTIVE) + of_all
