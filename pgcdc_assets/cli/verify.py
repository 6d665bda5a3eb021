"""`pgcdc verify`."""

from __future__ import annotations

import argparse

from pgcdc_assets.cli.tables import print_table
from pgcdc_assets.errors import ConfigurationError, DifferenceFound
from pgcdc_assets.orchestration.loading import LoadedCapture, load_location
from pgcdc_assets.verify import Comparison, compare_table


def run(options: argparse.Namespace) -> int:
    """Compare tables with the source.

    Raises:
        DifferenceFound: one of them differs.
    """
    different = []
    for loaded in load_location(options.module).select(options.name):
        results = list(_compare(loaded, options.tables))
        print_table(
            ("table", "source rows", "target rows", "missing", "extra", "differing", "columns"),
            [_row(result) for result in results],
        )
        different += [f"{r.schema}.{r.table}" for r in results if not r.is_equal]
    if different:
        raise DifferenceFound(
            reason=f"{', '.join(different)} differ from the source. While writers are active, "
            "changes that are not merged yet show as differences: run `pgcdc sync` and verify at "
            "rest."
        )
    return 0


def _compare(loaded: LoadedCapture, names: list[str]) -> list[Comparison]:
    tables = {table.qualified_name: table for table in loaded.capture.tables if 1 in table.scd}
    unknown = sorted(set(names) - set(tables))
    if unknown:
        raise ConfigurationError(
            reason=f"Capture {loaded.capture.name} has no table {', '.join(unknown)}; it has "
            f"{', '.join(tables)}"
        )
    zone = loaded.lake.zone(loaded.capture.name)
    return [
        compare_table(
            loaded.postgres.settings(),
            zone,
            loaded.capture.publication,
            table.schema,
            table.table,
            table.key,
        )
        for name, table in tables.items()
        if not names or name in names
    ]


def _row(result: Comparison) -> tuple[str, ...]:
    return (
        f"{result.schema}.{result.table}",
        str(result.source_rows),
        str(result.target_rows),
        str(result.missing),
        str(result.extra),
        str(result.differing),
        ", ".join(result.columns) or "-",
    )
