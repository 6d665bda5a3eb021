"""Ticks of the merge sensor that read no SCD table, because nothing has changed in the raw zone.

To see whether an SCD table has a new commit costs two requests to an object store, or three calls
of `stat`. With 500 tables and a tick every two seconds these are 500 requests a second, for a
publication without changes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pgcdc_assets.raw.zone import RawZone

# A table that a person restores or deletes is noticed after this time.
SECONDS = 60.0

Versions = tuple[int | None, ...]


@dataclass
class QuietTicks:
    """The raw zones whose tables were all merged at the last tick."""

    _merged: dict[tuple[str, str], tuple[Versions, float]] = field(default_factory=dict)

    def is_quiet(self, zone: RawZone) -> bool:
        """Return whether all tables were merged a moment ago, and nothing was landed since."""
        known = self._merged.get((zone.lake.uri, zone.name))
        if known is None or time.monotonic() > known[1] + SECONDS:
            return False
        return read_versions(zone) == known[0]

    def remember(self, zone: RawZone, versions: Versions) -> None:
        """Remember that all tables are merged.

        Args:
            versions: read before the states of the tables.
        """
        self._merged[zone.lake.uri, zone.name] = versions, time.monotonic()

    def forget(self, zone: RawZone) -> None:
        """Read the tables at the next tick."""
        self._merged.pop((zone.lake.uri, zone.name), None)


def read_versions(zone: RawZone) -> Versions:
    """Return the versions of the raw tables that determine whether a table waits for a merge."""
    tables = (
        zone.epochs.table,
        zone.changes.table,
        zone.snapshots.table,
        zone.partial_snapshots.table,
        zone.schema_events.table,
        zone.table_list.table,
    )
    found = [table.newest() for table in tables]
    return tuple(None if table is None else table.version() for table in found)
