"""What is declared about a table, as the merge wants it: one place for merges, checks, rebuilds."""

from __future__ import annotations

from collections.abc import Iterable

from pgcdc_assets.merge.report import TableTarget
from pgcdc_assets.orchestration.settings import CdcTable


def target_of(table: CdcTable, scds: Iterable[int] | None = None) -> TableTarget:
    """Describe what to make of a table.

    Args:
        scds: some of its kinds of SCD table; None: all that are declared.
    """
    kinds = tuple(sorted(table.scd if scds is None else scds))
    return TableTarget(table.schema, table.table, kinds, table.key, table.tracked)
