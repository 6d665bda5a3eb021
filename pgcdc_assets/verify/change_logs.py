"""SCD1 tables that are logs of changes, whose rows are not those of the source.

With `without_key: log`, the SCD1 table of a source table without a key is a log of changes, and the
SCD1 table of a source table with a key is a current image. The settings do not know the keys of the
source. The log of the Delta table has the key.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgcdc_assets.errors import TableDamaged
from pgcdc_assets.raw.table_threads import map_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import read_scd_state, table_path


def is_change_log(zone: RawZone, table: CdcTable) -> bool:
    """Return whether the SCD1 table of a table is a log of changes.

    A table that was never merged is no log yet. A comparison of a damaged table raises the error.

    Raises:
        ConfigurationError, TransientError: the lake cannot be read.
    """
    if 1 not in table.scd or not table.may_be_log:
        return False
    path = table_path(zone.lake, zone.name, table.schema, table.table, 1)
    try:
        state = read_scd_state(zone.lake, zone.name, path)
    except TableDamaged:
        return False
    return state is not None and state.is_keyless


def find_change_logs(zone: RawZone, tables: Sequence[CdcTable]) -> list[CdcTable]:
    """Return the tables whose SCD1 tables are logs of changes.

    Raises:
        ConfigurationError, TransientError: the lake cannot be read.
    """
    possible = [table for table in tables if table.may_be_log]
    found = map_tables(zone.lake, possible, lambda table: is_change_log(zone, table))
    return [table for table, is_log in zip(possible, found, strict=True) if is_log]


def is_comparable(zone: RawZone, table: CdcTable) -> bool:
    """Return whether a table has an SCD1 table with the rows of the source.

    Raises:
        ConfigurationError, TransientError: the lake cannot be read.
    """
    return 1 in table.scd and not is_change_log(zone, table)
