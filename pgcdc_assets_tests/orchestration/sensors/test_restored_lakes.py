"""Lakes whose tables are ahead of the raw zone, which was restored together with the source."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.cli import main, status
from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.merge import rebuild_table
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import MessagePolicy, WindowPolicy
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.database import Database, create_database

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

_TABLES = (CdcTable("public", "a"), CdcTable("public", "b", (1, 2)))


def _start(server: EmbeddedServer, lake: Lake, instance: dg.DagsterInstance) -> Orchestrated:
    database = create_database(server.start())
    database.execute("create table a (id int primary key, v text); insert into a values (1, 'x')")
    database.execute("create table b (id int primary key, v text); insert into b values (1, 'x')")
    database.execute("create publication pub for table a, b")
    capture = CdcCapture(
        NAME,
        "pub",
        _TABLES,
        slot=f"s_{database.name}",
        windows=WindowPolicy(max_age_seconds=0, retry_seconds=0, run_seconds=0),
        messages=MessagePolicy(),
    )
    return Orchestrated(database, lake, instance, capture)


def _restarted(before: Orchestrated) -> Orchestrated:
    """Return the capture in a new code location, as after a restart of its processes."""
    return Orchestrated(before.database, before.lake, before.instance, before.capture)


def _emit(database: Database, content: str) -> None:
    database.execute("select pg_logical_emit_message(true, 'test', %s)", (content,))


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", source, target], check=True)


@pytest.mark.parametrize("own_server", [18], indirect=True)
def test_nothing_is_captured_while_tables_are_ahead_of_the_raw_zone(
    own_server: EmbeddedServer,
    lake: Lake,
    instance: dg.DagsterInstance,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The slot continues with other changes, and merges would leave out those below the watermarks.

    The source and the raw zone were restored from one time, the tables were not.
    """
    orchestrated = _start(own_server, lake, instance)
    database, zone = orchestrated.database, orchestrated.zone
    orchestrated.sync()
    _emit(database, "kept")
    orchestrated.sync()
    end = zone.changes.captured_through(1)
    assert end is not None
    own_server.stop()
    _replace(own_server.data_dir, tmp_path / "source")
    _replace(Path(zone.uri), tmp_path / "raw")
    own_server.start()
    database.execute("insert into b select n, 'lost' from generate_series(2, 500) n")
    _emit(database, "lost")
    orchestrated.sync()
    own_server.stop()
    _replace(tmp_path / "source", own_server.data_dir)
    _replace(tmp_path / "raw", Path(zone.uri))
    own_server.start()
    database.execute("insert into b values (2, 'other'); update a set v = 'other'")
    _emit(database, "other")
    database.execute("insert into b select n, 'later' from generate_series(3, 2000) n")

    restarted = _restarted(orchestrated)
    with pytest.raises(
        RawZoneError, match=rf"public.b \(scd2\) through.*--through {end};"
    ) as found:
        restarted.sync()
    with pytest.raises(Exception, match="restored from different times"):
        restarted.tick("lag")
    assert zone.changes.captured_through(1) == end
    monkeypatch.setenv("DAGSTER_HOME", instance.root_directory)
    monkeypatch.setattr(status, "load_location", lambda module: restarted.location)
    assert main(["status"]) == 0
    assert f"PROBLEM {found.value}" in capsys.readouterr().out
    findings = examine_capture(database.settings(), restarted.capture, zone)
    errors = [finding for finding in findings if finding.severity == "error"]
    assert [(error.code, str(error)) for error in errors] == [("restored", str(found.value))]

    for table in _TABLES:
        for scd in table.scd:
            rebuild_table(spark, zone, replace(table, scd=(scd,)), scd, end)
    shutil.rmtree(lake.path(NAME, "messages"))
    restarted.sync()
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")
    history = spark.read.format("delta").load(lake.path(NAME, "scd2", "public", "b"))
    assert history.where("_is_current").count() == 2000
    assert history.where("v = 'lost'").count() == 0
    messages = spark.read.format("delta").load(lake.path(NAME, "messages"))
    assert sorted(row["text"] for row in messages.collect()) == ["kept", "other"]
