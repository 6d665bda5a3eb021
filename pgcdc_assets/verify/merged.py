"""Opening the tables that merges made."""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.state import open_table


def open_merged(zone: RawZone, path: str, name: str, version: int | None = None) -> DeltaTable:
    """Open an SCD table as of a version; the newest where none is given.

    Raises:
        ConfigurationError: it was never merged.
        TableDamaged: its log cannot be read.
        TransientError: the version is gone.
    """
    table = open_table(zone.lake, path)
    if table is None:
        raise ConfigurationError(
            reason=f"Table {name} was never merged: there is no {path}. Run `pgcdc sync`."
        )
    if version is not None and version != table.version():
        try:
            table.load_as_version(version)
        except (DeltaError, OSError) as error:
            raise TransientError(
                reason=f"Version {version} of the Delta table {path} cannot be read "
                f"({type(error).__name__}). Run it again."
            ) from error
    return table
