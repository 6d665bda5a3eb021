"""Comparisons at the end of a one-shot run: tables whose values USING may have changed.

The run captures and merges through the moment of the comparison. A table that differs from the
source then gets its snapshot in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.jobs.sync_report import SyncReport
from pgcdc_assets.orchestration.project.code_location import LoadedCapture
from pgcdc_assets.orchestration.state import find_uncertain_tables
from pgcdc_assets.raw.schema_events import SchemaEvent
from pgcdc_assets.raw.uncertain_values import not_comparable
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import (
    Comparison,
    compare_tables,
    record_comparison,
    source_moment,
    wait_captured,
)


def compare_uncertain_tables(
    loaded: LoadedCapture,
    bring_through: Callable[[Lsn | None], SyncReport],
    report: SyncReport,
    say: Callable[[str], None],
) -> SyncReport:
    """Compare the tables whose values are uncertain, and heal those that differ.

    A comparison that is not possible now is left to the next run: the events stay.

    Args:
        bring_through: brings the capture through an LSN, or through the present.
        report: the report of the run so far.
        say: prints a line.

    Returns:
        The report of the whole run.
    """
    uncertain = find_uncertain_tables(loaded.zone, loaded.capture)
    if not uncertain:
        return report
    zone = loaded.zone
    compared = [table for table in uncertain if table.mirrors_source]
    found = zone.schema_events.record(
        [not_comparable(event) for table, event in uncertain.items() if table not in compared]
    )
    try:
        if compared:
            part, events = _compare(loaded, bring_through, compared)
            report, found = report.followed_by(part), found + events
    except TransientError as error:
        names = ", ".join(table.qualified_name for table in compared)
        say(f"Not compared with the source: {names}. The next run compares them. {error}")
    if not any(event.needs_snapshot for event in found):
        return report
    return report.followed_by(bring_through(None))


def _compare(
    loaded: LoadedCapture,
    bring_through: Callable[[Lsn | None], SyncReport],
    tables: Sequence[CdcTable],
) -> tuple[SyncReport, list[SchemaEvent]]:
    """Return the report of the run through the moment, and what the comparison found.

    Raises:
        TransientError: an open transaction or a writer is in the way.
    """
    settings, zone, capture = loaded.postgres.settings(), loaded.zone, loaded.capture
    with source_moment(settings, zone, capture.slot) as moment:
        report = bring_through(moment.lsn)
        wait_captured(zone, moment, 0.0)
        outcomes = compare_tables(
            loaded.spark.session(),
            settings,
            zone,
            capture.publication,
            [table.of_kinds([1]) for table in tables],
            moment,
            named_rows=0,
        )
        events = {t.name: event for t, event in find_uncertain_tables(zone, capture).items()}
        found: list[SchemaEvent] = []
        for outcome in outcomes:
            if isinstance(outcome, Comparison):
                found += record_comparison(zone, events, outcome)
    return report, found
