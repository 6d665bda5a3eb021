"""Run benchmarks, print their results and save them: `make bench [ONLY=capture,merge]`.

At the end of each benchmark, its results are saved in results.json and on the page of figures. A
failed benchmark saves no result, and the next benchmarks run.
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

import pgcdc_assets
from benchmarks.benchmark import BENCHMARKS, Benchmark
from benchmarks.environment import describe_machine, find_commit
from benchmarks.page import write_page
from benchmarks.results import RESULTS, Result, entry_of, save, table
from benchmarks.scale import SCALE


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
    _compile_package()
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


def _compile_package() -> None:
    """Compile the package, as pip does at an installation; processes of benchmarks use the result.

    Otherwise each process compiles 100 to 250 modules, if the environment forbids bytecode files.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(Path(pgcdc_assets.__file__).parent, quiet=1)


def _run(name: str, benchmark: Benchmark, commit: str | None) -> list[Result]:
    """Run one benchmark, and save its results unless the size is reduced."""
    machine = describe_machine(benchmark.postgres)
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
