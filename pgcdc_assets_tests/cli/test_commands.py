"""The command line: sentences, exit statuses and files, without stack traces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import pgcdc_assets
from pgcdc_assets.cli import main
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify import Comparison
from pgcdc_assets_tests.support.commands import pgcdc
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.raw.epochs import EPOCH
from pgcdc_assets_tests.support.raw.rows import landed_range
from pgcdc_assets_tests.support.verify.empty_images import create_image

NOWHERE = "postgresql://nobody:sesame@127.0.0.1:1/nowhere"


@pytest.fixture(autouse=True)
def own_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_dagster_storage: None
) -> Iterator[None]:
    home = tmp_path / "dagster"
    home.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("PGCDC_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("PGCDC_DSN", NOWHERE)
    yield


@pytest.fixture
def source_database(
    own_surroundings: None, database: Database, monkeypatch: pytest.MonkeyPatch
) -> Database:
    """Return the database that the environment names."""
    monkeypatch.setenv("PGCDC_DSN", database.conninfo)
    return database


@pytest.mark.parametrize(
    "command",
    [
        *("", "check", "init", "sync", "status", "verify", "rebuild", "renew", "resnapshot"),
        *("upkeep", "spark"),
    ],
)
def test_help_lists_the_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*([command] if command else []), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "PGCDC_DSN" in out
    assert "exit status" in out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pgcdc {pgcdc_assets.__version__}\n"


def test_no_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2


def test_help_does_not_wait_for_dagster() -> None:
    script = (
        "import sys\nfrom pgcdc_assets.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(1 if 'dagster' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("check", marks=pytest.mark.soak),
        "sync",
        pytest.param("status", marks=pytest.mark.soak),
        "init --name x --publication p",
        pytest.param("renew --name shop", marks=pytest.mark.soak),
    ],
)
def test_an_unavailable_server_is_one_sentence_with_status_3(command: str, tmp_path: Path) -> None:
    more = ["--defs", str(tmp_path / "defs")] if command.startswith("init") else []
    # Warnings about Dagster's beta features are hidden, even if all warnings are enabled.
    done = pgcdc(*command.split(), *more, PYTHONWARNINGS="always")
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("pgcdc: ")
    assert "127.0.0.1:1" in line
    _, has_log, log = line.partition("Output of libraries is in ")
    if has_log:
        assert re.search("BetaWarning|PreviewWarning", Path(log).read_text()) is None
    assert done.stdout == ""
    assert "sesame" not in line


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["verify --name nope", "resnapshot nope"])
def test_a_wrong_name_is_one_sentence(command: str) -> None:
    done = pgcdc(*command.split())
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("pgcdc: There is no capture named nope")


@pytest.mark.sampled
def test_the_error_names_the_file_with_the_output_of_libraries(tmp_path: Path) -> None:
    (tmp_path / "noisy_location.py").write_text(
        "import os, subprocess, warnings\n"
        "warnings.warn('a warning')\n"
        "os.write(1, b'out of C\\n')\n"
        "subprocess.run('echo a child >&2', shell=True)\n"
        "from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions\n"
        'defs = build_cdc_definitions(CdcCapture("mine", "pub", (CdcTable("s", "t"),)))\n'
    )
    noise = ("a warning", "out of C", "a child")
    arguments = ("status", "-m", "noisy_location")
    here = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = pgcdc(*arguments, **here)
    (line,) = done.stderr.splitlines()
    assert done.stdout == ""
    log = Path(line.rpartition(" is in ")[2])
    assert all(each in log.read_text() for each in noise)
    assert log.stat().st_mode & 0o077 == 0
    log.unlink()
    shown = pgcdc(*arguments, "--verbose", **here)
    assert all(each in shown.stdout + shown.stderr for each in noise)


def test_debug_adds_the_stack_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--publication", "p", "--debug"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_malformed_connection_string_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGCDC_DSN", "postgresql://u:secret@[")
    assert main(["check", "--publication", "p"]) == 2
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "password",
    ["a@sesame", "a/sesame", "5/sesame", "a@b/sesame", "a/s@me", "p%40a/sesame", "sesame/x%40y"],
)
def test_no_part_of_an_unencoded_password_is_shown(
    password: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGCDC_DSN", f"postgresql://u:{password}@127.0.0.1:1/d")
    assert main(["check", "--publication", "p"]) == 2
    error = capsys.readouterr().err
    assert "percent-encoded" in error
    assert "sesame" not in error and "s@me" not in error


@pytest.mark.parametrize(
    "uri", ["s3://key:sesame@bucket/x", "abfss://c@a.dfs.core.windows.net/x?sig=sesame"]
)
@pytest.mark.parametrize("command", ["spark status", "check"])
def test_credentials_in_the_uri_of_a_lake_are_refused_and_not_shown(
    command: str, uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGCDC_LAKE", uri)
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert "PGCDC_LAKE contains credentials" in printed.err
    assert "sesame" not in printed.err + printed.out


def test_an_encoded_at_sign_is_part_of_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGCDC_DSN", "postgresql://u:a%40b%2Fc@127.0.0.1:1/d%40e")
    assert main(["check", "--publication", "p"]) == 3
    assert "d@e on 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "sync", "status", "upkeep", "verify"])
def test_the_error_names_an_unknown_capture_and_the_known_captures(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--name", "nope"]) == 2
    error = capsys.readouterr().err
    assert "nope" in error
    assert "shop" in error


def test_the_error_names_a_missing_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", "-m", "no_such_module"]) == 2
    assert "no_such_module" in capsys.readouterr().err


def test_the_error_names_a_missing_dagster_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", "/no/such/home")
    assert main(["sync"]) == 2
    assert "/no/such/home" in capsys.readouterr().err


@pytest.mark.postgres
def test_check_names_the_missing_privilege_and_its_grant(
    source_database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--publication", "missing"]) == 2
    printed = capsys.readouterr()
    assert "create publication" in printed.out
    assert "missing" in printed.err


def init(defs: Path, *more: str) -> int:
    """Write capture `mine` of publication `p`."""
    return main(["init", "--name", "mine", "--publication", "p", "--defs", str(defs), *more])


def tables_in(defs: Path) -> list[dict[str, Any]]:
    """Return the tables that capture `mine` declares."""
    written = yaml.safe_load((defs / "mine" / "defs.yaml").read_text())
    tables: list[dict[str, Any]] = written["attributes"]["tables"]
    return tables


@pytest.mark.postgres
def test_init_writes_a_capture_that_loads_and_refuses_to_write_it_twice(
    source_database: Database, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from pgcdc_assets.orchestration.project.code_location import find_captures, load_defs_folders

    source_database.execute("create table public.t (a int, b text, v numeric, primary key (b, a))")
    source_database.execute("create publication p for table t")
    defs = tmp_path / "defs"
    assert init(defs) == 0
    assert tables_in(defs) == [{"name": "public.t", "key": ["b", "a"], "scd": [1]}]
    assert set(find_captures(load_defs_folders([defs]))) == {"mine"}
    assert init(defs) == 2
    assert "--force" in capsys.readouterr().err
    assert init(defs, "--force") == 0


@pytest.mark.postgres
def test_init_writes_the_key_that_updates_and_deletes_send(
    source_database: Database, tmp_path: Path
) -> None:
    source_database.execute("create table public.t (id int primary key, code text not null unique)")
    source_database.execute("alter table public.t replica identity using index t_code_key")
    source_database.execute("create publication p for table t")
    assert init(tmp_path) == 0
    assert tables_in(tmp_path) == [{"name": "public.t", "key": ["code"], "scd": [1]}]


@pytest.mark.postgres
def test_init_writes_nothing_if_the_source_is_not_ready(
    source_database: Database, tmp_path: Path
) -> None:
    defs = tmp_path / "defs"
    assert main(["init", "--name", "mine", "--publication", "no", "--defs", str(defs)]) == 2
    assert not defs.exists()


@pytest.mark.postgres
def test_status_before_the_first_sync_reports_that_nothing_is_captured(
    source_database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "does not exist yet" in out
    assert "nothing is captured yet" in out


@pytest.mark.postgres
def test_status_after_the_slot_was_dropped_names_the_remedy(
    source_database: Database, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    epoch = replace(EPOCH, slot="pgcdc_shop", database=source_database.name)
    RawZone(Lake(str(tmp_path / "lake")), "shop").epochs.append(epoch)
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "pgcdc renew --name shop" in out
    assert "pgcdc sync" not in out


@pytest.mark.postgres
def test_a_comparison_that_waits_for_the_sensors_says_so(
    source_database: Database, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cluster = source_database.value("select system_identifier::text from pg_control_system()")
    epoch = replace(
        EPOCH,
        slot="pgcdc_shop",
        database=source_database.name,
        system_identifier=cluster,
        timeline=1,
    )
    RawZone(Lake(str(tmp_path / "lake")), "shop").epochs.append(epoch)
    assert main(["verify", "--wait-only", "--wait-seconds", "0"]) == 3
    printed = capsys.readouterr().err
    assert "shop: waiting until the sensors have captured the changes before it" in printed


@pytest.mark.postgres
def test_status_shows_the_progress_of_an_unfinished_snapshot(
    source_database: Database, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    zone = RawZone(Lake(str(tmp_path / "lake")), "shop")
    zone.epochs.append(replace(EPOCH, slot="pgcdc_shop", database=source_database.name))
    for number in (0, 1):
        zone.ranges.append(landed_range(number))
    with source_database.connect(autocommit=False) as held, held.cursor() as cursor:
        cursor.execute("set application_name = 'pgcdc snapshot shop'")
        cursor.execute("commit; begin isolation level repeatable read; select 1")
        assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "SNAPSHOT of the server held for " in out
    assert " transactions old" in out
    assert "COPY of shop.orders: 20 of 100 pages in 2 ranges, 10 rows, 100 B; the last" in out


@pytest.mark.postgres
def test_verify_before_the_first_sync_names_the_remedy(
    source_database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify"]) == 2
    assert "pgcdc sync" in capsys.readouterr().err


@pytest.fixture
def uncompared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a code location with tables that mirror the source, and tables that do not."""
    zone = RawZone(Lake(str(tmp_path / "lake")), "mine")
    create_image(zone, TableName("s", "keyed"), ("id",))
    create_image(zone, TableName("s", "log"), ())
    (tmp_path / "uncompared_location.py").write_text(
        "from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions\n"
        'tables = (CdcTable("s", "image"), CdcTable("s", "log", without_key="log"),\n'
        '          CdcTable("s", "keyed", without_key="log"),\n'
        '          CdcTable("s", "history", (2,)))\n'
        'defs = build_cdc_definitions(CdcCapture("mine", "pub", tables))\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "uncompared_location", raising=False)
    return "uncompared_location"


@pytest.mark.parametrize(
    ("table", "reason"), [("s.log", "without_key: log"), ("s.history", "scd: [2]")]
)
def test_verify_refuses_a_named_table_that_cannot_be_compared(
    uncompared: str, table: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "-m", uncompared, table, "s.image"]) == 2
    error = capsys.readouterr().err
    assert f"{table}: " in error
    assert reason in error
    assert "s.image" not in error


def test_verify_of_all_tables_lists_the_tables_that_are_not_compared(
    uncompared: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Comparison("s", "image", 3, 3, lsn=Lsn(0x10))
    monkeypatch.setattr("pgcdc_assets.cli.verify._verify", lambda *_: iter([found]))
    assert main(["verify", "-m", uncompared]) == 0
    table, *left_out = capsys.readouterr().out.split("Not compared: ")
    assert "s.image" in table
    assert [line.partition(":")[0] for line in left_out] == ["s.log", "s.history"]
    assert "without_key: log" in left_out[0]
    assert "scd: [2]" in left_out[1]
