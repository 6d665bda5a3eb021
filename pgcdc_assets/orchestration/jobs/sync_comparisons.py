"""Comparisons at the end of a one-shot run: tables whose values USING may have changed.

The run captures and merges through the moment of the comparison. A table that differs from the
source then gets its snapshot in the same run.
"""

from __future__ import annotations

from collections.abc import Callable

from pgcdc_assets.errors import FailedRun, PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.jobs.sync_report import SyncReport
from pgcdc_assets.orchestration.project.code_location import LoadedCapture
from pgcdc_assets.orchestration.runs.errors import join_errors
from pgcdc_assets.orchestration.state import find_uncertain_tables
from pgcdc_assets.raw.relations.uncertain_values import not_comparable
from pgcdc_assets.verify import (
    Comparison,
    ComparisonFailure,
    compare_tables,
    is_comparable,
    record_comparison,
    source_moment,
    wait_captured,
)


def compare_uncertain_tables(
    loaded: LoadedCapture,
    bring_through: Callable[[Lsn | None], SyncReport],
    report: SyncReport,
) -> SyncReport:
    """Compare the tables whose values are uncertain, and heal those that differ.

    Args:
        bring_through: brings the capture through an LSN, or through the present.
        report: the report of the run so far.

    Returns:
        The report of the whole run.

    Raises:
        PgcdcError: a table could not be compared. The other tables are compared and healed.
    """
    uncertain = find_uncertain_tables(loaded.zone, loaded.capture)
    if not uncertain:
        return report
    zone, capture = loaded.zone, loaded.capture
    compared = [table for table in uncertain if is_comparable(zone, table)]
    found = zone.schema_events.record(
        [not_comparable(event) for table, event in uncertain.items() if table not in compared]
    )
    failures: list[PgcdcError] = []
    if compared:
        settings = loaded.postgres.settings()
        with source_moment(settings, zone, capture.slot) as moment:
            report = report.followed_by(bring_through(moment.lsn))
            wait_captured(zone, moment, 0.0)
            outcomes = compare_tables(
                loaded.spark.session(zone.lake),
                settings,
                zone,
                capture.publication,
                [table.of_kinds([1]) for table in compared],
                moment,
                named_rows=0,
            )
            events = {table.name: event for table, event in uncertain.items()}
            for outcome in outcomes:
                if isinstance(outcome, Comparison):
                    found += record_comparison(zone, events, outcome)
                else:
                    failures.append(_name(outcome, capture.name))
    if any(event.needs_snapshot for event in found):
        try:
            report = report.followed_by(bring_through(None))
        except PgcdcError as error:
            failures.append(error)
    if failures:
        raise join_errors(failures)
    return report


def _name(failure: ComparisonFailure, capture: str) -> PgcdcError:
    error = failure.error.in_capture(capture)
    return FailedRun.like(error, f"Not compared: {failure.qualified_name}. {error}")
