"""Opening the tables that merges made."""

from __future__ import annotations

from deltalake import DeltaTable

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge.watermark import open_table
from pgcdc_assets.raw.zone import RawZone


def open_merged(zone: RawZone, path: str, name: str) -> DeltaTable:
    """Open an SCD table.

    Raises:
        ConfigurationError: it was never merged.
        TableDamaged: its log cannot be read.
    """
    table = open_table(zone.lake, path)
    if table is None:
        raise ConfigurationError(
            reason=f"Table {name} was never merged: there is no {path}. Run `pgcdc sync`."
        )
    return table
