"""The log files of library output, bounded in size and number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pgcdc_assets.cli.library_log import (
    FILES_KEPT,
    library_log,
    open_library_log,
    terminal,
    trim,
)
from pgcdc_assets_tests.support.commands import pgcdc
from pgcdc_assets_tests.support.database import Database


def test_only_our_own_lines_reach_the_terminal(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from pgcdc_assets.cli.library_log import open_library_log, terminal\n"
        "open_library_log(Path(sys.argv[1]), 'test')\n"
        "os.write(1, b'noise')\n"
        "os.write(2, b'noise')\n"
        "os.system('echo noise')\n"
        "print('noise', file=sys.stderr)\n"
        "print('result')\n"
        "print('progress', file=terminal())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("result\n", "progress\n")
    (log,) = tmp_path.glob("*-test-*.log")
    assert log.read_text().count("noise") == 4


def test_a_full_disk_of_the_log_changes_no_exit_status(tmp_path: Path) -> None:
    """H7: a limit on file sizes simulates a full disk. The rest was written at the exit: 120."""
    script = (
        "import logging, os, resource, sys\n"
        "from pathlib import Path\n"
        "from pgcdc_assets.cli.library_log import open_library_log, terminal\n"
        "log = open_library_log(Path(sys.argv[1]), 'test')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6, 6))\n"
        "print('noise', file=sys.stderr)\n"
        "print('more noise', file=sys.stderr)\n"
        "logging.error('more noise')\n"
        "log.settle()\n"
        "print('result')\n"
        "print('progress', file=terminal())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "result\n", "progress\n")
    (log,) = tmp_path.glob("*-test-*.log")
    assert log.read_text() == "noise\n"


def test_the_descriptors_are_restored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with library_log(tmp_path / "logs", "test") as log:
        os.write(2, b"noise")
        print("ours", file=terminal())
        assert log.has_content()
    os.write(2, b"after")
    assert log.path.read_text() == "noise"
    assert "after" in capfd.readouterr().err


def test_an_empty_log_leaves_no_file(tmp_path: Path) -> None:
    with library_log(tmp_path / ".pgcdc" / "logs", "test"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_files_are_kept(tmp_path: Path) -> None:
    for number in range(FILES_KEPT + 5):
        (tmp_path / f"20200101T0000{number:02}-sync-1.log").touch()
    open_library_log(tmp_path, "test").close()
    assert len(list(tmp_path.iterdir())) == FILES_KEPT - 1
    assert not (tmp_path / "20200101T000000-sync-1.log").exists()


def test_many_later_commands_keep_the_file_of_a_running_command(tmp_path: Path) -> None:
    with library_log(tmp_path, "long") as log:
        os.write(2, b"noise")
        for number in range(FILES_KEPT + 5):
            (tmp_path / f"29990101T0000{number:02}-status-1.log").touch()
        subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys\nfrom pathlib import Path\n"
                "from pgcdc_assets.cli.library_log import open_library_log\n"
                "open_library_log(Path(sys.argv[1]), 'short')",
                str(tmp_path),
            ],
            check=True,
        )
        assert log.path.read_text() == "noise"
    assert len(list(tmp_path.iterdir())) < FILES_KEPT + 5


def test_a_command_whose_log_was_deleted_ends_without_an_error(tmp_path: Path) -> None:
    with library_log(tmp_path, "long") as log:
        os.write(2, b"noise")
        log.path.unlink()


def test_a_long_file_keeps_its_beginning_and_its_end_and_writers_continue(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"begin" + b"x" * 100_000 + b"end")
        trim(path, 1_000)
        writer.write(b"later")
    text = path.read_text()
    assert len(text) < 1_000
    assert text.startswith("begin")
    assert text.endswith("endlater")


def test_a_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    """The folder may be that of PGCDC_STATE or TMPDIR, with permissions of its own."""
    with library_log(tmp_path / "state" / "logs", "test"):
        (tmp_path / "state" / "made by the command").touch()
    (tmp_path / "state" / "made by the command").unlink()
    with library_log(tmp_path / "state" / "logs", "test"):
        pass
    assert list((tmp_path / "state").iterdir()) == []


def test_the_logs_of_other_programs_are_kept(tmp_path: Path) -> None:
    names = {f"{number:02}.log" for number in range(FILES_KEPT + 5)}
    for name in names:
        (tmp_path / name).touch()
    open_library_log(tmp_path, "test").close()
    assert {path.name for path in tmp_path.iterdir()} == names


_FOLLOWED = """type: pgcdc_assets.PostgresCdcComponent
attributes: {name: mine, publication: p, tables: all}
"""


@pytest.mark.postgres
def test_the_report_of_a_sync_is_the_whole_standard_output_if_its_file_is_that(
    project: Path, database: Database
) -> None:
    """The log of libraries has the descriptor to which `/dev/stdout` leads."""
    database.execute("create publication p for all tables")
    (project / "defs" / "mine").mkdir(parents=True)
    (project / "defs" / "mine" / "defs.yaml").write_text(_FOLLOWED)
    done = pgcdc("sync", "--json", "/dev/stdout")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert "publication p has no table to capture yet" in done.stderr
