"""What a person declares about one capture: plain values, read from YAML or written in Python.

Nothing here connects or opens anything, so that definitions load with the network cable out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.table_name import TableName

# The name becomes part of asset keys, job names, a lake folder and a slot: what all of them take.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")

_SLOT = re.compile(r"[a-z0-9_]{1,63}")

MEGABYTE = 1024 * 1024

_SETTINGS = ("key", "scd", "tracked", "soft_deletes", "without_key")


@dataclass(frozen=True)
class CdcTable:
    """One table of the publication.

    Attributes:
        scd: the kinds of tables to keep: 1 is the current image, 2 the history.
        key: columns that identify a row; None means the replica identity's.
        tracked: columns whose change opens a version in the history; None means all.
        soft_deletes: the current image keeps deleted rows and marks them.
        without_key: what the current image of a table without a key is: `bag`, its rows with their
            duplicates, or `log`, its changes one after the other.
    """

    schema: str
    table: str
    scd: tuple[int, ...] = (1,)
    key: tuple[str, ...] | None = None
    tracked: tuple[str, ...] | None = None
    soft_deletes: bool = False
    without_key: str = "bag"

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    @property
    def qualified_name(self) -> str:
        """The name in settings, commands and messages."""
        return str(self.name)

    @property
    def partition_key(self) -> str:
        """The table's partition of the snapshot asset."""
        return self.name.partition_key

    @property
    def mirrors_source(self) -> bool:
        """Whether its SCD1 table holds the source's rows, so that the two can be compared."""
        return 1 in self.scd and self.without_key != "log"

    def keeps_history(self, scd: int) -> bool:
        """Return whether a kind of table shows what was before a copy, and not the copy alone."""
        return scd == 2 or self.soft_deletes or self.without_key == "log"

    def of_kinds(self, scds: Iterable[int]) -> CdcTable:
        """Return the same table with some of its kinds of SCD table."""
        return replace(self, scd=tuple(sorted(scds)))

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> CdcTable:
        """Read a table from its fields by name, with lists for tuples as JSON has them."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)

    @classmethod
    def parse(
        cls,
        name: str,
        scd: Sequence[int] = (1,),
        key: Sequence[str] | None = None,
        tracked: Sequence[str] | None = None,
        soft_deletes: bool = False,
        without_key: str = "bag",
    ) -> CdcTable:
        """Check the settings of a table; see `TableName.parse` for the name.

        Raises:
            ConfigurationError: the name is not one, a setting has no such value, or it is about a
                kind of table that is not kept.
        """
        parsed = TableName.parse(name)
        if set(scd) - {1, 2} or not scd or len(set(scd)) < len(scd):
            raise ConfigurationError(
                reason=f"Table {name}: scd is {list(scd)}, but must be [1], the current image, "
                "[2], the history, or [1, 2]"
            )
        if tracked is not None and (2 not in scd or not tracked):
            raise ConfigurationError(
                reason=f"Table {name}: tracked names the columns whose change opens a version; it "
                "needs one at least, and scd with 2"
            )
        if not isinstance(soft_deletes, bool) or (soft_deletes and 1 not in scd):
            raise ConfigurationError(
                reason=f"Table {name}: soft_deletes is true or false, and is about scd 1"
            )
        if without_key not in ("bag", "log"):
            raise ConfigurationError(
                reason=f"Table {name}: without_key is {without_key!r}, but must be bag, the rows "
                "with their duplicates, or log, the changes one after the other"
            )
        return cls(
            parsed.schema,
            parsed.table,
            tuple(scd),
            tuple(key) if key is not None else None,
            tuple(tracked) if tracked is not None else None,
            soft_deletes,
            without_key,
        )


@dataclass(frozen=True)
class WindowPolicy:
    """When a window is opened, how large it may be and how many keys are kept.

    Attributes:
        max_bytes: WAL bytes of one window at most.
        min_bytes: waiting WAL bytes that open a window at once.
        max_age_seconds: waiting WAL of any size opens a window this long after the last one landed.
        retry_seconds: pause before a failed window is tried again; doubled at each failure.
        max_retry_seconds: the longest such pause.
        run_seconds: a run that a sensor asks for goes on with the next windows for so long while
            changes come; 0: it ends with what it was asked for.
        keep: partition keys to hold; the oldest ones merged everywhere are pruned above it.
    """

    max_bytes: int = 256 * MEGABYTE
    min_bytes: int = 8 * MEGABYTE
    max_age_seconds: float = 5.0
    retry_seconds: float = 5.0
    max_retry_seconds: float = 300.0
    run_seconds: float = 600.0
    keep: int = 10_000

    def __post_init__(self) -> None:
        for name in ("max_bytes", "min_bytes", "keep"):
            if getattr(self, name) < 1:
                raise ConfigurationError(reason=f"windows.{name} must be 1 or more")
        for name in ("max_age_seconds", "retry_seconds", "max_retry_seconds", "run_seconds"):
            if getattr(self, name) < 0:
                raise ConfigurationError(reason=f"windows.{name} must not be negative")

    def backoff(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row."""
        if failures == 0:
            return 0.0
        doubled: float = self.retry_seconds * 2.0 ** min(failures - 1, 30)
        return min(doubled, self.max_retry_seconds)


