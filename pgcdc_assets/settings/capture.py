"""The settings of one capture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.settings.catalog import CatalogPolicy
from pgcdc_assets.settings.policies import (
    DEFAULT_POLICIES,
    DELETE,
    FOLLOW,
    RESCUE,
    CheckPolicy,
    HeartbeatPolicy,
    MessagePolicy,
    RetentionPolicy,
    SlotPolicy,
    SnapshotPolicy,
    StepLimit,
    StreamPolicy,
    WindowPolicy,
    check_policies,
)
from pgcdc_assets.settings.selection import TableSelection
from pgcdc_assets.settings.table import CdcTable
from pgcdc_assets.table_name import TableName

# Asset keys, job names, lake folders and slots contain the name, and allow these characters.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")

LONGEST_SLOT = 63
_SLOT = re.compile(rf"[a-z0-9_]{{1,{LONGEST_SLOT}}}")


def check_capture_name(name: str) -> None:
    """Raise a ConfigurationError for a text that cannot name a capture."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            reason=f"{name!r} cannot name a capture: use 1 to 40 lower-case letters, digits and "
            "underscores, and begin with a letter",
            setting="name",
        )


def check_slot_name(slot: str) -> None:
    """Raise a ConfigurationError for a text that cannot name a slot."""
    if not _SLOT.fullmatch(slot):
        raise ConfigurationError(
            reason=f"{slot!r} cannot name a slot: use 1 to 63 lower-case letters, digits and "
            "underscores",
            setting="slot",
        )


