"""The check for tables that are ahead of the raw zone, before a window is landed.

Each SCD table is opened for it, so the lag sensor checks once in each process, and again if the raw
zone ends earlier than at the evaluation before, as after a restore beside a running code server.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pgcdc_assets.lsn import Position
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture
from pgcdc_assets.tables.tables_ahead import find_tables_ahead


@dataclass
class RestoredLakes:
    """The raw zones that were found to have all that is in their tables."""

    _ends: dict[str, Position] = field(default_factory=dict)

    def check(self, zone: RawZone, capture: CdcCapture, through: Position) -> None:
        """Check that no table is ahead of the raw zone, unless it was checked before.

        Args:
            through: the end of the captured windows.

        Raises:
            RawZoneError: the raw zone and the tables were restored from different times.
        """
        known = self._ends.get(zone.uri)
        if known is None or through < known:
            self._ends.pop(zone.uri, None)
            error, is_complete = find_tables_ahead(zone, capture)
            if error is not None:
                raise error
            if not is_complete:
                # Check again when the tables can be read.
                return
        self._ends[zone.uri] = through
