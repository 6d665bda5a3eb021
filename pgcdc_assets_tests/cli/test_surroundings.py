"""Commands in odd surroundings: closed pipes, terminals, folders, broken modules, many captures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets.orchestration.project import home
from pgcdc_assets_tests.support.commands import pgcdc
from pgcdc_assets_tests.support.database import Database

_LOCATION = """
import dagster as dg
from pgcdc_assets import CdcCapture, CdcTable, PostgresResource, build_cdc_definitions
defs = dg.Definitions.merge(
    build_cdc_definitions(
        CdcCapture("absent", "no_such_publication", (CdcTable("public", "\\u20ac"),)),
        postgres=PostgresResource(capture="absent", dsn_env="ABSENT_DSN"),
    ),
    build_cdc_definitions(CdcCapture("there", "p", (CdcTable("public", "\\u20ac"),))),
)
"""


@pytest.fixture
def location(project: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module with two captures; the first one's source is not available."""
    database.execute('create table "€" (id int primary key); create publication p for table "€"')
    monkeypatch.setenv("ABSENT_DSN", "postgresql://nobody@127.0.0.1:1/nowhere")
    (project / "two_captures.py").write_text(_LOCATION)
    return "two_captures"


@pytest.mark.sampled
@pytest.mark.postgres
@pytest.mark.parametrize("command", ["check", "status"])
def test_a_capture_that_fails_does_not_hide_the_next_one(location: str, command: str) -> None:
    done = pgcdc(command, "-m", location)
    assert done.returncode == 3
    assert "pgcdc: absent: " in done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "ublication p, " in done.stdout


@pytest.mark.postgres
def test_a_capture_that_cannot_be_compared_does_not_hide_the_next_one(
    location: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "-m", location, "--wait-only"]) == 2
    error = capsys.readouterr().err
    assert "pgcdc: absent: Nothing is captured" in error
    assert "pgcdc: there: Nothing is captured" in error


@pytest.mark.postgres
def test_the_end_of_a_pipes_reader_has_a_documented_exit_status(location: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "pgcdc_assets.cli", "status", "--name", "there", "-m", location],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


@pytest.mark.sampled
@pytest.mark.postgres
def test_a_watch_names_the_capture_whose_server_does_not_answer(location: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "pgcdc_assets.cli", "status", "--watch", "0.1", "-m", location],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert any(line.startswith("absent: UNKNOWN ") for line in lines)
        finally:
            process.kill()