@dataclass(frozen=True)
class CdcCapture:
    """One capture: a publication, its replication slot, and the tables to keep.

    Attributes:
        name: the capture's name, part of asset keys and job names, and name of the lake folder.
        publication: the publication's name.
        tables: the tables to keep. With a selection, these are the tables with their own settings,
            and in definitions the tables of the list in the lake.
        slot: the replication slot, which the first snapshot creates if the slot does not exist; the
            default is `pgcdc_<name>`.
        failover: standbys may keep a copy of the slot, so that a promoted standby continues.
        windows: when a window is opened, and its size.
        stream: time limits and sizes of the replication stream.
        heartbeat: the heartbeats of a running capture; None: no heartbeats.
        messages: the logical messages to capture, and their table; None: all transactional
            messages, without a table.
        retention: retention, and the schedule of maintenance.
        checks: the schedule of checks.
        merge_parallelism: number of tables that are merged in parallel in one Spark session; the
            process writes so many small tables in parallel.
        merge_step: the size limits of one commit of a merge.
        verify_wait_seconds: time for which the check `equals_source` waits for the capture of the
            LSN of its comparison.
        adopt_slot: take over a slot that another consumer has read.
        on_schema_change: what happens after a schema change, for tables without the setting.
        on_poisoned_row: what happens to a table with a row that cannot be decoded, for tables
            without the setting.
        on_detached_partition: what happens to the rows of a partition that was detached or dropped,
            for tables without the setting.
        catalog_poll_seconds: interval at which the lag sensor polls the catalog for schema changes
            that no row announces; 0: at every evaluation.
        selection: follow the publication: tables that match the patterns are kept, and a new table
            gets its assets automatically; None: `tables` lists all tables to keep.
        catalog: the catalog of Spark in which the SCD tables are registered; None: no catalog.
        own_settings: with a selection, the tables with their own settings; the class sets it.
    """

    name: str
    publication: str
    tables: tuple[CdcTable, ...]
    slot: str = ""
    failover: bool = False
    windows: WindowPolicy = field(default_factory=WindowPolicy)
    stream: StreamPolicy = field(default_factory=StreamPolicy)
    heartbeat: HeartbeatPolicy | None = None
    messages: MessagePolicy | None = None
    snapshot: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    checks: CheckPolicy = field(default_factory=CheckPolicy)
    merge_parallelism: int = 2
    merge_step: StepLimit = field(default_factory=StepLimit)
    verify_wait_seconds: float = 120.0
    adopt_slot: bool = False
    on_schema_change: str = FOLLOW
    on_poisoned_row: str = RESCUE
    on_detached_partition: str = DELETE
    catalog_poll_seconds: float = 30.0
    selection: TableSelection | None = None
    catalog: CatalogPolicy | None = None
    own_settings: tuple[CdcTable, ...] | None = None

    def __post_init__(self) -> None:
        check_capture_name(self.name)
        if self.slot:
            check_slot_name(self.slot)
        if self.merge_parallelism < 1:
            raise ConfigurationError(reason="merge_parallelism must be 1 or more")
        for name in ("verify_wait_seconds", "catalog_poll_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(reason=f"{name} must not be negative")
        check_policies(self, f"Capture {self.name}")
        if not self.publication:
            raise ConfigurationError(reason=f"Capture {self.name} names no publication")
        if not self.tables and self.selection is None:
            raise ConfigurationError(
                reason=f"Capture {self.name} lists no tables: run `pgcdc init` to "
                "write the publication's tables",
                setting="tables",
            )
        names = [table.qualified_name for table in self.tables]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigurationError(
                reason=f"Capture {self.name} lists {', '.join(twice)} more than once"
            )
        if not self.slot:
            object.__setattr__(self, "slot", f"pgcdc_{self.name}")
        if self.selection is not None and self.own_settings is None:
            self._check_selected(self.selection)
            object.__setattr__(self, "own_settings", self.tables)
        if any(getattr(self, name) != default for name, default in DEFAULT_POLICIES.items()):
            # A merge gets the settings of tables only.
            object.__setattr__(self, "tables", tuple(map(self._with_policies, self.tables)))

    def _check_selected(self, selection: TableSelection) -> None:
        CdcTable.parse(
            "all_tables.*",
            selection.scd,
            soft_deletes=selection.soft_deletes,
            without_key=selection.without_key,
        )
        for table in self.tables:
            reason = selection.find_reason(table.name)
            if reason is not None:
                raise ConfigurationError(
                    reason=f"Table {table.qualified_name} has settings of its own, but {reason}"
                )

    def _with_policies(self, table: CdcTable) -> CdcTable:
        own = {name: getattr(table, name) or getattr(self, name) for name in DEFAULT_POLICIES}
        return replace(table, **own)

    def with_listed_tables(self, names: Iterable[TableName]) -> CdcCapture:
        """Return the capture with the tables of a list that its selection selects."""
        selection = self.selection
        assert selection is not None
        own = {table.name: table for table in self.own_settings or ()}
        tables = (
            own.get(name)
            or CdcTable(
                *name,
                scd=selection.scd,
                soft_deletes=selection.soft_deletes,
                without_key=selection.without_key,
            )
            for name in sorted(set(names))
        )
        return replace(self, tables=tuple(t for t in tables if selection.selects(t.name)))

    def select_tables(self, names: Sequence[str]) -> list[CdcTable]:
        """Return the declared tables with these names, or all tables for an empty sequence.

        Raises:
            ConfigurationError: a name is not declared.
        """
        tables = {table.name: table for table in self.tables}
        wanted = {TableName.parse(name) for name in names}
        unknown = sorted(wanted - set(tables))
        if unknown:
            raise ConfigurationError(
                reason=f"Capture {self.name} has no table {', '.join(map(str, unknown))}. Its "
                f"tables are {', '.join(map(str, tables))}"
            )
        return [table for name, table in tables.items() if not wanted or name in wanted]

    @property
    def slot_policy(self) -> SlotPolicy:
        """How the capture treats its slot."""
        return SlotPolicy(self.failover, self.heartbeat, self.stream.two_phase)

    @property
    def keepers(self) -> list[TableName]:
        """The names of the tables that keep the rows of detached partitions."""
        return [table.name for table in self.tables if table.keeps_partitions]

    @property
    def has_message_table(self) -> bool:
        """Whether the captured logical messages are kept as a table of their own."""
        return self.messages is not None and self.messages.table

    @property
    def windows_name(self) -> str:
        """Name of the dynamic partitions definition of the raw asset and the SCD assets."""
        return f"{self.name}_windows"

    @property
    def table_names(self) -> list[TableName]:
        """The names of all tables."""
        return [table.name for table in self.tables]
