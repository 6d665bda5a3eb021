"""`pgcdc verify`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pgcdc_assets.cli.output import quiet_dagster, say, spark_log
from pgcdc_assets.cli.tables import print_table
from pgcdc_assets.errors import DifferenceFound, PgcdcError
from pgcdc_assets.verify import Comparison, compare_at, source_moment, wait_captured

if TYPE_CHECKING:
    import dagster as dg

    from pgcdc_assets.orchestration.loading import CodeLocation, LoadedCapture

_NULL = "NULL"


def run(options: argparse.Namespace) -> int:
    """Compare tables with the source, both at one LSN.

    Raises:
        DifferenceFound: one of them differs.
    """
    quiet_dagster(options.debug)
    from pgcdc_assets.orchestration.instance import open_instance
    from pgcdc_assets.orchestration.loading import load_location

    location = load_location(options.module)
    captures = location.select(options.name)
    results: list[Comparison] = []
    failures: list[PgcdcError] = []
    with open_instance() as instance:
        for loaded in captures:
            for outcome in _verify(instance, location, loaded, options):
                if isinstance(outcome, Comparison):
                    results.append(outcome)
                else:
                    failures.append(outcome)
    different = [result for result in results if not result.is_equal]
    _print(results, different)
    if failures:
        raise max(failures, key=lambda error: error.exit_status)
    if different:
        names = ", ".join(result.qualified_name for result in different)
        raise DifferenceFound(reason=f"Not equal to the source at the same LSN: {names}.")
    return 0


def _verify(
    instance: dg.DagsterInstance,
    location: CodeLocation,
    loaded: LoadedCapture,
    options: argparse.Namespace,
) -> Iterator[Comparison | PgcdcError]:
    """Compare one capture's tables; give the errors of tables that could not be compared."""
    from pgcdc_assets.orchestration.output import stderr_to
    from pgcdc_assets.orchestration.sync import SyncLimits, sync_capture
    from pgcdc_assets.orchestration.targets import select_tables, target_of

    capture = loaded.capture
    tables = [t for t in select_tables(capture, options.tables, scd=1) if t.mirrors_source]
    settings = loaded.postgres.settings()
    zone = loaded.lake.zone(capture.name)
    log = spark_log(options.debug)
    with source_moment(settings, zone, capture.slot) as moment:
        say(f"{capture.name}: comparing at {moment.lsn}")
        if options.wait_only:
            wait_captured(zone, moment, options.wait_seconds)
        else:
            limits = SyncLimits(wait_seconds=options.wait_seconds)
            sync_capture(instance, location, loaded, say=say, limits=limits, spark_log=log)
            wait_captured(zone, moment, 0.0)
        with stderr_to(log):
            spark = loaded.spark.session()
        for table in tables:
            began = time.monotonic()
            try:
                found = compare_at(
                    spark, settings, zone, capture.publication, target_of(table, [1]), moment
                )
            except PgcdcError as error:
                print(f"pgcdc: {table.qualified_name}: {error}", file=sys.stderr)
                yield error
                continue
            say(f"{table.qualified_name}: {time.monotonic() - began:.1f} s")
            yield found


def _print(results: Sequence[Comparison], different: Sequence[Comparison]) -> None:
    print_table(
        ("table", "at", "source rows", "target rows", "missing", "extra", "differing", "columns"),
        [_row(result) for result in results],
    )
    for result in different:
        if not result.differences:
            continue
        key = ", ".join(result.key_columns)
        total = result.missing + result.extra + result.differing
        print(f"\n{result.qualified_name}: {len(result.differences)} of {total} rows, by ({key})")
        print_table(
            ("", "key", "columns"),
            [
                (row.kind.value, _key(row.key), ", ".join(row.columns) or "-")
                for row in result.differences
            ],
        )


def _row(result: Comparison) -> tuple[str, ...]:
    mark = "" if result.is_counted else "at least "
    return (
        result.qualified_name,
        str(result.lsn),
        str(result.source_rows),
        str(result.target_rows),
        f"{mark}{result.missing}",
        f"{mark}{result.extra}",
        f"{mark}{result.differing}",
        ", ".join(result.columns) or "-",
    )


def _key(texts: Sequence[str | None]) -> str:
    """Write a key for a terminal: on one line, and NULL unlike the word."""
    return ", ".join(_NULL if text is None else repr(text) for text in texts)
