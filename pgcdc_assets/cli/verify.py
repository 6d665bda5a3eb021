"""`pgcdc verify`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pgcdc_assets.activity import activity
from pgcdc_assets.cli.output import complain, say
from pgcdc_assets.cli.progress import progress
from pgcdc_assets.cli.tables import print_table
from pgcdc_assets.errors import (
    ConfigurationError,
    DifferenceFound,
    PgcdcError,
    rebuild_command,
    resnapshot_command,
)
from pgcdc_assets.verify import (
    Comparison,
    ComparisonFailure,
    compare_tables,
    find_change_logs,
    read_uncertain_values,
    record_comparison,
    source_moment,
    wait_captured,
)

if TYPE_CHECKING:
    import dagster as dg

    from pgcdc_assets.orchestration.project.code_location import CodeLocation, LoadedCapture
    from pgcdc_assets.settings import CdcTable

_NULL = "NULL"
_LOG = "without_key: log keeps its changes, which differ from the source's rows"


def run(options: argparse.Namespace) -> int:
    """Compare tables with the source at one LSN.

    Raises:
        ConfigurationError: a named table does not exist, or cannot be compared.
        DifferenceFound: a table differs from its source.
    """
    from pgcdc_assets.orchestration.project.code_location import load_location
    from pgcdc_assets.orchestration.project.home import open_instance
    from pgcdc_assets.orchestration.table_list import refresh_at_load

    with refresh_at_load():
        location = load_location(options.module)
    captures = location.select(options.name)
    if options.tables and len(captures) > 1:
        names = ", ".join(loaded.capture.name for loaded in captures)
        raise ConfigurationError(
            reason=f"Tables are named, but the module declares several captures ({names}): name "
            "the capture of the tables with --name."
        )
    left_out: list[dict[CdcTable, str]] = []
    results: list[Comparison] = []
    unequal: dict[str, list[Comparison]] = {}
    failures: list[PgcdcError] = []
    with open_instance() as instance:
        for loaded in captures:
            try:
                why_not = _find_reasons(loaded)
                left_out.append(why_not)
                tables = _choose(loaded, options.tables, why_not)
                for outcome in _verify(instance, location, loaded, tables, why_not, options):
                    if isinstance(outcome, PgcdcError):
                        failures.append(outcome)
                        continue
                    results.append(outcome)
                    if not outcome.is_equal:
                        unequal.setdefault(loaded.capture.name, []).append(outcome)
            except PgcdcError as error:
                # Compare the other captures, and print what is compared already.
                named = error.in_capture(loaded.capture.name)
                if len(captures) > 1:
                    complain(f"{loaded.capture.name}: {named}")
                failures.append(named)
    different = [result for found in unequal.values() for result in found]
    _print(results, different)
    if not options.tables:
        _print_left_out(left_out)
    if failures:
        raise max(failures, key=lambda error: error.exit_status)
    if unequal:
        named_tables = ", ".join(result.qualified_name for result in different)
        rebuilds, snapshots = (
            "; ".join(
                command(capture, *(result.qualified_name for result in found))
                for capture, found in unequal.items()
            )
            for command in (rebuild_command, resnapshot_command)
        )
        raise DifferenceFound(
            reason=f"Not equal to the source at the same LSN: {named_tables}. Rebuild from the raw "
            f"zone with: {rebuilds}. If they still differ, take new snapshots with: {snapshots}"
        )
    return 0


def _choose(
    loaded: LoadedCapture, names: Sequence[str], why_not: Mapping[CdcTable, str]
) -> list[CdcTable]:
    """Return the named tables, or all tables that can be compared.

    Raises:
        ConfigurationError: a named table is not declared, or cannot be compared.
    """
    tables = loaded.capture.select_tables(names)
    left_out = [table for table in tables if table in why_not]
    if names and left_out:
        raise _not_comparable(left_out, why_not)
    return [table for table in tables if table not in why_not]


def _not_comparable(
    tables: Sequence[CdcTable], why_not: Mapping[CdcTable, str]
) -> ConfigurationError:
    reasons = "; ".join(f"{table.qualified_name}: {why_not[table]}" for table in tables)
    return ConfigurationError(reason=f"Cannot be compared with the source: {reasons}.")


def _find_reasons(loaded: LoadedCapture) -> dict[CdcTable, str]:
    """Return the tables that cannot be compared, each with the reason."""
    from pgcdc_assets.orchestration.state import left_tables

    left = left_tables(loaded.zone, loaded.capture)
    logs = find_change_logs(loaded.zone, loaded.capture.tables)
    reasons = {}
    for table in loaded.capture.tables:
        if table.name in left:
            reasons[table] = left[table.name].rstrip(".")
        elif 1 not in table.scd:
            reasons[table] = (
                "only its history is kept (scd: [2]), which differs from the source's rows"
            )
        elif table in logs:
            reasons[table] = _LOG
    return reasons


def _verify(
    instance: dg.DagsterInstance,
    location: CodeLocation,
    loaded: LoadedCapture,
    tables: Sequence[CdcTable],
    why_not: dict[CdcTable, str],
    options: argparse.Namespace,
) -> Iterator[Comparison | PgcdcError]:
    """Compare one capture's tables; yield the errors of tables that could not be compared.

    Args:
        why_not: gets the tables whose first merge shows that they cannot be compared.
    """
    from pgcdc_assets.orchestration.jobs.sync import sync_capture
    from pgcdc_assets.orchestration.jobs.sync_report import SyncLimits

    capture = loaded.capture
    settings = loaded.postgres.settings()
    zone = loaded.lake.zone(capture.name)
    with source_moment(settings, zone, capture.slot) as moment:
        say(f"{capture.name}: comparing at {moment.lsn}")
        if options.wait_only:
            say(f"{capture.name}: waiting until the sensors have captured the changes before it")
            wait_captured(zone, moment, options.wait_seconds)
        else:
            limits = SyncLimits(wait_seconds=options.wait_seconds)
            try:
                # Tables that are merged exactly through the moment need no further fold.
                with progress() as display:
                    sync_capture(
                        instance,
                        location,
                        loaded,
                        say=display.say,
                        limits=limits,
                        barrier=moment.lsn,
                    )
            except PgcdcError as error:
                # Compare the other tables, and count captured changes that are not merged.
                through = zone.changes.captured_through(moment.epoch)
                if through is None or through < moment.lsn:
                    raise
                complain(f"{capture.name}: {error}")
                yield error
            wait_captured(zone, moment, 0.0)
        spark = loaded.spark.session(zone.lake)
        logs = find_change_logs(zone, tables)
        why_not |= dict.fromkeys(logs, _LOG)
        if logs and options.tables:
            yield _not_comparable(logs, why_not)
        targets = [table.of_kinds([1]) for table in tables if table not in why_not]
        uncertain = read_uncertain_values(zone, capture.keepers)
        found = compare_tables(spark, settings, zone, capture.publication, targets, moment)
        with progress() as display, activity(f"comparison of {capture.name}", "tables") as work:
            for outcome in found:
                work.count += 1
                if isinstance(outcome, ComparisonFailure):
                    named = outcome.error.in_capture(capture.name, outcome.qualified_name)
                    complain(f"{outcome.qualified_name}: {named}")
                    yield named
                    continue
                record_comparison(zone, uncertain, outcome)
                display.say(f"{outcome.qualified_name}: compared, {outcome.source_rows:,} rows")
                yield outcome


def _print_left_out(left_out: Sequence[Mapping[CdcTable, str]]) -> None:
    for reasons in left_out:
        for table, reason in reasons.items():
            print(f"Not compared: {table.qualified_name}: {reason}.")


def _print(results: Sequence[Comparison], different: Sequence[Comparison]) -> None:
    if not results:
        return
    print_table(
        ("table", "at", "source rows", "target rows", "missing", "extra", "differing", "columns"),
        [_row(result) for result in results],
    )
    for result in results:
        if result.kept:
            mark = "" if result.is_counted else "at least "
            print(f"{result.qualified_name}: {mark}{result.kept:,} rows of detached partitions.")
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
    """Format a key on one line, with a mark for NULL."""
    return ", ".join(_NULL if text is None else repr(text) for text in texts)
