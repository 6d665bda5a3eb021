"""`pgcdc sync`."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pgcdc_assets.cli.output import complain, say
from pgcdc_assets.cli.progress import progress
from pgcdc_assets.error_text import counted
from pgcdc_assets.errors import ConfigurationError, PgcdcError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgcdc_assets.orchestration.project.code_location import LoadedCapture

# The log of libraries has the descriptor of the standard output, so a file of these names would be
# the log.
_STANDARD_OUTPUT = ("/dev/stdout", "/dev/fd/1")


def run(options: argparse.Namespace) -> int:
    """Capture and merge one capture, or all captures, through the WAL position at the start.

    A capture that fails does not stop the next capture. The highest exit status is returned.
    """
    started = time.monotonic()
    from pgcdc_assets.orchestration.jobs.sync import sync_capture
    from pgcdc_assets.orchestration.jobs.sync_report import SyncLimits, SyncReport
    from pgcdc_assets.orchestration.project.code_location import load_location
    from pgcdc_assets.orchestration.project.home import open_instance
    from pgcdc_assets.orchestration.table_list import refresh_at_load

    reports: list[SyncReport] = []
    failures: list[PgcdcError] = []
    if options.adopt_slot and options.name is None:
        raise ConfigurationError(
            reason="--adopt-slot takes over the slot of one capture: name it with --name."
        )
    # The report is then the whole result.
    show: Callable[[str], None] = say if str(options.json) in _STANDARD_OUTPUT else print
    if options.json is not None:
        _check_place(options.json)
    with open_instance() as instance:
        with refresh_at_load():
            location = load_location(options.module, instance)
        captures = location.select(options.name)
        start_up = time.monotonic() - started
        for loaded in captures:
            try:
                _print_listed(loaded, show)
                if not loaded.capture.tables and loaded.zone.epochs.latest() is None:
                    name, publication = loaded.capture.name, loaded.capture.publication
                    show(f"{name}: publication {publication} has no table to capture yet")
                    continue
                with progress() as display:
                    report = sync_capture(
                        instance,
                        location,
                        loaded,
                        say=display.say,
                        limits=SyncLimits(wait_seconds=options.wait_seconds),
                        adopt_slot=options.adopt_slot,
                    )
            except PgcdcError as error:
                if len(captures) == 1:
                    raise
                complain(f"{loaded.capture.name}: {error}")
                failures.append(error)
                continue
            report.seconds = {"start_up": start_up, **report.seconds}
            start_up = 0.0
            reports.append(report)
            show(_summary(report))
    if options.json is not None:
        _write(options.json, [asdict(report) for report in reports])
    return max((error.exit_status for error in failures), default=0)


def _check_place(path: Path) -> None:
    """Check before the work that the report can be written.

    Raises:
        ConfigurationError: it cannot.
    """
    is_writable = os.access(path if path.exists() else path.parent, os.W_OK)
    if path.is_dir() or not path.parent.is_dir() or not is_writable:
        raise ConfigurationError(
            reason=f"--json names {path}, which cannot be written: name a file in an existing "
            "folder that this user can write."
        )


def _write(path: Path, reports: Sequence[Mapping[str, object]]) -> None:
    text = json.dumps(reports, indent=2)
    if str(path) in _STANDARD_OUTPUT:
        print(text)
        return
    try:
        path.write_text(f"{text}\n")
    except OSError as error:
        raise ConfigurationError(
            reason=f"The captures are merged, but the report {path} cannot be written "
            f"({error.strerror or error}): name another file with --json."
        ) from error


def _print_listed(loaded: LoadedCapture, show: Callable[[str], None]) -> None:
    """Print the tables of a followed publication that are not captured."""
    if loaded.capture.selection is None:
        return
    for table in loaded.zone.table_list.read().tables:
        if table.reason:
            show(f"{loaded.capture.name}: {table.name} is {table.state}: {table.reason}")


def _summary(report: object) -> str:
    from pgcdc_assets.orchestration.jobs.sync_report import SyncReport

    assert isinstance(report, SyncReport)
    parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in report.seconds.items())
    return (
        f"{report.name}: captured and merged through {report.barrier}: "
        f"{counted(report.change_count, 'change')} in {counted(report.window_count, 'window')}, "
        f"{counted(report.merge_count, 'merge')} ({parts})"
    )
