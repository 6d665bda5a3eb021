"""`pgcdc resnapshot` that is killed, runs twice at once, or runs beside another lake."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.cli import main
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.orchestration.location import Locations
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

NAME = "mine"
T = CdcTable("public", "t", scd=(1, 2))
MODULE = """
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions
from pgcdc_assets.settings.policies import SnapshotPolicy

defs = build_cdc_definitions(
    CdcCapture(
        "mine",
        "pub",
        (CdcTable("public", "t", scd=(1, 2)), CdcTable("public", "u")),
        slot="{slot}",
        snapshot=SnapshotPolicy(1, range_bytes=32768),
    )
)
"""


@dataclass(frozen=True)
class Command:
    """The commands of one lake, in this process or in processes of their own."""

    module: str
    folder: Path
    lake: Path

    @property
    def zone(self) -> RawZone:
        return RawZone(Lake(str(self.lake)), NAME)

    def run(self, command: str, *arguments: str) -> int:
        return main([command, *arguments, "-m", self.module])

    @contextmanager
    def started(self, failpoint: str = "", *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start `pgcdc resnapshot` of table `t`; a process that still runs at the end is killed."""
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pgcdc_assets.cli", "resnapshot", NAME, "public.t"),
                *("-m", self.module, *arguments),
            ],
            env={
                **os.environ,
                "PGCDC_FAILPOINT": failpoint,
                "PYTHONPATH": f"{self.folder}:{os.environ.get('PYTHONPATH', '')}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def killed_at(self, failpoint: str) -> None:
        """Run the command until the failpoint kills it."""
        with self.started(failpoint) as process:
            output, _ = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL, (failpoint, output)

    def check(self, spark: SparkSession) -> None:
        """Compare each table with the source, and check the history."""
        assert self.run("verify") == 0
        for scd in T.scd:
            findings = check_all(spark, self.zone, T, scd)
            assert findings.is_sound, findings


@pytest.fixture
def command(database: Database, locations: Locations, tmp_path: Path) -> Command:
    """Create two tables of several ranges, and synchronize them with a lake."""
    for table in ("t", "u"):
        database.execute(f"create table {table} (id int primary key, n int, note text)")
        database.execute(
            f"insert into {table} select i, 0, repeat(md5(i::text), 20)"
            " from generate_series(1, 900) i"
        )
    database.execute("create publication pub for table t, u")
    module = locations.write(database, MODULE.format(slot=f"s_{database.name}"))
    made = Command(module, tmp_path, tmp_path / "lake")
    assert made.run("sync") == 0
    return made


def write(database: Database, number: int) -> None:
    """Change, move, delete and insert rows."""
    database.transaction(
        f"update t set n = n + 1 where id % 7 = {number % 7}",
        f"update t set note = repeat('{number}', 900) where id % 50 = {number % 50}",
        f"update t set id = -id where id = {100 + number}",
        f"delete from t where id = {200 + number}",
        f"insert into t values ({2000 + number}, {number}, 'new')",
        f"insert into u values ({2000 + number}, {number}, 'new')",
    )


# In the order of a run. Each run continues with the ranges of the killed runs before.
COPY = (
    "mid_copy",
    "before_range_commit:3",
    "after_range_commit:3",
    "after_range_refresh:2",
    "before_copy_commit",
    "after_copy_commit",
)
CAPTURE = (
    "after_schema_events",
    "mid_stream",
    "before_delta_commit",
    "after_relations_commit",
    "after_delta_commit",
    "after_status_packet",
)
MERGE = ("after_columns_added", "after_merge_step")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("failpoints", "ddl"),
    [
        pytest.param((COPY[2],), "", id="one kill"),
        pytest.param(COPY, "", id="copy", marks=pytest.mark.soak),
        pytest.param(
            (*CAPTURE, *MERGE), "alter table t add column c{0} int default {0}",
            id="capture and merge", marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_the_next_run_completes_what_killed_runs_began(
    command: Command,
    database: Database,
    spark: SparkSession,
    failpoints: tuple[str, ...],
    ddl: str,
) -> None:
    """C3, C12: each run is killed at a failpoint, while the table changes between the runs."""
    for number, failpoint in enumerate(failpoints):
        write(database, number)
        if ddl:
            database.execute(ddl.format(number))
            database.execute(f"update t set c{number} = -1 where id % 9 = 0")
        command.killed_at(failpoint)
    before = len(command.zone.snapshots.complete_snapshots())
    write(database, len(failpoints))
    assert command.run("resnapshot", NAME, "public.t") == 0
    command.check(spark)
    assert len(command.zone.snapshots.complete_snapshots()) == before + 1
    assert command.zone.ranges.all() == []
    write(database, len(failpoints) + 1)
    assert command.run("sync") == 0
    command.check(spark)


def await_stop(process: subprocess.Popen[str]) -> None:
    """Wait until a failpoint has stopped the process."""
    wait_until(
        lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED,
        "the failpoint",
        limit_seconds=120,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("is_killed", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_second_run_waits_for_the_first_one(
    command: Command,
    database: Database,
    spark: SparkSession,
    is_killed: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """C12: named twice at the same time. If the first run dies, the second one continues it."""
    before = len(command.zone.snapshots.complete_snapshots())
    with command.started("after_range_commit:3:STOP") as first:
        await_stop(first)
        write(database, 1)
        assert command.run("resnapshot", NAME, "public.t", "--wait-seconds", "1") == 3
        assert "Another run takes snapshots of capture mine" in capsys.readouterr().err
        with command.started() as second:
            wait_until(lambda: bool(psutil.Process(second.pid).num_threads() > 1), "the second run")
            if is_killed:
                first.kill()
            else:
                first.send_signal(signal.SIGCONT)
                output, _ = first.communicate(timeout=300)
                assert first.returncode == 0, output
            output, _ = second.communicate(timeout=300)
            assert second.returncode == 0, output
    assert re.search("new snapshots of public.t are merged", output)
    taken = len(command.zone.snapshots.complete_snapshots()) - before
    assert taken == (1 if is_killed else 2)
    command.check(spark)


@pytest.mark.soak
def test_a_second_lake_of_the_same_source_is_not_disturbed(
    command: Command,
    database: Database,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C12: the other lake captures, merges and re-snapshots while this one is in its copy."""
    other = Command(f"other_{command.module}", tmp_path, tmp_path / "other")
    (tmp_path / f"{other.module}.py").write_text(MODULE.format(slot=f"o_{database.name}"))
    (tmp_path / "other_home").mkdir()

    @contextmanager
    def in_other_lake() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setenv("PGCDC_LAKE", str(other.lake))
            patched.setenv("DAGSTER_HOME", str(tmp_path / "other_home"))
            yield

    with in_other_lake():
        assert other.run("sync") == 0
    with command.started("after_range_commit:3:STOP") as first:
        await_stop(first)
        with in_other_lake():
            write(database, 1)
            assert other.run("sync") == 0
            assert len(other.zone.snapshots.complete_snapshots()) == 2
            other.check(spark)
            write(database, 2)
            assert other.run("resnapshot", NAME, "public.t") == 0
            other.check(spark)
        first.send_signal(signal.SIGCONT)
        output, _ = first.communicate(timeout=300)
        assert first.returncode == 0, output
    command.check(spark)
    slots = database.query(
        "select slot_name from pg_replication_slots where database = current_database() order by 1"
    )
    assert [name for (name,) in slots] == [f"o_{database.name}", f"s_{database.name}"]
