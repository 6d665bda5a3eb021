"""The failed merges of a one-shot run."""

from __future__ import annotations

from collections.abc import Collection

import dagster as dg

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.orchestration.assets.scd import find_scd_tables
from pgcdc_assets.orchestration.project.code_location import LoadedCapture
from pgcdc_assets.orchestration.state import read_state


def find_behind(
    repository: dg.RepositoryDefinition,
    loaded: LoadedCapture,
    keys: Collection[dg.AssetKey],
) -> set[dg.AssetKey]:
    """Return the SCD assets that need a merge among those that a failed run has not materialised.

    A run of a wide publication does not materialise its idle tables.
    """
    try:
        state = read_state(loaded.zone, loaded.capture)
    except PgcdcError:
        # The error of the run is the one to report.
        return set(keys)
    behind = {each.table for each in state.tables if each.needs_merge}
    tables = find_scd_tables(repository, loaded.capture)
    return {key for key in keys if tables.get(key) in behind}
