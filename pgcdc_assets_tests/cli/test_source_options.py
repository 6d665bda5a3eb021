"""What the commands print of prepared transactions and of failover."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pgcdc_assets.cli import main
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.orchestration.project.code_location import find_captures, load_defs_folders
from pgcdc_assets.postgres import prepared_transactions
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres


def _lines(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([command, "--name", "mine"]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines() if word in line]


@pytest.mark.sampled
@pytest.mark.every_pg
def test_prepared_transactions_are_printed_with_age_and_remedy(
    project: Path,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`status` lists all; `check` warns of those that may be forgotten."""
    database.execute("create table t (id int primary key); create publication p for table t")
    slot = ["--slot", f"s_{database.name}"]
    assert main(["init", "--name", "mine", "--publication", "p", *slot]) == 0
    capsys.readouterr()
    assert _lines("status", " transaction ", capsys) == []
    gid, other = f"it's {database.name}", f"second {database.name}"
    database.prepare(gid, "insert into t values (1)")
    database.prepare(other, "insert into t values (2)")
    [first, second] = _lines("status", "PREPARED", capsys)
    assert first.startswith(f'PREPARED transaction "{gid}" (xid ')
    assert first.endswith(" s old")
    assert other in second
    assert _lines("check", "was prepared", capsys) == []

    monkeypatch.setattr(prepared_transactions, "_FORGOTTEN", dt.timedelta(0))
    [first, second] = _lines("status", "WARNING prepared", capsys)
    remedy = f"commit prepared 'it''s {database.name}', or: rollback prepared 'it''s "
    assert remedy in first
    [first, second] = _lines("check", "was prepared", capsys)
    assert first.startswith("warning") and gid in first
    assert any(remedy in line for line in _lines("check", "remedy", capsys))
    database.end_prepared(gid)
    database.end_prepared(other, "rollback")
    assert _lines("status", " transaction ", capsys) == []


@pytest.mark.every_pg
def test_init_writes_failover_for_a_server_that_has_it(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute("create table t (id int primary key); create publication p for table t")
    path = project / "defs" / "mine" / "defs.yaml"
    init = ["init", "--name", "mine", "--publication", "p"]
    if database.server.version < 17:
        assert main([*init, "--failover"]) == 2
        assert "`failover` requires Postgres 17" in capsys.readouterr().err
        assert not path.exists()
        return
    assert main([*init, "--failover"]) == 0
    assert "warning: synchronized_standby_slots is empty" in capsys.readouterr().out
    assert yaml.safe_load(path.read_text())["attributes"]["failover"] is True
    assert find_captures(load_defs_folders([project / "defs"]))["mine"].capture.failover
    assert main(["init", "--name", "mine", "--update", "--failover"]) == 2
    assert main([*init, "--force"]) == 0
    assert "failover" not in path.read_text()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.every_pg(since=17)
def test_a_sync_that_waits_for_a_standby_says_so_and_continues_without_it(
    project: Path, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_server.start()
    database = Database(own_server, "postgres")
    monkeypatch.setenv("PGCDC_DSN", database.conninfo)
    monkeypatch.setenv("PGCDC_SPARK_REMOTE", "local")
    database.execute("create table t (id int primary key); create publication p for table t")
    database.query("select pg_create_physical_replication_slot('absent')")
    database.execute("alter system set synchronized_standby_slots = 'absent'")
    database.query("select pg_reload_conf()")
    assert main(["init", "--name", "mine", "--publication", "p", "--failover"]) == 0
    with subprocess.Popen(
        [sys.executable, "-m", "pgcdc_assets.cli", "sync", "--name", "mine"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "The server reports: " in line:
                break
        assert "absent" in line
        assert line.rstrip().endswith("start the standby, or take its slot out of this setting.")
        database.execute("alter system reset synchronized_standby_slots")
        database.query("select pg_reload_conf()")
        rest = process.stdout.read()
        assert process.wait(120) == 0, rest
