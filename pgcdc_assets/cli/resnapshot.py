"""`pgcdc resnapshot`."""

from __future__ import annotations

import argparse

from pgcdc_assets.cli.progress import progress


def run(options: argparse.Namespace) -> int:
    """Take new snapshots of tables of one capture, and merge them.

    The snapshot job copies the tables, as in the UI. Then a sync merges the snapshots and the
    changes after them.

    Raises:
        PgcdcError: the error of a run; tables that the error does not name are merged.
    """
    from pgcdc_assets.orchestration.jobs.sync import SyncLimits, sync_capture
    from pgcdc_assets.orchestration.project.code_location import load_location
    from pgcdc_assets.orchestration.project.home import open_instance
    from pgcdc_assets.orchestration.state import left_tables
    from pgcdc_assets.orchestration.table_list import refresh_at_load

    with refresh_at_load():
        location = load_location(options.module)
    (loaded,) = location.select(options.name)
    left = {} if options.tables else left_tables(loaded.zone, loaded.capture)
    selected = loaded.capture.select_tables(options.tables)
    tables = [table for table in selected if table.name not in left]
    limits = SyncLimits(wait_seconds=options.wait_seconds)
    with open_instance() as instance, progress() as display:
        report = sync_capture(
            instance, location, loaded, say=display.say, limits=limits, resnapshot=tables
        )
    names = ", ".join(table.qualified_name for table in tables)
    print(
        f"{options.name}: new snapshots of {names} are merged, with what was committed before "
        f"{report.barrier}"
    )
    return 0
