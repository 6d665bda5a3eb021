"""The policies of a capture: windows, stream, snapshots, merges, retention and checks.

Every default is defined here.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.settings.variables import check_variable_name
from pgcdc_assets.table_name import TableName

MEGABYTE = 1024 * 1024

# The longest retention. Subtracting more days from today ends at a date before year 1.
LONGEST_DAYS = 36_500

# What happens after a schema change (`on_schema_change`). FOLLOW: the SCD tables follow, and a
# change that the stream cannot replay causes an automatic re-snapshot. ASK: such a change stops the
# table until a person takes a new snapshot. STOP: every schema change stops the table.
FOLLOW, ASK, STOP = "follow", "ask", "stop"
SCHEMA_POLICIES = (FOLLOW, ASK, STOP)

# What happens to a table with a row that cannot be decoded (`on_poisoned_row`). RESCUE: the row is
# parked, and an automatic re-snapshot follows. STOP: the row is parked, and the table stops until a
# person takes a new snapshot.
RESCUE = "rescue"

# What happens to the rows of a partition that was detached or dropped (`on_detached_partition`).
# DELETE: a re-snapshot of the partitioned table removes them. KEEP: they stay.
DELETE, KEEP = "delete", "keep"

# The values of each setting of a table or of a capture, with their meanings. The first value is the
# default.
TABLE_POLICIES = {
    "on_schema_change": {
        FOLLOW: "take a new snapshot of a table whose schema change cannot be replayed",
        ASK: "stop the table until a person takes the snapshot",
        STOP: "stop the table at every schema change",
    },
    "on_poisoned_row": {
        RESCUE: "take a new snapshot of a table with a row that cannot be decoded",
        STOP: "stop the table until a person takes the snapshot",
    },
    "on_detached_partition": {
        DELETE: "remove the rows of the partition by a new snapshot of the partitioned table",
        KEEP: "keep the rows of the partition",
    },
}


DEFAULT_POLICIES = {setting: next(iter(meanings)) for setting, meanings in TABLE_POLICIES.items()}


def check_policies(owner: object, where: str) -> None:
    """Raise a ConfigurationError if a setting of `TABLE_POLICIES` has an unknown value.

    Args:
        owner: has the settings as attributes; None is a setting that is not set.
    """
    for setting, meanings in TABLE_POLICIES.items():
        value = getattr(owner, setting)
        if value is not None and value not in meanings:
            *first, last = (f"{known} ({meaning})" for known, meaning in meanings.items())
            raise ConfigurationError(
                reason=f"{where}: {setting} is {value!r}, but must be {', '.join(first)} or {last}"
            )


@dataclass(frozen=True)
class WindowPolicy:
    """When a window is opened, its size, and the number of partition keys.

    Attributes:
        max_bytes: maximum size of a window in bytes of WAL.
        min_bytes: bytes of waiting WAL that open a window at once.
        max_age_seconds: waiting WAL of any size opens a window this long after the last landing; in
            a run that continues, this long after the last window was opened.
        max_empty_seconds: while the stream of a running capture brings no change, WAL of other
            tables and databases opens a window this long after the last window was opened; 0: as
            other WAL.
        retry_seconds: pause before a failed window is retried, doubled at each failure.
        max_retry_seconds: the longest pause before a retry.
        run_seconds: time for which a run of a sensor continues with further windows while changes
            arrive; 0: the run ends after the requested windows.
        keep: maximum number of partition keys; the oldest keys of windows that are merged into all
            tables are deleted.
    """

    max_bytes: int = 256 * MEGABYTE
    min_bytes: int = 8 * MEGABYTE
    max_age_seconds: float = 2.5
    max_empty_seconds: float = 60.0
    retry_seconds: float = 5.0
    max_retry_seconds: float = 300.0
    run_seconds: float = 600.0
    keep: int = 10_000

    def __post_init__(self) -> None:
        for name in ("max_bytes", "min_bytes", "keep"):
            if getattr(self, name) < 1:
                raise ConfigurationError(reason=f"windows.{name} must be 1 or more")
        for name in (
            "max_age_seconds",
            "max_empty_seconds",
            "retry_seconds",
            "max_retry_seconds",
            "run_seconds",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(reason=f"windows.{name} must not be negative")

    def backoff(self, failures: int) -> float:
        """Return the seconds to wait after `failures` consecutive failures."""
        if failures == 0:
            return 0.0
        doubled: float = self.retry_seconds * 2.0 ** min(failures - 1, 30)
        return min(doubled, self.max_retry_seconds)


# When the server sends the changes of a large transaction (`stream.streaming`).
STREAMING_MODES = ("off", "on", "parallel")

# Whether the server sends changes that it has itself replicated from another server
# (`stream.origin`).
ORIGINS = ("any", "none")


@dataclass(frozen=True)
class StreamPolicy:
    """The time limits and sizes of a capture's replication stream.

    Attributes:
        batch_bytes: bytes that are decoded together.
        status_seconds: longest interval between two status packets to the server.
        silence_seconds: time without bytes, despite requests for a reply, after which the
            connection counts as lost.
        total_seconds: time limit of a window's capture, which is retried later; None: no limit.
        slot_wait_seconds: time to wait before the stale walsender of a dead run is ended.
        resume_seconds: time without a connection during one window after which a run no longer
            tries to resume, and fails; 0: a run fails at the loss of a connection.
        resume_pause_seconds: the longest pause between two attempts to resume. The first pause is
            0.1 s at most; the pauses double, each shortened at random by up to a half.
        report_seconds: interval of the figures about a running capture in the run's log.
        streaming: when the server sends a transaction that exceeds its logical_decoding_work_mem:
            `off`, at the commit; `on`, while the transaction runs; `parallel`, as `on` by a later
            version of the protocol (Postgres 16). YAML reads off and on as booleans, which are
            accepted.
        two_phase: the server sends a prepared transaction at PREPARE TRANSACTION (Postgres 15). The
            slot keeps this mode.
        origin: `any`: all changes; `none`: only changes without a replication origin (Postgres 16),
            so that changes which were replicated into the source are not captured.
        malformed_folder: folder for the bytes of a batch that cannot be decoded, which hold values
            of rows; None: the bytes are not kept.
    """

    batch_bytes: int = 8 * MEGABYTE
    status_seconds: float = 10.0
    silence_seconds: float = 60.0
    total_seconds: float | None = None
    slot_wait_seconds: float = 5.0
    resume_seconds: float = 60.0
    resume_pause_seconds: float = 10.0
    report_seconds: float = 60.0
    streaming: str = "off"
    two_phase: bool = False
    origin: str = "any"
    malformed_folder: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.streaming, bool):
            object.__setattr__(self, "streaming", "on" if self.streaming else "off")
        if self.streaming not in STREAMING_MODES:
            raise ConfigurationError(
                reason=f"stream.streaming must be {', '.join(STREAMING_MODES[:-1])} or "
                f"{STREAMING_MODES[-1]}"
            )
        if self.origin not in ORIGINS:
            raise ConfigurationError(reason=f"stream.origin must be {' or '.join(ORIGINS)}")
        for name in (
            "batch_bytes",
            "status_seconds",
            "silence_seconds",
            "resume_pause_seconds",
            "report_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ConfigurationError(reason=f"stream.{name} must be above zero")
        if self.total_seconds is not None and not self.total_seconds > 0:
            raise ConfigurationError(
                reason="stream.total_seconds must be above zero; omit the setting for no limit"
            )
        for name in ("slot_wait_seconds", "resume_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(reason=f"stream.{name} must not be negative")
        if self.malformed_folder is not None and not self.malformed_folder.strip():
            raise ConfigurationError(reason="stream.malformed_folder must name a folder")


@dataclass(frozen=True)
class HeartbeatPolicy:
    """The heartbeats of a running capture in its source.

    Attributes:
        seconds: interval of the heartbeats.
        table: name of the table whose row is updated; None: a logical message is written.
    """

    seconds: float = 60.0
    table: str | None = None

    def __post_init__(self) -> None:
        if not self.seconds >= 1:
            raise ConfigurationError(reason="heartbeat.seconds must be 1 or more")
        if self.table is not None:
            TableName.parse(self.table)

    @property
    def table_name(self) -> TableName | None:
        """The table; None: a logical message."""
        return None if self.table is None else TableName.parse(self.table)


@dataclass(frozen=True)
class MessagePolicy:
    """Which logical messages (`pg_logical_emit_message`) are captured.

    Attributes:
        prefixes: the prefixes of the captured messages; None: every prefix. Heartbeats of this
            package are always captured.
        table: keep the captured messages as a table of their own.
    """

    prefixes: tuple[str, ...] | None = None
    table: bool = True

    def __post_init__(self) -> None:
        if self.prefixes is None:
            return
        is_list = isinstance(self.prefixes, list | tuple)
        if not is_list or not all(isinstance(prefix, str) for prefix in self.prefixes):
            raise ConfigurationError(reason="messages.prefixes must be a list of texts")
        if not self.prefixes or any("\0" in prefix for prefix in self.prefixes):
            raise ConfigurationError(
                reason="messages.prefixes must name at least one prefix, and no prefix contains a "
                "zero byte; omit the setting for every prefix"
            )
        object.__setattr__(self, "prefixes", tuple(self.prefixes))


@dataclass(frozen=True)
class SlotPolicy:
    """How a capture treats its slot.

    Attributes:
        failover: standbys may keep a copy of the slot (PG 17 and newer).
        heartbeat: the heartbeats in the source; None: no heartbeats.
        two_phase: a slot with two_phase may be adopted, since the captures have `stream.two_phase`.
    """

    failover: bool = False
    heartbeat: HeartbeatPolicy | None = None
    two_phase: bool = False


@dataclass(frozen=True)
class SnapshotPolicy:
    """The connections, the ranges and the time limits of a snapshot.

    Attributes:
        parallelism: number of connections that read tables in parallel.
        range_bytes: a table of more bytes is read in ranges of this size, which the connections
            share.
        max_seconds: after this time, the next ranges are read in a new snapshot of the server;
            None: no limit.
        max_xmin_age: the same limit, in transaction ids that were assigned since the oldest
            transaction that the snapshot does not see. None: half of the server's
            autovacuum_freeze_max_age, at which VACUUM warns.
        lock_timeout_seconds: limit of each wait for a lock, also at the creation of the slot; None:
            the limit of the connection.
        statement_timeout_seconds: limit of the statement that reads a range; None: no limit.
        dsn_env: environment variable with the libpq URI of a standby that copies of whole tables
            read from; None: they read from the capture's server.
    """

    parallelism: int = 4
    range_bytes: int = 256 * MEGABYTE
    max_seconds: float | None = None
    max_xmin_age: int | None = None
    lock_timeout_seconds: float | None = None
    statement_timeout_seconds: float | None = None
    dsn_env: str | None = None

    def __post_init__(self) -> None:
        if self.dsn_env is not None:
            check_variable_name(self.dsn_env, "snapshot.dsn_env")
        for name in ("parallelism", "range_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(reason=f"snapshot.{name} must be 1 or more")
        for name in (
            "max_seconds",
            "max_xmin_age",
            "lock_timeout_seconds",
            "statement_timeout_seconds",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(reason=f"snapshot.{name} must be above zero")


@dataclass(frozen=True)
class StepLimit:
    """The size limits of one commit of a merge, which folds whole windows.

    A window that exceeds the limits by itself is a step of its own.

    Attributes:
        changes: maximum number of changes of the table.
        bytes: maximum size of these changes as text.
    """

    changes: int = 2_000_000
    bytes: int = 1024 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("changes", "bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(reason=f"merge_step.{name} must be 1 or more")


@dataclass(frozen=True)
class RetentionPolicy:
    """Retention of raw windows and replaced files, and the schedule of maintenance.

    Attributes:
        raw_days: raw windows that are merged into all tables are removed this many days after their
            last commit; None: raw windows are never removed. Every retention has 36,500 days at
            most.
        old_version_hours: hours for which files that a merge has replaced are kept for readers of
            older versions; 1 or more.
        old_version_days: the same in days; 1 or more. If set, `old_version_hours` is ignored.
        replaced_ratio: after a merge, replaced files past their retention are deleted if their size
            is at least this multiple of the table's size.
        record_days: Dagster's records of the capture are deleted after so many days: runs that have
            ended, with their events and logs, observations, and results of checks. Records of
            windows that have a partition key are kept. None: records are never deleted.
        schedule: cron expression of `<name>_upkeep`, in UTC.
    """

    raw_days: float | None = None
    old_version_hours: float = 1.0
    old_version_days: float | None = None
    replaced_ratio: float = 1.0
    record_days: float | None = 30.0
    schedule: str = "17 3 * * *"

    def __post_init__(self) -> None:
        if not self.replaced_ratio >= 0:
            raise ConfigurationError(reason="retention.replaced_ratio must not be negative")
        for name, remedy in (
            ("raw_days", "Omit the setting to keep every window"),
            ("record_days", "Set null to keep every record"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= LONGEST_DAYS:
                raise ConfigurationError(
                    reason=f"retention.{name} must be between 0 and {LONGEST_DAYS} days. {remedy}"
                )
        for name in ("old_version_hours", "old_version_days"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigurationError(
                    reason=f"retention.{name} must be 1 or more, not {value:g}: merges and checks "
                    "read the version of their start"
                )
        if not self.keep_hours <= LONGEST_DAYS * 24:
            raise ConfigurationError(
                reason=f"retention.old_version_days must be at most {LONGEST_DAYS}, and "
                f"retention.old_version_hours {LONGEST_DAYS * 24}. Set a number: no value keeps "
                "replaced files without a limit"
            )

    @property
    def keep_hours(self) -> float:
        """Hours for which replaced files are kept."""
        days = self.old_version_days
        return self.old_version_hours if days is None else days * 24


@dataclass(frozen=True)
class CheckPolicy:
    """The schedule of the checks that no other job runs.

    Attributes:
        schedule: cron expression of `<name>_checks`, in UTC; None: no schedule.
    """

    schedule: str | None = "47 4 * * *"
