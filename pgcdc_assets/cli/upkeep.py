"""`pgcdc upkeep`."""

from __future__ import annotations

import argparse
import time

from pgcdc_assets.cli.output import complain, say
from pgcdc_assets.errors import PgcdcError


def run(options: argparse.Namespace) -> int:
    """Run the daily job of one capture, or of all captures.

    A capture whose job fails does not stop the next one. The highest exit status is returned.

    Raises:
        PgcdcError: the error of the only capture.
    """
    from pgcdc_assets.orchestration.jobs.in_process import build_pool_wait, run_in_process
    from pgcdc_assets.orchestration.names import Names
    from pgcdc_assets.orchestration.project.code_location import load_location
    from pgcdc_assets.orchestration.project.home import open_instance
    from pgcdc_assets.orchestration.runs.errors import error_of_run

    location = load_location(options.module)
    captures, repository = location.select(options.name), location.repository
    failures: list[PgcdcError] = []
    with open_instance() as instance:
        for loaded in captures:
            name, started = loaded.capture.name, time.monotonic()
            job = repository.get_job(Names.of(loaded.capture).maintenance_job)
            wait = build_pool_wait(instance, repository, name, say=say)
            result = run_in_process(job, instance, {}, wait=wait)
            if not result.success:
                error = error_of_run(result)
                if len(captures) == 1:
                    raise error
                complain(f"{name}: {error}")
                failures.append(error)
                continue
            print(
                f"{name}: expired data is deleted and small files are compacted "
                f"({time.monotonic() - started:.1f} s)"
            )
    return max((error.exit_status for error in failures), default=0)
