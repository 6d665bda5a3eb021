"""The help of the commands."""

from __future__ import annotations

import subprocess
import sys

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
