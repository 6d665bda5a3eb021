"""What is declared about a table, as the merge wants it: one place for merges, checks, rebuilds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge.report import TableTarget
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import TableName


def target_of(table: CdcTable, scds: Iterable[int] | None = None) -> TableTarget:
    """Describe what to make of a table.

    Args:
        scds: some of its kinds of SCD table; None: all that are declared.
    """
    kinds = tuple(sorted(table.scd if scds is None else scds))
    return TableTarget(
        table.schema,
        table.table,
        kinds,
        table.key,
        table.tracked,
        table.soft_deletes,
        table.without_key,
    )


def select_tables(capture: CdcCapture, names: Sequence[str]) -> list[CdcTable]:
    """Find declared tables by name; none named means all.

    Raises:
        ConfigurationError: a name is not declared.
    """
    tables = {table.name: table for table in capture.tables}
    wanted = {TableName.parse(name) for name in names}
    unknown = sorted(wanted - set(tables))
    if unknown:
        raise ConfigurationError(
            reason=f"Capture {capture.name} has no table {', '.join(map(str, unknown))}; it has "
            f"{', '.join(map(str, tables))}"
        )
    return [table for name, table in tables.items() if not wanted or name in wanted]
