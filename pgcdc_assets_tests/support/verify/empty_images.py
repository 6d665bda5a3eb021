"""SCD1 tables without rows, made without a merge."""

from __future__ import annotations

import pyarrow as pa
from deltalake import DeltaTable

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.properties import KEY, key_text
from pgcdc_assets.tables.state import table_path


def create_image(zone: RawZone, table: TableName, key: tuple[str, ...]) -> None:
    """Create the SCD1 table of a source table.

    Args:
        key: names of the key's columns; empty for a source table without a key.
    """
    DeltaTable.create(
        table_path(zone.lake, zone.name, *table, 1),
        pa.schema([("id", pa.int32())]),
        configuration={KEY: key_text(key)},
        storage_options=zone.lake.delta_options,
        raise_if_key_not_exists=False,
    )
