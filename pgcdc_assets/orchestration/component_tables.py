"""The tables of a capture that is declared in YAML."""

from __future__ import annotations

import dagster as dg
from dagster.components.resolved.base import Resolvable
from pydantic import Field

from pgcdc_assets.orchestration.component_texts import OptionalTexts, Text, Texts
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.selection import TableSelection


class TableModel(dg.Model, Resolvable):
    """One table: its name and its settings."""

    name: Text = Field(
        description="The table: `schema.table`, or `table` for schema `public`. Names with other "
        "characters need double quotes, as in SQL."
    )
    key: OptionalTexts = Field(
        default=None,
        description="Columns that identify a row at each commit. "
        "Unset: the columns of the replica identity.",
    )
    scd: list[int] = Field(
        default=list(CdcTable.scd),
        description="`[1]`: the current image; `[2]`: the history; `[1, 2]`: both.",
    )
    tracked: OptionalTexts = Field(
        default=None,
        description="Columns whose change opens a version in the history. Unset: all columns.",
    )
    soft_deletes: bool = Field(
        default=CdcTable.soft_deletes,
        description="Keep deleted rows in the current image, and mark them as deleted.",
    )
    without_key: str = Field(
        default=CdcTable.without_key,
        description="The current image of a table without a key. `bag`: its rows, with duplicates; "
        "`log`: its changes, in commit order.",
    )
    on_schema_change: str | None = Field(
        default=None,
        description="`follow`, `ask` or `stop`, see below. Unset: the setting of the capture.",
    )
    on_poisoned_row: str | None = Field(
        default=None, description="`rescue` or `stop`. Unset: the setting of the capture."
    )
    on_detached_partition: str | None = Field(
        default=None, description="`delete` or `keep`. Unset: the setting of the capture."
    )
    types: dict[str, str] = Field(
        default={},
        description="The Delta types of columns, by name, in place of the "
        "[default types](types.md#types-that-you-choose).",
    )

    def table(self) -> CdcTable:
        """Check the settings."""
        return CdcTable.parse(**dict(self))


class AllTablesModel(dg.Model, Resolvable):
    """Which tables of the publication are kept with `tables: all`, and how."""

    include: Texts = Field(
        default=list(TableSelection.include),
        description="Patterns, such as `shop.*`; a table must match one of them.",
    )
    exclude: Texts = Field(
        default=[],
        description="Patterns of tables to omit, even if they match `include`.",
    )
    scd: list[int] = Field(
        default=list(TableSelection.scd),
        description="`scd` of all tables that `named` does not list.",
    )
    soft_deletes: bool = Field(
        default=TableSelection.soft_deletes, description="`soft_deletes` of the same tables."
    )
    without_key: str = Field(
        default=TableSelection.without_key, description="`without_key` of the same tables."
    )
    named: list[TableModel] = Field(
        default=[],
        description="Tables with their own settings, in the form of entries of `tables`. The "
        "settings above do not apply to these tables.",
    )

    def selection(self) -> TableSelection:
        """Check the settings."""
        return TableSelection(
            tuple(self.include),
            tuple(self.exclude),
            tuple(self.scd),
            self.soft_deletes,
            self.without_key,
        )
