"""The tables of a merge as their logs describe them, before a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pgcdc_assets.errors import (
    ConfigurationError,
    MergeConflict,
    RawZoneError,
    TableDamaged,
    rebuild_command,
)
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.relations.source_relations import SourceRelations
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.table_ends import TableEnd, find_table_end
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.merge_notes import followed_relation
from pgcdc_assets.tables.properties import KEY, parse_key
from pgcdc_assets.tables.state import ScdState, read_scd_state, table_path
from pgcdc_assets.tables.tables_ahead import RawEnd
from pgcdc_assets.tables.unlogged_files import holds_data_files, may_precede

SCD_TYPES = (1, 2)


@dataclass(frozen=True)
class OpenedTable:
    """An SCD table.

    Attributes:
        state: None if there is no table.
        started: of the monotonic clock.
    """

    target: CdcTable
    scd: int
    path: str
    state: ScdState | None
    started: float

    @property
    def watermark(self) -> Position | None:
        """The watermark of the table; None before the first merge."""
        return self.state.watermark if self.state is not None else None

    @property
    def relation_id(self) -> int | None:
        """The OID that the table was merged from; None if the table does not say."""
        followed = followed_relation(self.state) if self.state is not None else None
        return None if followed is None else followed.relation_id

    @property
    def is_keyless(self) -> bool:
        """Whether the table was merged without a key, so rows cannot be replaced by key."""
        return self.state is not None and self.state.is_keyless and not self.target.key

    def foldable_partials(
        self, partial: Sequence[Snapshot], keyed: Sequence[Snapshot]
    ) -> Sequence[Snapshot]:
        """Return the partial snapshots that can be folded: their rows are found by key.

        Args:
            partial: the partial snapshots of the raw zone.
            keyed: the next snapshots whose rows have a key. The first one gives a table without a
                key the key of its rows.
        """
        if not self.is_keyless:
            return partial
        if not keyed or self.target.keeps_history(self.scd):
            return ()
        first = min(snapshot.position for snapshot in keyed)
        return [each for each in partial if each.position > first]

    def find_end(
        self, zone: RawZone, snapshot: Snapshot, relation_id: int, relations: SourceRelations
    ) -> TableEnd | None:
        """Find where the rows of the table end, if a snapshot is one of another relation.

        An OID means nothing in another epoch.
        """
        known, mark = self.relation_id, self.watermark
        if known in (None, relation_id) or mark is None or mark.epoch != snapshot.epoch:
            return None
        assert known is not None
        return find_table_end(zone, known, snapshot, relations)


def open_scd_table(zone: RawZone, target: CdcTable, scd: int, root: str | None) -> OpenedTable:
    """Read the state of an SCD table.

    Args:
        root: the address of a folder in place of the capture's folder.

    Raises:
        ConfigurationError: the kind of table does not exist, or two tables have one folder.
        TableDamaged: files of the log are missing or truncated.
    """
    started = time.monotonic()
    if scd not in SCD_TYPES:
        raise ConfigurationError(
            reason=f"Table {target.qualified_name}: there is no SCD type {scd} here, only "
            f"{', '.join(map(str, SCD_TYPES))}."
        )
    path = table_path(zone.lake, zone.name, target.schema, target.table, scd, root)
    zone.lake.check_folder(target.qualified_name, path)
    return OpenedTable(target, scd, path, read_scd_state(zone.lake, zone.name, path), started)


def check_not_ahead(
    zone: RawZone,
    table: OpenedTable,
    through: LsnWindow,
    read_end: Callable[[], RawEnd | None],
) -> None:
    """Check that the raw zone is not older than the table, as after a restore of the raw zone.

    The changes between the end of the raw zone and the watermark would be skipped. If the source
    was restored too, these are not the changes that the table has.

    Args:
        through: the newest window of the merge.
        read_end: reads the end of the raw zone; not called unless the watermark is above `through`.

    Raises:
        RawZoneError: the watermark is above the end of the raw zone.
    """
    mark = table.watermark
    if mark is None or mark <= through.end_position:
        return
    raw_end = read_end()
    assert raw_end is not None
    end = raw_end.of(table.target.name)
    if mark <= end:
        return
    name, captured = table.target.qualified_name, raw_end.captured
    if mark.epoch > captured.epoch:
        remedy = f"move {table.path} to another folder; the next merge creates the table again"
    else:
        command = rebuild_command(zone.name, name, through=str(captured.lsn))
        remedy = f"rebuild the table with: {command}"
    raise RawZoneError(
        raw_zone=zone.uri,
        reason=f"table {name} (scd{table.scd}) was merged through {mark.lsn} of epoch "
        f"{mark.epoch}, but the raw zone ends at {end.lsn} of epoch {end.epoch}, as after a "
        "restore of an older copy. Merges would skip the changes below the watermark that were "
        f"captured since then. Restore both from one time, or {remedy}",
    )


def check_log_is_there(
    lake: Lake, table: OpenedTable, snapshots: Sequence[Snapshot], kept: Sequence[Snapshot]
) -> bool:
    """Check that a table which is to be made was not there before with more than raw still holds.

    Args:
        snapshots: all that are complete.
        kept: those after which retention has kept all changes.

    Returns:
        Whether the folder holds data files: the table is made from raw as it was.

    Raises:
        MergeConflict: the log of a table is gone, and retention removed what it began with; or
            another program has made the table.
        TableDamaged: a table has contents that cannot be made again from a snapshot, and its log
            has no merge.
        TableDamaged, TransientError: the data files cannot be read.
    """
    if table.state is not None:
        _check_has_merge(table, table.state)
        return False
    if not holds_data_files(lake, table.path):
        return False
    first, begin = [
        next((snapshot for snapshot in of if snapshot.name == table.target.name), None)
        for of in (snapshots, kept)
    ]
    if not table.target.keeps_history(table.scd) or first == begin:
        return True
    # A process that was killed before the first commit leaves rows that the raw zone still has.
    if begin is None or may_precede(lake, table.path, table.scd, begin.position):
        raise MergeConflict(
            table=table.target.qualified_name,
            reason=f"the folder {table.path} holds data files and no Delta log, and retention "
            "removed changes since the table's first snapshot from the raw zone, so the table "
            "cannot be made as it was. Restore its folder _delta_log, or move the folder away to "
            "begin again with a later snapshot.",
        )
    return True


def _check_has_merge(table: OpenedTable, state: ScdState) -> None:
    """Check that a merge has written the rows of a table.

    The first merge would replace the rows of another program. It would merge the rows of a table
    that keeps the past once more.
    """
    if state.watermark is not None or state.is_empty:
        return
    if KEY not in state.properties:
        raise MergeConflict(
            table=table.target.qualified_name,
            reason=f"the Delta table {state.path} was not made by this package, and the merge "
            "would replace its rows. Move it to another folder",
        )
    if table.target.keeps_history(table.scd):
        raise TableDamaged(
            path=state.path,
            reason="its log does not say which changes its rows contain. A CLONE has rows and "
            "properties of a table, but not its application transactions",
        )


def lowest_start(
    watermarks: Iterable[tuple[TableName, Position | None]],
    snapshots: Iterable[Snapshot],
    epoch: int,
) -> Lsn | None:
    """Return the lowest LSN from which the changes of an epoch are merged into a table.

    A table that is not in the epoch yet begins with one of its snapshots there.

    Args:
        watermarks: source table and watermark of each table; None before the first merge.
        snapshots: the complete snapshots of the raw zone.

    Returns:
        None if no table needs the epoch.
    """
    first: dict[TableName, Lsn] = {}
    for snapshot in snapshots:
        if snapshot.epoch == epoch:
            lsn = snapshot.snapshot_lsn
            first[snapshot.name] = min(lsn, first.get(snapshot.name, lsn))
    starts = []
    for name, watermark in watermarks:
        if watermark is not None and watermark.epoch == epoch:
            starts.append(watermark.lsn)
        elif name in first and (watermark is None or watermark.epoch < epoch):
            starts.append(first[name])
    return min(starts, default=None)


def stored_key(state: ScdState | None) -> tuple[str, ...]:
    """Return the key of a table's rows; empty without a key or a table."""
    return () if state is None else parse_key(state.properties.get(KEY, ""))