@dataclass(frozen=True)
class StreamPolicy:
    """The clocks and sizes of a capture's replication stream.

    Attributes:
        batch_bytes: bytes decoded together.
        status_seconds: between two status packets to the server, at the most.
        silence_seconds: a connection that says nothing for so long, though asked, is given up.
        total_seconds: a capture that takes longer is given up and tried again; None: no limit.
        slot_wait_seconds: how long the walsender of a dead run may keep the slot.
    """

    batch_bytes: int = 8 * MEGABYTE
    status_seconds: float = 10.0
    silence_seconds: float = 60.0
    total_seconds: float | None = None
    slot_wait_seconds: float = 5.0

    def __post_init__(self) -> None:
        for name in ("batch_bytes", "status_seconds", "silence_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(reason=f"stream.{name} must be above zero")


@dataclass(frozen=True)
class StepLimit:
    """How much one commit of a merge folds at most: the changes of whole windows.

    A window that holds more by itself is a step of its own.

    Attributes:
        changes: of the table.
        bytes: of these changes as text.
    """

    changes: int = 2_000_000
    bytes: int = 1024 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("changes", "bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(reason=f"merge_step.{name} must be 1 or more")


@dataclass(frozen=True)
class RetentionPolicy:
    """What is kept for how long, and when upkeep runs.

    Attributes:
        raw_days: raw windows that are merged into every table go when their last change was
            committed longer ago; None: they stay.
        old_version_hours: files that a merge has replaced stay so long for readers of older
            versions; 1 or more.
        old_version_days: the same in days; 1 or more. Where it is set, the hours do not count.
        replaced_ratio: after a merge, files that were replaced longer ago than that are deleted
            once they have this many times the bytes of the table.
        schedule: cron expression, in UTC.
    """

    raw_days: float | None = None
    old_version_hours: float = 1.0
    old_version_days: float | None = None
    replaced_ratio: float = 1.0
    schedule: str = "17 3 * * *"

    def __post_init__(self) -> None:
        for name in ("raw_days", "replaced_ratio"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigurationError(reason=f"retention.{name} must not be negative")
        for name in ("old_version_hours", "old_version_days"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigurationError(
                    reason=f"retention.{name} must be 1 or more, not {value:g}: merges and checks "
                    "read the version that they began with"
                )

    @property
    def keep_hours(self) -> float:
        """How long replaced files stay."""
        days = self.old_version_days
        return self.old_version_hours if days is None else days * 24


@dataclass(frozen=True)
class CheckPolicy:
    """When the checks run that no other job runs.

    Attributes:
        schedule: cron expression of `<name>_checks`, in UTC; None: the job has no schedule.
    """

    schedule: str | None = "47 4 * * *"


@dataclass(frozen=True)
class CdcCapture:
    """One capture: a publication, the slot that reads it, and the tables kept from it.

    Attributes:
        name: names the assets, the slot's default and the lake folder.
        slot: the replication slot; made by the first snapshot when it does not exist.
        adopt_slot: a slot that something else has read before is taken over.
        merge_parallelism: tables merged side by side in the one Spark session.
        merge_step: how much one commit of a merge folds at most.
        verify_wait_seconds: how long the check `equals_source` waits until the moment that it reads
            the source at is captured.
    """

    name: str
    publication: str
    tables: tuple[CdcTable, ...]
    slot: str = ""
    windows: WindowPolicy = field(default_factory=WindowPolicy)
    stream: StreamPolicy = field(default_factory=StreamPolicy)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    checks: CheckPolicy = field(default_factory=CheckPolicy)
    merge_parallelism: int = 2
    merge_step: StepLimit = field(default_factory=StepLimit)
    verify_wait_seconds: float = 120.0
    adopt_slot: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                reason=f"{self.name!r} cannot name a capture: use 1 to 40 lower-case letters, "
                "digits and underscores, a letter first",
                setting="name",
            )
        if self.slot and not _SLOT.fullmatch(self.slot):
            raise ConfigurationError(
                reason=f"{self.slot!r} cannot name a slot: use 1 to 63 lower-case letters, digits "
                "and underscores",
                setting="slot",
            )
        if self.merge_parallelism < 1:
            raise ConfigurationError(reason="merge_parallelism must be 1 or more")
        if self.verify_wait_seconds < 0:
            raise ConfigurationError(reason="verify_wait_seconds must not be negative")
        if not self.publication:
            raise ConfigurationError(reason=f"Capture {self.name} names no publication")
        if not self.tables:
            raise ConfigurationError(
                reason=f"Capture {self.name} lists no tables: `pgcdc init` writes them from the "
                "publication",
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

    def select_tables(self, names: Sequence[str]) -> list[CdcTable]:
        """Find declared tables by name; none named means all.

        Raises:
            ConfigurationError: a name is not declared.
        """
        tables = {table.name: table for table in self.tables}
        wanted = {TableName.parse(name) for name in names}
        unknown = sorted(wanted - set(tables))
        if unknown:
            raise ConfigurationError(
                reason=f"Capture {self.name} has no table {', '.join(map(str, unknown))}; it has "
                f"{', '.join(map(str, tables))}"
            )
        return [table for name, table in tables.items() if not wanted or name in wanted]

    @property
    def windows_name(self) -> str:
        """The dynamic partitions definition that raw and SCD assets share."""
        return f"{self.name}_windows"

    @property
    def table_names(self) -> list[TableName]:
        """The names of all tables."""
        return [table.name for table in self.tables]


def parse_tables(
    tables: Sequence[str | Mapping[str, Any]] | Mapping[str, Mapping[str, Any] | None],
) -> tuple[CdcTable, ...]:
    """Read tables as YAML gives them: names, or names with their settings.

    Raises:
        ConfigurationError: an entry has another form.
    """
    entries: list[tuple[str, Mapping[str, Any]]] = []
    if isinstance(tables, Mapping):
        entries = [(name, settings or {}) for name, settings in tables.items()]
    else:
        for entry in tables:
            if isinstance(entry, str):
                entries.append((entry, {}))
            elif isinstance(entry.get("name"), str):
                entries.append((entry["name"], {k: v for k, v in entry.items() if k != "name"}))
            else:
                raise ConfigurationError(
                    reason="Each entry of tables is a name, or has a `name` (schema.table) with "
                    f"settings: {', '.join(_SETTINGS)}"
                )
    for name, settings in entries:
        unknown = sorted(set(settings) - set(_SETTINGS))
        if unknown:
            raise ConfigurationError(reason=f"Table {name} has unknown settings: {unknown}")
    return tuple(CdcTable.parse(name, **settings) for name, settings in entries)
