"""`pgcdc resnapshot`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pgcdc_assets.cli.progress import progress
from pgcdc_assets.errors import ConfigurationError

if TYPE_CHECKING:
    from pgcdc_assets.orchestration.project.code_location import LoadedCapture
    from pgcdc_assets.orchestration.runs.partial_request import PartialRequest


def run(options: argparse.Namespace) -> int:
    """Take new snapshots of tables of one capture, and merge them.

    The snapshot job copies the tables, as in the UI. Then a sync merges the snapshots and the
    changes after them.

    Raises:
        ConfigurationError: the capture has no table.
        PgcdcError: the error of a run; tables that the error does not name are merged.
    """
    from pgcdc_assets.orchestration.jobs.sync import sync_capture
    from pgcdc_assets.orchestration.jobs.sync_report import SyncLimits
    from pgcdc_assets.orchestration.project.code_location import load_location
    from pgcdc_assets.orchestration.project.home import open_instance
    from pgcdc_assets.orchestration.runs.applied_snapshots import (
        check_applied,
        check_new_applied,
        find_merged,
    )
    from pgcdc_assets.orchestration.state import left_tables
    from pgcdc_assets.orchestration.table_list import refresh_at_load

    with refresh_at_load():
        location = load_location(options.module)
    (loaded,) = location.select(options.name)
    left = {} if options.tables else left_tables(loaded.zone, loaded.capture)
    selected = loaded.capture.select_tables(options.tables)
    tables = [table for table in selected if table.name not in left]
    partial = None
    if options.where is not None:
        partial, tables = _request(loaded, options), []
    elif not tables:
        raise ConfigurationError(
            reason=f"Capture {options.name} has no table to take a snapshot of: pgcdc check says "
            "why."
        )
    limits = SyncLimits(wait_seconds=options.wait_seconds)
    merged = find_merged(loaded.zone, tables)
    with open_instance() as instance, progress() as display:
        report = sync_capture(
            instance,
            location,
            loaded,
            say=display.say,
            limits=limits,
            resnapshot=tables,
            partial=partial,
        )
    check_new_applied(loaded.zone, merged)
    if partial is not None:
        taken = partial.report
        assert taken is not None
        if taken.row_count:
            check_applied(loaded.zone, partial.table, taken.position)
        what = f"{taken.row_count} rows of {partial.table.qualified_name} at {taken.snapshot_lsn}"
    else:
        what = f"new snapshots of {', '.join(table.qualified_name for table in tables)}"
    print(f"{options.name}: {what} are merged, with what was committed before {report.barrier}")
    return 0


def _request(loaded: LoadedCapture, options: argparse.Namespace) -> PartialRequest:
    """Check a partial snapshot before any run.

    Raises:
        ConfigurationError: it is refused.
    """
    from pgcdc_assets.orchestration.runs.partial_request import (
        PartialRequest,
        build_partial_snapshot,
    )

    if len(set(options.tables)) != 1:
        raise ConfigurationError(
            reason="--where is a condition over the columns of one table: name exactly one, as in "
            f"pgcdc resnapshot {options.name} SCHEMA.TABLE --where CONDITION."
        )
    (table,) = loaded.capture.select_tables(options.tables[:1])
    request = PartialRequest(table, options.where)
    settings = loaded.postgres.settings()
    build_partial_snapshot(loaded.capture, settings, loaded.zone, request).check()
    return request
