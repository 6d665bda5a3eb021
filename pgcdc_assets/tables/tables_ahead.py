"""Tables of a lake with changes that the raw zone does not have, as after a restore of folders.

The watermark of such a table is above the end of the raw zone. If the source was restored to the
time of the raw zone, its slot continues at that end with other changes. Merges would leave out
those below the watermark, so they must be found before a window is landed there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deltalake.exceptions import DeltaError

from pgcdc_assets.error_text import first_names
from pgcdc_assets.errors import PgcdcError, RawZoneError, rebuild_command
from pgcdc_assets.lsn import Position
from pgcdc_assets.raw.table_threads import map_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.messages import MessageTable
from pgcdc_assets.tables.state import read_watermark, table_path

_NAMED = 5


@dataclass(frozen=True)
class RawEnd:
    """The end of a raw zone.

    Attributes:
        captured: the end of the captured windows of the newest epoch.
        snapshots: the position of the newest snapshot of each table, partial ones included.
    """

    captured: Position
    snapshots: Mapping[TableName, Position]

    @classmethod
    def read(cls, zone: RawZone) -> RawEnd | None:
        """Read the end; None before the first epoch."""
        epoch = zone.epochs.latest()
        if epoch is None:
            return None
        snapshots: dict[TableName, Position] = {}
        for store in (zone.snapshots, zone.partial_snapshots):
            for each in store.complete_snapshots():
                newest = snapshots.get(each.name, each.position)
                snapshots[each.name] = max(each.position, newest)
        return cls(Position(epoch.epoch, zone.captured_on(epoch)[0]), snapshots)

    def of(self, table: TableName) -> Position:
        """Return the end of a table: a snapshot may be ahead of the captured windows."""
        return max(self.captured, self.snapshots.get(table, self.captured))


class TablesAhead(NamedTuple):
    """The result of a look for tables that are ahead of the raw zone.

    Attributes:
        error: names the tables; None without such a table.
        is_complete: every table could be read.
    """

    error: RawZoneError | None
    is_complete: bool


def find_tables_ahead(zone: RawZone, capture: CdcCapture) -> TablesAhead:
    """Look for tables that are ahead of the raw zone.

    A table that cannot be read does not stop the capture. Its merge raises the error.
    """
    places = [(table, scd) for table in capture.tables for scd in table.scd]
    unreadable: list[object] = []

    def read(place: tuple[CdcTable, int]) -> Position | None:
        table, scd = place
        try:
            return read_watermark(zone.lake, zone.name, table.schema, table.table, scd)
        except PgcdcError:
            unreadable.append(place)
            return None

    marks = list(map_tables(zone.lake, places, read))
    messages = MessageTable(zone) if capture.has_message_table else None
    message_mark = None
    try:
        message_mark = None if messages is None else messages.watermark()
    except (PgcdcError, DeltaError, OSError):
        unreadable.append(messages)
    # A capture may land a window at the same time, so the end is read last.
    end = RawEnd.read(zone)
    if end is None:
        return TablesAhead(None, is_complete=True)
    ahead = [
        (table, scd, mark)
        for (table, scd), mark in zip(places, marks, strict=True)
        if mark is not None and mark > end.of(table.name)
    ]
    found: list[str] = []
    remedies: list[str] = []
    if ahead:
        shown = [
            f"{table.qualified_name} (scd{scd}) through {mark.lsn} of epoch {mark.epoch}"
            for table, scd, mark in ahead
        ]
        found.append(first_names(shown, _NAMED))
        remedies += _remedies(zone, capture, end, ahead)
    if messages is not None and message_mark is not None and message_mark > end.captured:
        found.append(f"the logical messages through {message_mark.lsn}")
        # Retention may have removed the windows of older messages.
        remedies.append(
            f"move the folder {messages.table.uri} to another place, and the next run begins a new "
            "one with the messages of the raw zone"
        )
    if not found:
        return TablesAhead(None, is_complete=not unreadable)
    error = RawZoneError(
        raw_zone=zone.uri,
        reason=f"it ends at {end.captured.lsn} of epoch {end.captured.epoch}, but tables of the "
        f"lake are merged beyond its end: {', '.join(found)}. The raw zone and the tables "
        "were restored from different times, and merges would leave out the changes in between, "
        "so nothing is captured. Restore both from one time, or take the tables back to the end "
        f"of the raw zone: {'; '.join(remedies)}",
    )
    return TablesAhead(error, is_complete=not unreadable)


def _remedies(
    zone: RawZone, capture: CdcCapture, end: RawEnd, ahead: Sequence[tuple[CdcTable, int, Position]]
) -> Iterator[str]:
    """Yield what to do with the tables that are ahead.

    No rebuild takes a table back to an earlier epoch.
    """
    names = list(
        dict.fromkeys(
            table.qualified_name for table, _, mark in ahead if mark.epoch <= end.captured.epoch
        )
    )
    if names:
        # Without names, the command takes all tables of the capture back.
        names = names if len(names) < min(len(capture.tables), _NAMED + 1) else []
        yield rebuild_command(zone.name, *names, through=str(end.captured.lsn))
    paths = [
        table_path(zone.lake, zone.name, table.schema, table.table, scd)
        for table, scd, mark in ahead
        if mark.epoch > end.captured.epoch
    ]
    if paths:
        which = "the table" if len(paths) == 1 else "the tables"
        yield (
            f"move {first_names(paths, _NAMED)} to another place, and the next merge creates "
            f"{which} again"
        )
