"""`pgcdc rebuild`."""

from __future__ import annotations

import argparse

from pgcdc_assets.cli.output import say
from pgcdc_assets.cli.tables import print_table
from pgcdc_assets.errors import ConfigurationError

_HEADER = ("table", "rebuilt through", "was at", "changes", "rows", "seconds")
_ENTRIES = (
    "rebuilt_through",
    "watermark_before",
    "changes_read",
    "dagster/row_count",
    "seconds",
)


def run(options: argparse.Namespace) -> int:
    """Build SCD tables of one capture from its raw zone.

    Raises:
        ConfigurationError: the capture has no table.
        PgcdcError: the error of the run; tables that the error does not name are rebuilt.
    """
    from pgcdc_assets.orchestration.jobs.in_process import build_pool_wait, run_in_process
    from pgcdc_assets.orchestration.jobs.rebuild import parse_lsn, rebuild_op_name
    from pgcdc_assets.orchestration.names import Names
    from pgcdc_assets.orchestration.project.code_location import load_location
    from pgcdc_assets.orchestration.project.home import open_instance
    from pgcdc_assets.orchestration.runs.errors import error_of_run

    location = load_location(options.module)
    (loaded,) = location.select(options.name)
    capture = loaded.capture
    # Raise the error before the start of a session.
    if not capture.select_tables(options.tables):
        raise ConfigurationError(
            reason=f"Capture {options.name} has no table to rebuild: pgcdc check says why."
        )
    parse_lsn(options.through)
    config = {"tables": options.tables, "through": options.through}
    repository = location.repository
    with open_instance() as instance:
        loaded.spark.session(loaded.lake.lake())
        result = run_in_process(
            repository.get_job(Names.of(capture).rebuild_job),
            instance,
            {},
            wait=build_pool_wait(instance, repository, capture.name, say=say),
            ops={rebuild_op_name(capture): {"config": config}},
        )
    rows = []
    for event in result.get_asset_observation_events():
        observation = event.asset_observation_data.asset_observation
        entries = [str(observation.metadata[name].value) for name in _ENTRIES]
        rows.append(("/".join(observation.asset_key.path[1:]), *entries))
    if rows:
        print_table(_HEADER, rows)
    if not result.success:
        raise error_of_run(result)
    return 0
