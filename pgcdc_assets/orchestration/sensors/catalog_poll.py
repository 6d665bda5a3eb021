"""When the lag sensor looks in the catalog for schema changes that no row announces."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress
from pgcdc_assets.raw.schema_events import SchemaEvent
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection


@dataclass
class CatalogPoll:
    """The looks of one process.

    The time of the last look is in memory only: a new process looks at its first evaluation, and
    finds no event a second time.
    """

    capture: CdcCapture
    _due_at: float = 0.0

    def look(
        self, conn: Connection, zone: RawZone, progress: SyncProgress | None
    ) -> list[SchemaEvent]:
        """Look once in an interval, and at the start of a one-shot run; return the new events.

        Raises:
            PgcdcError: see `poll_catalog`. The next evaluation looks again.
        """
        is_start = progress is not None and not progress.is_polled
        now = time.monotonic()
        if now < self._due_at and not is_start:
            return []
        tables, publication = self.capture.table_names, self.capture.publication
        found = poll_catalog(conn, zone, tables, publication)
        self._due_at = now + self.capture.catalog_poll_seconds
        if progress is not None:
            progress.is_polled = True
        return found
