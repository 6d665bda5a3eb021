"""`pgcdc status --watch` repeats until an interrupt, also into a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres


def start_watch(database: Database, folder: Path) -> subprocess.Popen[str]:
    (folder / "dagster").mkdir()
    surroundings = {
        "PGCDC_DSN": database.conninfo,
        "PGCDC_LAKE": str(folder / "lake"),
        "DAGSTER_HOME": str(folder / "dagster"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "pgcdc_assets.cli", "status", "--watch", "0.1"],
        env={**os.environ, **surroundings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_twice(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for _ in range(2):
        assert any("nothing is captured yet" in line for line in iter(process.stdout.readline, ""))


@pytest.mark.sampled
def test_a_watch_repeats_and_ends_cleanly_at_an_interrupt(
    database: Database, tmp_path: Path
) -> None:
    with start_watch(database, tmp_path) as process:
        try:
            read_twice(process)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out


@pytest.mark.sampled
def test_a_watch_ends_cleanly_with_the_reader_of_its_pipe(
    database: Database, tmp_path: Path
) -> None:
    with start_watch(database, tmp_path) as process:
        try:
            read_twice(process)
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert process.wait(60) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "1e12", "soon"])
def test_an_interval_that_is_no_time_to_sleep_is_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", f"--watch={seconds}"])
    assert ended.value.code == 2
    assert "--watch" in capsys.readouterr().err
