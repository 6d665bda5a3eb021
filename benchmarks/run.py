"""Run benchmarks, print their results and save them: `make bench [ONLY=capture,merge]`.

Each benchmark waits until the machine is idle, for at most five minutes. At its end, its results
are saved in results.json and on the page of figures. A failed benchmark saves no result, and the
next benchmarks run.
"""

from __future__ import annotations

import argparse
import compileall
import datetime as dt
import os
import sys
import time
import traceback
from pathlib import Path

import psutil

import pgcdc_assets
from benchmarks.benchmark import BENCHMARKS, Benchmark
from benchmarks.environment import describe_machine, find_commit
from benchmarks.page import write_page
from benchmarks.results import RESULTS, Result, entry_of, save, table
from benchmarks.scale import SCALE
from pgcdc_assets.cli import spark_prepare

_MOST_BUSY_PERCENT = 5.0
_SECONDS_TO_IDLE = 300.0
_SAMPLE_SECONDS = 5.0


def main() -> int:
    """Run the selected benchmarks; return 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", default=",".join(BENCHMARKS), help=f"some of: {', '.join(BENCHMARKS)}"
    )
    names = parser.parse_args().only.split(",")
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        parser.error(
            f"no benchmark is named {', '.join(unknown)}; known are {', '.join(BENCHMARKS)}"
        )
    _prepare_installation()
    commit = find_commit()
    measured: list[Result] = []
    failed = []
    for name in names:
        print(f"{name}:", file=sys.stderr, flush=True)
        try:
            measured += _run(name, BENCHMARKS[name], commit)
        except (Exception, SystemExit) as error:
            failed.append(name)
            traceback.print_exception(error)
    print(table(measured))
    print(f"\nsaved in {RESULTS}" if SCALE == 1 else f"\nat scale {SCALE:g}: not saved")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _prepare_installation() -> None:
    """Compile the package and write the archive of Java classes, as `make install` does.

    Processes of benchmarks use both. Otherwise each process compiles 100 to 250 modules, if the
    environment forbids bytecode files. The archive of this installation may be deleted.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(Path(pgcdc_assets.__file__).parent, quiet=1)
    spark_prepare.prepare_spark()


def _run(name: str, benchmark: Benchmark, commit: str | None) -> list[Result]:
    """Run one benchmark, and save its results unless the size is reduced."""
    busy = wait_until_idle() if SCALE == 1 else None
    machine = {**describe_machine(benchmark.postgres), "busy_percent_before": busy}
    began_at, began = dt.datetime.now(dt.UTC), time.monotonic()
    results = list(benchmark.run())
    context = {
        "benchmark": name,
        "date": began_at.isoformat(timespec="seconds"),
        "commit": commit,
        "seconds_of_benchmark": round(time.monotonic() - began),
        "settings": benchmark.settings(),
        "machine": machine,
    }
    if SCALE == 1:
        save(entry_of(result, context) for result in results)
        write_page()
    return results


def wait_until_idle() -> float:
    """Wait until the processors are idle for five seconds, or until the time is over.

    The load average still contains the previous benchmark after minutes, so it is not used. Files
    of the previous benchmark are written to the disk first. A wait for the disk counts as busy.

    Returns:
        the percentage of busy processor time in the last five seconds.
    """
    os.sync()
    began = time.monotonic()
    while True:
        busy: float = round(100 - psutil.cpu_times_percent(_SAMPLE_SECONDS).idle, 1)
        if busy <= _MOST_BUSY_PERCENT or time.monotonic() - began >= _SECONDS_TO_IDLE:
            return busy
        _log(f"the processors are {busy:g} % busy: waiting for {_MOST_BUSY_PERCENT:g} % or less")


def _log(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
