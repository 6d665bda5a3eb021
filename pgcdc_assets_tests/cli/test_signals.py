"""Commands that a signal ends: one sentence, status 130, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets.failpoints import AFTER_BATCH_COMMIT, AFTER_DELTA_COMMIT, BEFORE_COPY_COMMIT
from pgcdc_assets.orchestration.project.home import open_instance
from pgcdc_assets_tests.support.commands import pgcdc
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.orchestration.location import Locations
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

MODULE = """
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions

defs = build_cdc_definitions(
    CdcCapture("mine", "pub", (CdcTable("public", "t"),), slot="{slot}")
)
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PHASES = {"copy": BEFORE_COPY_COMMIT, "capture": AFTER_DELTA_COMMIT, "merge": AFTER_BATCH_COMMIT}


@pytest.fixture
def module(
    database: Database, locations: Locations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Write a location with a capture of one table."""
    database.execute("create table t (id int primary key, v text); insert into t values (1, 'a')")
    database.execute("create publication pub for table t")
    monkeypatch.setenv("PGCDC_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return locations.write(database, MODULE.format(slot=f"s_{database.name}"))


def own_lines(output: str) -> list[str]:
    """Return the lines that are not progress, which begins with the time."""
    return [line for line in output.splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_sync_that_is_interrupted_says_so_and_the_next_one_is_complete(
    module: str, database: Database, phase: str, number: signal.Signals
) -> None:
    """H9: in its copy, its capture and its merge."""
    failpoint = f"{PHASES[phase]}:1:{number.name.removeprefix('SIG')}"
    done = pgcdc("sync", "-m", module, PGCDC_FAILPOINT=failpoint)
    assert own_lines(done.stderr) == ["pgcdc: Interrupted."]
    assert (done.returncode, done.stdout) == (130, "")
    with open_instance() as instance:
        assert all(run.is_finished for run in instance.get_runs())
    database.execute("insert into t values (2, 'b'); update t set v = 'c' where id = 1")
    done = pgcdc("sync", "-m", module)
    assert (done.returncode, own_lines(done.stderr)) == (0, [])
    assert pgcdc("verify", "-m", module).returncode == 0


@pytest.mark.sampled
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_command_that_is_interrupted_at_any_time_prints_no_stack_trace(
    module: str, tmp_path: Path, number: signal.Signals
) -> None:
    """The signal arrives during imports, during the work, and at the exit of the process."""
    logs = tmp_path / "state" / "logs"
    for delay in (0.0, 0.3, 0.8, 1.5, 2.5, 4.0):
        with subprocess.Popen(
            [sys.executable, "-m", "pgcdc_assets.cli", "status", "-m", module],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            wait_until(lambda: any(logs.glob(f"*-{process.pid}.log")), "the command's log")
            time.sleep(delay)
            process.send_signal(number)
            _, error = process.communicate(timeout=60)
        if error:
            assert error == "pgcdc: Interrupted.\n"
            # Python sends itself SIGINT at its exit, for which a shell shows 130, if an interrupt
            # has ended an `exec` of text, such as that of a dataclass.
            assert process.returncode in (130, -signal.SIGINT), delay
        else:
            assert process.returncode in (0, -number), delay


def test_a_command_below_nohup_continues_after_the_end_of_its_terminal(module: str) -> None:
    with subprocess.Popen(
        ["nohup", sys.executable, "-m", "pgcdc_assets.cli", "status", "-m", module],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        time.sleep(1)
        process.send_signal(signal.SIGHUP)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert out


def test_an_interrupt_for_which_a_library_raises_another_error_is_an_interrupt() -> None:
    """Pydantic raises a SchemaError if an interrupt arrives while it builds a class."""
    program = """
import os, signal, sys, time
from pgcdc_assets.cli import main, status

def run(options):
    try:
        os.kill(os.getpid(), signal.{name})
        time.sleep(10)
    except KeyboardInterrupt:
        raise ValueError from None

status.run = run
sys.exit(main())
"""
    for number in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, "-c", program.format(name=number.name), "status", "-m", "none"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (130, "pgcdc: Interrupted.\n"), number


@pytest.mark.parametrize("arguments", [["sync"], ["--version"]], ids=["fails", "exits"])
def test_a_call_from_python_restores_the_handlers_of_signals(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(number) for number in SIGNALS]
    with contextlib.suppress(SystemExit):
        main(arguments)
    assert [signal.getsignal(number) for number in SIGNALS] == before