@pytest.mark.postgres
def test_a_name_that_the_terminal_cannot_show_is_escaped(location: str) -> None:
    done = pgcdc("check", "--name", "there", "-m", location, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert 'public."\\u20ac"' in done.stdout


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def broken(:", "SyntaxError: invalid syntax (broken_location.py, line 1)"),
        ("from pgcdc_assets import nothing", "cannot import name 'nothing'"),
        ("import os\nos.environ['NO_SUCH_VARIABLE']", "KeyError: 'NO_SUCH_VARIABLE'"),
        ("\nraise ValueError('sesame')", "ValueError ("),
        ("import sys\nsys.exit()", "SystemExit ("),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_wrong_setting(
    project: Path,
    source: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (project / "broken_location.py").write_text(source)
    monkeypatch.delitem(sys.modules, "broken_location", raising=False)
    monkeypatch.syspath_prepend(str(project))
    assert main(["status", "-m", "broken_location"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pgcdc: Module broken_location cannot be imported: ")
    assert expected in error
    assert "sesame" not in error


_LAZY = """
import os
import dagster as dg

@dg.definitions
def defs():
    %s
"""


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("os.environ['NO_SUCH_VARIABLE']", "KeyError: 'NO_SUCH_VARIABLE'"),
        ("raise ValueError('sesame')", "ValueError ("),
    ],
)
def test_definitions_that_cannot_be_loaded_are_a_wrong_setting(
    project: Path,
    statement: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (project / "lazy_location.py").write_text(_LAZY % statement)
    monkeypatch.delitem(sys.modules, "lazy_location", raising=False)
    monkeypatch.syspath_prepend(str(project))
    assert main(["status", "-m", "lazy_location"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pgcdc: The definitions of module lazy_location cannot be loaded: ")
    assert expected in error
    assert "sesame" not in error


_UNSET = """
import dagster as dg
from pgcdc_assets import *
from pgcdc_assets.settings.selection import TableSelection
defs = build_cdc_definitions(
    CdcCapture("mine", "p", (), selection=TableSelection())
    if %s
    else CdcCapture("mine", "p", (CdcTable("public", "t"),)),
    postgres=PostgresResource(capture="mine", conninfo=dg.EnvVar("UNSET_DSN")),
    spark=SparkResource(remote=%s),
)
"""


@pytest.mark.parametrize("remote", ["None", "'sc://u:sesame@host'", "dg.EnvVar('UNSET_DSN')"])
@pytest.mark.parametrize("follows", [False, True])
def test_a_variable_of_a_resource_that_is_not_set_is_a_wrong_setting(
    project: Path,
    remote: str,
    follows: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (project / "unset_location.py").write_text(_UNSET % (follows, remote))
    monkeypatch.syspath_prepend(str(project))
    for debug in ([], ["--debug"]):
        monkeypatch.delitem(sys.modules, "unset_location", raising=False)
        assert main(["status", "-m", "unset_location", *debug]) == 2
        error = capsys.readouterr().err
        assert "Set the environment variable UNSET_DSN" in error
        assert "sesame" not in error


@pytest.mark.parametrize("module", ["", ".relative"])
def test_a_text_that_is_no_module_is_a_wrong_setting(
    project: Path, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "-m", module]) == 2
    assert "cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["no_such_folder/report.json", "."])
def test_a_report_that_cannot_be_written_is_refused_before_the_sync(
    project: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sync", "-m", "no_such_module", "--json", place]) == 2
    assert "--json" in capsys.readouterr().err


@pytest.mark.postgres
def test_init_names_a_folder_that_it_cannot_write(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute("create table t (id int primary key); create publication p for table t")
    (project / "file").touch()
    arguments = ["init", "--name", "mine", "--publication", "p", "--defs", "file"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "file/mine/defs.yaml" in error
    assert "--defs" in error


@pytest.mark.postgres
def test_an_update_of_a_file_with_a_template_needs_the_publication(
    project: Path,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PUB", "p")
    database.execute("create table t (id int primary key); create publication p for table t")
    assert main(["init", "--name", "mine", "--publication", "p"]) == 0
    file = project / "defs" / "mine" / "defs.yaml"
    file.write_text(file.read_text().replace("publication: p", "publication: '{{ env.PUB }}'"))
    database.execute("create table u (id int primary key); alter publication p add table u")
    assert main(["init", "--name", "mine", "--update"]) == 2
    assert "--publication" in capsys.readouterr().err
    assert main(["init", "--name", "mine", "--update", "--publication", "p"]) == 0
    assert "public.u" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ("init --name ../evil --publication p", "'../evil'"),
        ("init --name x --publication p --slot BAD", "'BAD'"),
        ("check --publication p --slot BAD", "'BAD'"),
        ("check --slot s", "--slot belongs to --publication"),
        ("check --publication p --name BAD", "'pgcdc_BAD'"),
    ],
)
def test_a_wrong_name_is_refused_without_a_connection(
    arguments: str,
    wrong: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PGCDC_DSN", "postgresql://nobody@127.0.0.1:1/nowhere")
    assert main(arguments.split()) == 2
    assert wrong in capsys.readouterr().err


def test_a_malformed_dagster_yaml_is_a_wrong_setting(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in (
        "storage: [",
        "storage: {postgres: {password: sesame}}",
        "storage: {postgres: {postgres_db: {password: 48151623}}}",
        "- sesame",
        "storage: !!int sesame",
        "storage: caf\xe9 sesame",
    ):
        (project.parent / "home" / "dagster.yaml").write_bytes(text.encode("latin-1"))
        for debug in ([], ["--debug"]):
            assert main(["status", "-m", "pgcdc_assets.definitions", *debug]) == 2
            error = capsys.readouterr().err
            assert str(project.parent / "home" / "dagster.yaml") in error
            assert "sesame" not in error and "48151623" not in error


def test_a_state_folder_that_cannot_be_written_is_a_wrong_setting(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DAGSTER_HOME")
    (project / "file").touch()
    monkeypatch.setenv("PGCDC_STATE", str(project / "file"))
    assert main(["status"]) == 2
    assert "PGCDC_STATE" in capsys.readouterr().err
    monkeypatch.setenv("PGCDC_STATE", str(project / "state"))
    assert home.prepare_home().joinpath("dagster.yaml").read_text() == home.CONFIG.read_text()


@pytest.mark.parametrize("seconds", ["nan", "-1", "soon"])
def test_a_wait_that_is_no_time_is_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", f"--wait-seconds={seconds}"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--wait-seconds" in error
    assert "_wait" not in error.replace("--wait", "")


@pytest.mark.postgres
def test_tables_of_several_captures_need_the_name_of_one(
    location: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "-m", location, 'public."€"']) == 2
    assert "--name" in capsys.readouterr().err


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in which `pgcdc` is the command of this Python."""
    program = f'pgcdc() {{ "{sys.executable}" -m pgcdc_assets.cli "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.postgres
def test_a_command_without_standard_streams_has_its_exit_status(location: str) -> None:
    done = _shell(f"pgcdc status --name there -m {location} >&-")
    assert (done.returncode, done.stderr) == (0, "")
    failed = _shell(f"pgcdc status --name nope -m {location} 2>&-")
    assert (failed.returncode, failed.stdout, failed.stderr) == (2, "", "")


@pytest.mark.postgres
def test_the_end_of_a_pipes_reader_does_not_hide_an_error(project: Path) -> None:
    command = "PYTHONUNBUFFERED= pgcdc check --publication nope --verbose"
    done = _shell(f"set -o pipefail; {{ sleep 1; {command}; }} | true")
    assert done.returncode == 2, done.stderr
    assert "wrong or missing for publication nope" in done.stderr
    assert "BrokenPipeError" not in done.stderr


def test_a_current_folder_that_was_deleted_is_named(project: Path) -> None:
    done = _shell("mkdir gone; cd gone; rmdir ../gone; pgcdc status")
    assert done.returncode == 2
    assert "The current folder does not exist any more" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", ["PGCDC_STATE", "PGCDC_LAKE"])
def test_the_home_folder_of_an_unknown_user_is_a_wrong_setting(
    project: Path, variable: str
) -> None:
    done = pgcdc("spark", "status", **{variable: "~no-such-user/folder"})
    assert done.returncode == 2
    assert "begins with ~" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_slot_of_a_publication_with_the_longest_name_is_one_that_can_be_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGCDC_DSN", "postgresql://nobody@127.0.0.1:1/nowhere")
    assert main(["check", "--publication", "p" * 63]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


_FOLLOWED = """type: pgcdc_assets.PostgresCdcComponent
attributes: {name: mine, publication: p, tables: all}
"""


@pytest.mark.postgres
def test_a_resnapshot_of_no_table_is_refused(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute("create publication p for all tables")
    (project / "defs" / "mine").mkdir(parents=True)
    (project / "defs" / "mine" / "defs.yaml").write_text(_FOLLOWED)
    assert main(["resnapshot", "mine"]) == 2
    assert "Capture mine has no table to take a snapshot of" in capsys.readouterr().err


@pytest.mark.postgres
@pytest.mark.parametrize("option", ["--publication", "--name"])
def test_an_argument_that_is_not_utf8_is_a_wrong_setting(project: Path, option: str) -> None:
    done = _shell(f"pgcdc check {option} $'caf\\xe9'")
    assert done.returncode == 2
    assert done.stderr == f"pgcdc: Argument {option.strip('-')} is not valid UTF-8.\n"


@pytest.mark.postgres
@pytest.mark.parametrize("text", ["- a list\n", "attributes: {name: there, tables: [1]}\n", "1"])
def test_a_file_of_another_kind_does_not_stop_the_check_of_a_module(
    location: str, project: Path, text: str
) -> None:
    """The command reads the files of `defs` to name the line of a table."""
    (project / "defs").mkdir()
    (project / "defs" / "defs.yaml").write_text(text)
    done = pgcdc("check", "--name", "there", "-m", location)
    assert done.returncode == 0, done.stderr
