"""`pgcdc verify` and `pgcdc rebuild` on a capture of a real database."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.cli import main
from pgcdc_assets.orchestration.project.code_location import load_location
from pgcdc_assets.orchestration.runs.records import PARTIAL_TAG
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.database import NOWHERE, Database
from pgcdc_assets_tests.support.orchestration.location import Locations

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

MODULE = """
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions

defs = build_cdc_definitions(
    CdcCapture(
        "mine", "pub", (CdcTable("public", "t"),), slot="{slot}", on_schema_change="ask"
    )
)
"""


@pytest.fixture
def module(database: Database, locations: Locations) -> str:
    """Write a code location with one capture, and set the environment for it."""
    database.execute("create table t (id int primary key, v text)")
    database.execute("insert into t select i, 'row ' || i from generate_series(1, 50) i")
    database.execute("create publication pub for table t")
    return locations.write(database, MODULE.format(slot=f"s_{database.name}"))


@pytest.mark.sampled
def test_a_difference_is_named_and_a_rebuild_corrects_it_without_the_source(
    module: str,
    database: Database,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """H4, with the commands."""
    assert main(["sync", "-m", module]) == 0
    database.execute("update t set v = 'changed' where id = 7")
    assert main(["verify", "-m", module]) == 0
    out = capsys.readouterr().out
    assert re.search(r"public\.t +[0-9A-F]+/[0-9A-F]+ +50 +50 +0 +0 +0 +-", out)

    live = delta_table(table_path(Lake(str(tmp_path / "lake")), "mine", "public", "t", 1))
    spark.sql(f"UPDATE {live} SET v = 'wrong' WHERE id = 3")
    spark.sql(f"DELETE FROM {live} WHERE id = 44")
    assert main(["verify", "-m", module, "public.t"]) == 1
    printed = capsys.readouterr()
    assert re.search(r"missing +'44'", printed.out)
    assert re.search(r"differs +'3' +v", printed.out)
    assert "Not equal to the source at the same LSN: public.t. " in printed.err
    assert "with: pgcdc rebuild mine public.t. " in printed.err
    assert "new snapshots with: pgcdc resnapshot mine public.t" in printed.err
    assert "wrong" not in printed.out + printed.err

    with monkeypatch.context() as patched:
        patched.setenv("PGCDC_DSN", NOWHERE)
        assert main(["rebuild", "mine", "public.t", "-m", module]) == 0
        assert re.search(r"scd1/public/t +[0-9A-F]+/[0-9A-F]+ ", capsys.readouterr().out)
        assert main(["rebuild", "mine", "-m", module, "--through", "FFFF/0"]) == 2
        assert "captured through" in capsys.readouterr().err
        assert main(["rebuild", "mine", "-m", module, "--through", "soon"]) == 2
        assert "'soon' does not have the form 16/B374D848" in capsys.readouterr().err
        assert main(["rebuild", "mine", "public.nope", "-m", module]) == 2
        assert "public.nope" in capsys.readouterr().err
    assert main(["verify", "-m", module]) == 0
    assert main(["verify", "-m", module, "public.nope"]) == 2

    def copies() -> int:
        return len(RawZone(Lake(str(tmp_path / "lake")), "mine").snapshots.complete_snapshots(1))

    before = copies()
    database.execute("alter table t alter column id type bigint, add column kept int")
    database.execute("alter table t alter column v type int using length(v)")
    database.execute("update t set kept = 1 where id = 1")
    capsys.readouterr()
    assert main(["sync", "-m", module]) == 4
    remedy = "pgcdc resnapshot mine public.t"
    assert f"Take a new snapshot with: {remedy}" in capsys.readouterr().err
    assert main(["resnapshot", "mine", "public.nope", "-m", module]) == 2
    assert "has no table public.nope. Its tables are public.t" in capsys.readouterr().err
    assert copies() == before
    assert main([*remedy.split()[1:], "-m", module]) == 0
    assert "new snapshots of public.t are merged" in capsys.readouterr().out
    assert copies() == before + 1
    assert main(["verify", "-m", module]) == 0


@pytest.mark.sampled
def test_the_remedy_of_a_damaged_table_names_its_capture(
    module: str, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sync", "-m", module]) == 0
    path = table_path(Lake(str(tmp_path / "lake")), "mine", "public", "t", 1)
    for entry in Path(path, "_delta_log").glob("*.json"):
        entry.write_text("{")
    capsys.readouterr()
    for command in (["verify"], ["resnapshot", "mine", "public.t", "--where", "id = 1"]):
        assert main([*command, "-m", module]) == 4
        error = capsys.readouterr().err
        assert "pgcdc rebuild mine" in error
        assert "rebuild NAME" not in error


SECRET = "row 44"


@pytest.mark.sampled
def test_a_condition_heals_its_rows_and_stays_in_the_process(
    module: str,
    database: Database,
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """C12, by the commands: the condition is not in Dagster's records of the run."""
    assert main(["sync", "-m", module]) == 0
    live = delta_table(table_path(Lake(str(tmp_path / "lake")), "mine", "public", "t", 1))
    spark.sql(f"UPDATE {live} SET v = 'wrong' WHERE id IN (3, 5)")
    spark.sql(f"DELETE FROM {live} WHERE id = 44")
    request = ["resnapshot", "mine", "public.t", "-m", module, "--where"]
    with dg.DagsterInstance.get() as instance:
        runs = instance.get_runs_count()
        assert main([*request, f"v = '{SECRET}' and nope"]) == 2
        assert main([*request, "true) or (true"]) == 2
        assert main(["resnapshot", "mine", "-m", module, "--where", "true"]) == 2
        assert instance.get_runs_count() == runs
        printed = capsys.readouterr().err
        assert "predicate of --where for public.t was refused" in printed
        assert "name exactly one" in printed
        assert SECRET not in printed

        # The command is killed between the commit of the rows and their merge.
        killed = subprocess.run(
            [sys.executable, "-m", "pgcdc_assets.cli", *request, f"id = 3 or v = '{SECRET}'"],
            env={
                **os.environ,
                "PGCDC_FAILPOINT": "after_copy_commit",
                "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert main(["sync", "-m", module]) == 0
        assert main(["verify", "-m", module]) == 1
        assert re.search(r"differs +'5' +v", capsys.readouterr().out)

        spark.sql(f"DELETE FROM {live} WHERE id = 44")
        assert main([*request, f"id in (5, 6) or v = '{SECRET}'"]) == 0
        assert "3 rows of public.t at" in capsys.readouterr().out
        assert main(["verify", "-m", module]) == 0
        assert main([*request, f"v = 'no {SECRET}'"]) == 0
        assert "0 rows of public.t at" in capsys.readouterr().out
        assert main([*request, f"1 / (id - 3) = 0 or v = '{SECRET}'"]) == 4
        assert "SQLSTATE 22012" in capsys.readouterr().err

        partial = instance.get_runs(dg.RunsFilter(tags={PARTIAL_TAG: "true"}))
        assert len(partial) == 4
        for run in partial:
            logged = [str(entry) for entry in instance.all_logs(run.run_id)]
            recorded = " ".join([str(run.run_config), str(run.tags), *logged])
            assert SECRET not in recorded
        snapshot = dg.AssetKey(["mine", "snapshot"])
        (entry,) = instance.fetch_materializations(snapshot, limit=10).records
        copied = entry.asset_materialization
        assert copied is not None
        assert copied.metadata["dagster/partition_row_count"].value == 50
        seen = [r.asset_observation for r in instance.fetch_observations(snapshot, 10).records]
        assert [o.metadata["partial_rows"].value for o in seen if o is not None] == [0, 3]

        # The UI executes the run again without its condition.
        location = load_location(module)
        again = location.repository.get_job("mine_snapshot").execute_in_process(
            instance=instance, tags=partial[0].tags, raise_on_error=False
        )
        assert not again.success
        (failure,) = again.get_step_failure_events()
        assert "not stored with its run" in str(failure.event_specific_data)
        assert instance.fetch_materializations(snapshot, limit=10).records == [entry]


LOGS = """
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions

tables = tuple(CdcTable("public", name, without_key="log") for name in ("t", "u"))
defs = build_cdc_definitions(CdcCapture("mine", "pub", tables, slot="{slot}"))
"""


@pytest.mark.sampled
def test_a_table_with_a_key_is_compared_if_tables_without_a_key_are_logs(
    database: Database,
    locations: Locations,
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database.execute("create table t (id int primary key, v text)")
    database.execute("create table u (v text); alter table u replica identity full")
    database.execute("insert into t values (1, 'a'); insert into u values ('a')")
    database.execute("create publication pub for table t, u")
    module = locations.write(database, LOGS.format(slot=f"s_{database.name}"))
    assert main(["sync", "-m", module]) == 0
    live = delta_table(table_path(Lake(str(tmp_path / "lake")), "mine", "public", "t", 1))
    spark.sql(f"UPDATE {live} SET v = 'wrong'")
    capsys.readouterr()
    assert main(["verify", "-m", module]) == 1
    printed = capsys.readouterr()
    assert re.search(r"differs +'1' +v", printed.out)
    assert "Not compared: public.u: without_key: log" in printed.out
    assert main(["verify", "-m", module, "public.u"]) == 2
