"""The settings of one table of a capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.settings.column_types import parse_types
from pgcdc_assets.settings.policies import (
    FOLLOW,
    KEEP,
    RESCUE,
    check_policies,
)
from pgcdc_assets.table_name import TableName


@dataclass(frozen=True)
class CdcTable:
    """The settings of one table of the publication.

    Attributes:
        schema: the table's schema.
        table: the table's name.
        scd: the SCD types to keep: 1, the current image; 2, the history.
        key: columns that identify a row at each commit; None: those of the replica identity.
        tracked: columns whose change opens a version in the history; None: all columns.
        soft_deletes: the current image keeps deleted rows and marks these rows.
        without_key: the current image of a table without a key: `bag`, the multiset of its rows, or
            `log`, its changes in commit order.
        on_schema_change: `follow`, `ask` or `stop`, see `policies`; None: the capture's setting.
        on_poisoned_row: `rescue` or `stop`, see `policies`; None: the capture's setting.
        types: the Delta types of columns in place of their default types.
        on_detached_partition: `delete` or `keep`, see `policies`; None: the capture's setting.
    """

    schema: str
    table: str
    scd: tuple[int, ...] = (1,)
    key: tuple[str, ...] | None = None
    tracked: tuple[str, ...] | None = None
    soft_deletes: bool = False
    without_key: str = "bag"
    on_schema_change: str | None = None
    on_poisoned_row: str | None = None
    types: Mapping[str, str] = field(default_factory=dict, hash=False)
    on_detached_partition: str | None = None

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    @property
    def qualified_name(self) -> str:
        """The name in settings, commands and messages, such as `shop.orders`."""
        return str(self.name)

    @property
    def partition_key(self) -> str:
        """The table's partition key of the snapshot asset."""
        return self.name.partition_key

    @property
    def schema_policy(self) -> str:
        """The setting `on_schema_change`, with its default."""
        return self.on_schema_change or FOLLOW

    @property
    def row_policy(self) -> str:
        """The setting `on_poisoned_row`, with its default."""
        return self.on_poisoned_row or RESCUE

    @property
    def keeps_partitions(self) -> bool:
        """Whether the rows of detached and dropped partitions stay."""
        return self.on_detached_partition == KEEP

    @property
    def may_be_log(self) -> bool:
        """Whether the SCD1 table is a log of changes if the source table has no key."""
        return self.without_key == "log" and not (self.key or self.soft_deletes)

    def keeps_history(self, scd: int) -> bool:
        """Return whether the table of an SCD type keeps rows from before a snapshot."""
        return scd == 2 or self.soft_deletes or self.without_key == "log"

    def needs_key(self, scd: int) -> bool:
        """Return whether the table of an SCD type cannot hold rows without a key."""
        return scd == 2 or self.soft_deletes

    def of_kinds(self, scds: Iterable[int]) -> CdcTable:
        """Return the settings with some of the table's SCD types."""
        return replace(self, scd=tuple(sorted(scds)))

    @classmethod
    def of_fields(cls, given: Mapping[str, Any]) -> CdcTable:
        """Return the table with these fields, which have lists in place of tuples, as in JSON."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
        return cls(**values)

    @classmethod
    def parse(cls, name: str, scd: Sequence[int] = (1,), **settings: Any) -> CdcTable:
        """Return the settings of a table after a check. See `TableName.parse` for the name.

        Args:
            settings: further fields of the class.

        Raises:
            ConfigurationError: the name or a value is invalid, or a setting requires an SCD type
                that is not kept.
        """
        parsed = TableName.parse(name)
        types = parse_types(name, settings.get("types") or {})
        given = {**settings, "scd": list(scd), "types": types}
        table = cls.of_fields({"schema": parsed.schema, "table": parsed.table, **given})
        table._check(f"Table {name}")
        return table

    def _check(self, where: str) -> None:
        scd = list(self.scd)
        if set(scd) - {1, 2} or not scd or len(set(scd)) < len(scd):
            raise ConfigurationError(
                reason=f"{where}: scd is {scd}, but must be [1] (the current image), "
                "[2] (the history) or [1, 2]"
            )
        for setting in ("key", "tracked"):
            columns = getattr(self, setting)
            if columns is not None and not isinstance(columns, tuple):
                raise ConfigurationError(
                    reason=f"{where}: {setting} is {columns!r}, but must be a list of columns"
                )
        if self.tracked is not None and (2 not in scd or not self.tracked):
            raise ConfigurationError(
                reason=f"{where}: tracked lists the columns whose change opens a version. "
                "Name at least one column, and include 2 in scd"
            )
        if not isinstance(self.soft_deletes, bool) or (self.soft_deletes and 1 not in scd):
            raise ConfigurationError(
                reason=f"{where}: soft_deletes must be true or false, and true requires 1 in scd"
            )
        if self.without_key not in ("bag", "log"):
            raise ConfigurationError(
                reason=f"{where}: without_key is {self.without_key!r}, but must be bag (the rows "
                "with duplicates) or log (the changes in commit order)"
            )
        check_policies(self, where)
