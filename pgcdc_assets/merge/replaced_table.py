"""Description of the table that a rebuild replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pgcdc_assets.errors import TableDamaged
from pgcdc_assets.lsn import Position
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.owned_columns import (
    NOTHING_OWNED,
    OwnedColumns,
    find_owned,
    versions_of_table,
)
from pgcdc_assets.tables.properties import MAPPING
from pgcdc_assets.tables.state import open_table, read_position

# Table features that an owner may turn on, and that delta-rs does not write.
_FOR_SPARK = frozenset({"clustering", "domainMetadata", "rowTracking"})


@dataclass(frozen=True)
class ReplacedTable:
    """The table that a rebuild replaces.

    Attributes:
        owned: the owner's columns and comments.
        is_for_spark: the table has features that delta-rs cannot write.
        is_readable: the log can be read. Otherwise nothing else is known.
    """

    path: str
    watermark: Position | None
    properties: Mapping[str, str]
    columns: tuple[str, ...]
    owned: OwnedColumns
    is_for_spark: bool = False
    is_readable: bool = True


def describe_replaced(zone: RawZone, target: CdcTable, path: str) -> ReplacedTable | None:
    """Describe the table that a rebuild replaces; return None if there is no table."""
    try:
        table = open_table(zone.lake, path)
    except TableDamaged:
        return ReplacedTable(path, None, {}, (), NOTHING_OWNED, is_readable=False)
    if table is None:
        return None
    try:
        watermark = read_position(zone, table, path)
    except TableDamaged:
        watermark = None
    columns = tuple(field.name for field in table.schema().fields)
    properties = table.metadata().configuration
    owned = NOTHING_OWNED
    # With column mapping, the log has a number for each column, which the staged table lacks.
    if MAPPING not in properties:
        versions = versions_of_table(zone, target.schema, target.table)
        owned = find_owned(table.schema().to_json(), properties, versions)
    features = table.protocol().writer_features or ()
    is_for_spark = not _FOR_SPARK.isdisjoint(features)
    return ReplacedTable(path, watermark, properties, columns, owned, is_for_spark)
