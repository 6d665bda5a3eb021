"""The help of the commands, and outputs that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HELP = f'"{sys.executable}" -m pgcdc_assets.cli sync --help'


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("environment", ["PYTHONUNBUFFERED=", "PYTHONUNBUFFERED=1"])
def test_the_end_of_the_reader_of_the_help_has_a_documented_exit_status(environment: str) -> None:
    done = _shell(f"{{ sleep 1; {environment} {HELP}; }} | true")
    assert (done.returncode, done.stderr) == (130, "")


def test_help_that_cannot_be_written_is_one_sentence() -> None:
    done = _shell(f"{HELP} > /dev/full")
    assert (done.returncode, done.stderr) == (
        1,
        "pgcdc: The help cannot be written: No space left on device.\n",
    )
    assert _shell(f"{HELP} >&-").returncode == 0


def test_a_full_disk_of_the_output_is_named_and_hides_no_exit_status(tmp_path: Path) -> None:
    spark = f'PGCDC_STATE="{tmp_path}" "{sys.executable}" -m pgcdc_assets.cli spark'
    result = _shell(f"{spark} status > /dev/full")
    assert result.returncode == 1
    assert result.stderr.startswith("pgcdc: Unexpected OSError (No space left on device): ")
    error = _shell(f"{spark} start --conf nothing 2> /dev/full")
    assert (error.returncode, error.stdout) == (2, "")
