"""The models of a capture's settings besides tables, windows and stream."""

from __future__ import annotations

import dagster as dg
from dagster.components.resolved.base import Resolvable
from pydantic import Field

from pgcdc_assets.orchestration.component_texts import OptionalText, OptionalTexts
from pgcdc_assets.settings.catalog import CatalogPolicy
from pgcdc_assets.settings.policies import (
    CheckPolicy,
    HeartbeatPolicy,
    MessagePolicy,
    RetentionPolicy,
    SnapshotPolicy,
    StepLimit,
)


class HeartbeatModel(dg.Model, Resolvable):
    """What a running capture writes to its source."""

    seconds: float = Field(
        default=HeartbeatPolicy.seconds, description="Interval of the heartbeats; at least 1."
    )
    table: OptionalText = Field(
        default=None,
        description="A table of the source with one row per slot, which a heartbeat updates. The "
        "row names the owner of the slot. Unset: a heartbeat is a logical message, which needs no "
        "privilege.",
    )


class MessageModel(dg.Model, Resolvable):
    """Which logical messages are captured."""

    prefixes: OptionalTexts = Field(
        default=None,
        description="The prefixes of the captured messages, each as a whole. Unset: every prefix. "
        "Heartbeats are always captured.",
    )
    table: bool = Field(
        default=MessagePolicy.table,
        description="Keep the captured messages as the Delta table `<lake>/<name>/messages`, which "
        "is the asset `<name>/messages`.",
    )

    def policy(self) -> MessagePolicy:
        """Return the settings."""
        prefixes = None if self.prefixes is None else tuple(self.prefixes)
        return MessagePolicy(prefixes, self.table)


class RetentionModel(dg.Model, Resolvable):
    """Retention times, and the schedule of the maintenance job."""

    raw_days: float | None = Field(
        default=None,
        description="Raw windows that are merged into every table are deleted this long after "
        "their last commit; at most 36500. Unset: every window is kept.",
    )
    old_version_hours: float = Field(
        default=RetentionPolicy.old_version_hours,
        description="How long replaced files are kept for readers of older versions; at least 1. "
        "A longer `delta.deletedFileRetentionDuration` of the table takes precedence.",
    )
    old_version_days: float | None = Field(
        default=None,
        description="The same in days; at least 1. If set, `old_version_hours` is ignored.",
    )
    replaced_ratio: float = Field(
        default=RetentionPolicy.replaced_ratio,
        description="A merge deletes replaced files of that age if their size exceeds this many "
        "times the size of the table, and 8 MB.",
    )
    record_days: float | None = Field(
        default=RetentionPolicy.record_days,
        description="Dagster's records of the capture are deleted after so many days: runs with "
        "their events and logs, observations, and results of checks. Records of windows with a "
        "partition key are kept. At most 36500; `null`: records are never deleted.",
    )
    schedule: str = Field(
        default=RetentionPolicy.schedule,
        description="Cron expression of the job `<name>_upkeep`, in UTC.",
    )


class StepModel(dg.Model, Resolvable):
    """The limit of the changes that one commit of a merge folds."""

    changes: int = Field(
        default=StepLimit.changes, description="Maximum number of changes of the table."
    )
    bytes: int = Field(
        default=StepLimit.bytes, description="Maximum size of these changes, in bytes of text."
    )


class CheckModel(dg.Model, Resolvable):
    """The schedule of the checks that read the source or whole tables."""

    schedule: str | None = Field(
        default=CheckPolicy.schedule,
        description="Cron expression of the job `<name>_checks`, in UTC; `null`: no schedule. The "
        "job reads every table and its source once.",
    )


class CatalogModel(dg.Model, Resolvable):
    """The catalog in which the SCD tables are registered."""

    schema_name: str = Field(
        alias="schema",
        description="The schema of the entries in the catalog; it is created if it is missing.",
    )
    type: str = Field(
        default=CatalogPolicy.type,
        description="`session`: the catalog of the Spark session, whatever it is. `hive`: the "
        "same, which must be a Hive metastore. `unity`: a Unity Catalog.",
    )
    name: str = Field(
        default=CatalogPolicy.name,
        description="The catalog's name in Spark. Required with `unity`.",
    )

    def policy(self) -> CatalogPolicy:
        """Return the settings after a check."""
        return CatalogPolicy(self.schema_name, self.type, self.name)


class SnapshotModel(dg.Model, Resolvable):
    """How snapshots of tables are taken."""

    parallelism: int = Field(
        default=SnapshotPolicy.parallelism,
        description="Number of connections that read tables in parallel.",
    )
    range_bytes: int = Field(
        default=SnapshotPolicy.range_bytes,
        description="A table of more bytes is read in ranges of this size, which the connections "
        "share. An interrupted snapshot is resumed with the missing ranges.",
    )
    max_seconds: float | None = Field(
        default=None,
        description="After this time, the next ranges are read in a new snapshot of the server, "
        "because the age of a snapshot delays VACUUM. A table without a key must be read within "
        "this time. Unset: no limit.",
    )
    max_xmin_age: int | None = Field(
        default=None,
        description="The same limit, in transaction ids that the server has assigned since the "
        "snapshot. Unset: half of the server's `autovacuum_freeze_max_age`, the age at which "
        "VACUUM warns about old transactions.",
    )
    lock_timeout_seconds: float | None = Field(
        default=None,
        description="How long a snapshot waits for a lock on a table, or for open transactions at "
        "the creation of its slot. Unset: the limit of the connection, 10 seconds by default.",
    )
    statement_timeout_seconds: float | None = Field(
        default=None,
        description="A range that takes longer fails, and so does its table. Unset: no limit.",
    )
    dsn_env: str | None = Field(
        default=None,
        description="The environment variable with the libpq URI of a standby that "
        "copies of whole tables read from. Unset: they read from the capture's server.",
    )
