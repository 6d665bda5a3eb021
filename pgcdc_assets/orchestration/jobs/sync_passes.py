"""The passes of a one-shot run: a further pass if the source altered a table that failed.

A pass takes the snapshots for the schema changes that it finds at its start. A table may be altered
later: its snapshot or merge may then meet a table without its name, or without its key. If the
catalog shows a later change of a failed table, the next pass begins with that change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.errors import FailedRun, PgcdcError
from pgcdc_assets.orchestration.jobs.sync_report import SyncReport
from pgcdc_assets.orchestration.project.code_location import LoadedCapture
from pgcdc_assets.orchestration.runs.partial_request import PartialRequest
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import FOLLOW
from pgcdc_assets.table_name import TableName

# Tables to re-snapshot, and a partial snapshot.
Request = tuple[Sequence[CdcTable], PartialRequest | None]

# Schema changes may never stop. The run ends nevertheless.
PASSES = 3


@dataclass(frozen=True)
class FailedParts:
    """The failed parts of a pass.

    Attributes:
        errors: the errors.
        snapshots: partition keys of the tables whose snapshot failed.
        merges: the tables that were not merged.
    """

    errors: Sequence[PgcdcError]
    snapshots: Collection[str]
    merges: Collection[CdcTable]

    def tables(self, capture: CdcCapture) -> dict[TableName, CdcTable]:
        """Return the tables that failed or have moved."""
        moved = {error.facts.get("relation") for error in self.errors}
        return {
            table.name: table
            for table in capture.tables
            if table.partition_key in self.snapshots
            or table.qualified_name in moved
            or table in self.merges
        }


class Pass(Protocol):
    """One capture and merge through a barrier."""

    progress: SyncProgress
    report: SyncReport

    def run(
        self, resnapshot: Sequence[CdcTable] = (), partial: PartialRequest | None = None
    ) -> SyncReport:
        """Run the pass."""

    @property
    def failed(self) -> FailedParts:
        """The failed parts."""


def run_passes(
    loaded: LoadedCapture,
    begin: Callable[[], Pass],
    request: Request | None,
    say: Callable[[str], None],
) -> SyncReport:
    """Run passes until one succeeds, or fails without a later change of the failed tables.

    Args:
        begin: returns a new pass.
        request: the snapshots that the first pass takes first. A further pass takes those that
            failed again.

    Raises:
        PgcdcError: the error of the last pass. If the source altered the failed tables during each
            pass, the error says so, and that the next run continues.
    """
    done: SyncReport | None = None
    for number in range(1, PASSES + 1):
        each = begin()
        try:
            report = each.run(*(request or ()))
        except PgcdcError as error:
            altered = _find_altered(loaded, each)
            if not altered:
                raise
            names = ", ".join(sorted(table.qualified_name for table in altered))
            if number == PASSES:
                sentence = (
                    f"{str(error).rstrip('.')}. Altered at the source during the run: {names}. "
                    "The next run continues with the later definition."
                )
                raise FailedRun.like(error, sentence) from error
            say(f"Altered at the source during the run: {names}. Continuing with another pass.")
            request = None if request is None else _find_failed(request, each.failed)
            report = each.report
            done = report if done is None else done.followed_by(report)
            continue
        return report if done is None else done.followed_by(report)
    raise AssertionError("the last pass returns or raises")


def _find_failed(request: Request, failed: FailedParts) -> Request:
    """Return the snapshots of a request that were not taken."""
    tables, partial = request
    is_taken = partial is None or partial.report is not None
    left = [table for table in tables if table.partition_key in failed.snapshots]
    return left, None if is_taken else partial


def _find_altered(loaded: LoadedCapture, each: Pass) -> Collection[CdcTable]:
    """Return the failed tables with a schema event after those that the pass heals."""
    zone, capture, since = loaded.zone, loaded.capture, each.progress.events_through
    failed = each.failed.tables(capture)
    following = {name: t for name, t in failed.items() if t.schema_policy == FOLLOW}
    if since is None or not following:
        return ()
    try:
        with query_connection(loaded.postgres.settings(), "sync") as conn:
            poll_catalog(conn, zone, capture.table_names, capture.publication)
        events = zone.schema_events.read()
    except PgcdcError:
        # The error of the pass is the one to report.
        return ()
    later = {event.table for event in events if event.position > since}
    return [table for name, table in following.items() if name in later]
