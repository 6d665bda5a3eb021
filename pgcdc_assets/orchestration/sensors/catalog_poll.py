"""The lag sensor's catalog poll, which finds schema changes without a row and new tables.

A capture that follows its publication (`tables: all`) stores its list of tables in the lake. The
poll reloads definitions that were loaded with another list.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.error_text import first_names
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.orchestration.project.reload import LocationReload
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress
from pgcdc_assets.orchestration.table_list import refresh_table_list
from pgcdc_assets.raw.table_list import ListedState
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.schema_gate import describe_event

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

# Maximum number of tables that a sentence names.
_NAMED = 5


@dataclass
class CatalogPoll:
    """The catalog polls of one process.

    The time of the newest poll is in memory only. A new process polls at its first evaluation, and
    does not record an event a second time.
    """

    capture: CdcCapture
    _due_at: float = 0.0
    _reload: LocationReload = field(default_factory=LocationReload)
    _notes: list[str] = field(default_factory=list)
    _refused: dict[TableName, str] = field(default_factory=dict)

    def report(
        self,
        context: dg.SensorEvaluationContext,
        conn: Connection,
        zone: RawZone,
        progress: SyncProgress | None,
    ) -> list[str]:
        """Poll once per interval, or once in a one-shot run, and log the events.

        In the daemon an error is logged, and the sensor continues to open windows.

        Returns:
            Sentences for the result of the evaluation.

        Raises:
            PgcdcError: in a one-shot run, see `poll_catalog`. The next evaluation polls again.
        """
        if not self._is_due(progress):
            return list(self._notes)
        now = time.monotonic()
        tables, publication = self.capture.table_names, self.capture.publication
        try:
            for event in poll_catalog(conn, zone, tables, publication):
                context.log.warning(f"{event.table}: {describe_event(event)}")
            self._due_at = now + self.capture.catalog_poll_seconds
            if progress is not None:
                progress.is_polled = True
            self._notes = self._compare_tables(context, conn, zone)
        except PgcdcError as error:
            if progress is not None:
                raise
            context.log.error(f"The catalog was not examined for schema changes. {error}")
        return list(self._notes)

    def _is_due(self, progress: SyncProgress | None) -> bool:
        is_start = progress is not None and not progress.is_polled
        return is_start or time.monotonic() >= self._due_at

    def _compare_tables(
        self, context: dg.SensorEvaluationContext, conn: Connection, zone: RawZone
    ) -> list[str]:
        """Store the list of tables, and reload definitions that have another list."""
        if self.capture.selection is None:
            return []
        listed = refresh_table_list(conn, zone, self.capture)
        refused = {table.name: table.reason for table in listed.of_state(ListedState.REFUSED)}
        for name in sorted(refused.items() - self._refused.items()):
            context.log.warning(f"Table {name[0]} has no assets. {name[1]}")
        self._refused = refused
        notes = [f"{t.name} left the publication" for t in listed.of_state(ListedState.LEFT)]
        loaded, declared = set(self.capture.table_names), set(listed.declared)
        if declared != loaded:
            outcome = self._reload.request(context, frozenset(declared))
            changes = [
                f"{what} {_some(names)}"
                for what, names in (("lack", declared - loaded), ("still have", loaded - declared))
                if names
            ]
            note = f"the loaded definitions {' and '.join(changes)}: {outcome}"
            context.log.info(note[0].upper() + note[1:])
            notes.append(note)
        return notes


def _some(names: set[TableName]) -> str:
    return first_names([str(name) for name in sorted(names)], _NAMED)
