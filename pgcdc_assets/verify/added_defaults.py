"""The rule about columns that were added with a default: older rows must have the default.

Postgres gives the default to every row that is older than the column (decision 19). If the change
of a row is older than the column, the source has not written the row since, so NULL in the column
is a missing default. For a column `n` of SCD1, first seen at LSN 4096 of epoch 1, such rows are

    `n` IS NULL AND try_element_at(_rescued, 'n') IS NULL AND _lsn >= <start of epoch 1>
    AND _lsn < 4096
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.relations.added_columns import find_added_default
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import identifier, string
from pgcdc_assets.tables.columns import OP, VALID_FROM_EPOCH, is_log
from pgcdc_assets.verify.table_version import TableVersion

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class AddedColumn:
    """A column that was added with a default.

    Attributes:
        since: the position of the first relation version with the column.
    """

    name: str
    since: Lsn


def find_added_columns(
    zone: RawZone, table: CdcTable, scd: int, pinned: TableVersion, touched_from: Lsn | None
) -> list[AddedColumn]:
    """Find the columns whose default the older rows of a table must have.

    Args:
        touched_from: omit columns that were first seen before this LSN; None: omit no column.
    """
    if pinned.watermark is None or pinned.relation_version <= 1:
        return []
    epoch, watermark = pinned.watermark
    known = [
        v for v in zone.relations.versions(epoch) if v.relation.relation_id == pinned.relation_id
    ]
    newest = [v for v in known if v.version == pinned.relation_version]
    if not newest:
        return []
    snapshot_lsns: set[Lsn] = set()
    if table.keeps_history(scd):
        # If a snapshot is the first to show a column, earlier changes may have the column
        # already. Then the rows that need the default are unknown.
        snapshot_lsns = {
            snapshot.snapshot_lsn
            for snapshot in zone.snapshots.complete_snapshots(epoch)
            if snapshot.name == table.name
        }
    relation = newest[0].relation
    found = []
    for column in relation.columns:
        default = find_added_default(column, relation, known)
        if default is None or default.since is None or column.name not in pinned.columns:
            continue
        is_merged = default.since < watermark and default.since not in snapshot_lsns
        if is_merged and (touched_from is None or default.since >= touched_from):
            found.append(AddedColumn(column.name, default.since))
    return found


def count_missing(
    rows: DataFrame,
    columns: Sequence[AddedColumn],
    epoch: Epoch,
    table: CdcTable,
    scd: int,
    pinned: TableVersion,
) -> int:
    """Count the rows that lack the default of a column.

    Args:
        rows: the table's rows.
        epoch: the table's newest epoch.
        scd: 1 or 2.
        pinned: the version with these rows.
    """
    is_older = partial(
        _is_older_in_history if scd == 2 else _is_older_in_image,
        epoch=epoch,
        table=table,
        pinned=pinned,
    )
    missing = " OR ".join(
        f"({identifier(column.name)} IS NULL "
        f"AND try_element_at(_rescued, {string(column.name)}) IS NULL "
        f"AND {is_older(column)})"
        for column in columns
    )
    return rows.where(missing).count()


def _is_older_in_history(
    column: AddedColumn, epoch: Epoch, table: CdcTable, pinned: TableVersion
) -> str:
    """Write the SQL condition that a version of a history is older than the column."""
    since, start = int(column.since), int(epoch.start_lsn)
    made = f"_valid_from_lsn >= {start} AND _valid_from_lsn < {since}"
    if VALID_FROM_EPOCH in pinned.columns:
        made += f" AND _valid_from_epoch = {epoch.epoch}"
    if table.tracked is not None and column.name not in table.tracked:
        # A change of the column alone opens no version, but updates the current version.
        made += f" AND _valid_to_lsn <= {since}"
    return made


def _is_older_in_image(
    column: AddedColumn, epoch: Epoch, table: CdcTable, pinned: TableVersion
) -> str:
    """Write the SQL condition that a row of SCD1 is older than the column.

    A source may have a column `_op` too, unless the table is a log of changes. A table that is not
    rebuilt after a change of the settings is no log yet.
    """
    made = f"_lsn >= {int(epoch.start_lsn)} AND _lsn < {int(column.since)}"
    has_operations = OP in pinned.columns and is_log(table, has_key=bool(pinned.key))
    return f"{made} AND _op <> 'T'" if has_operations else made
