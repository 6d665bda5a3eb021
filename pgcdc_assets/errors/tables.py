"""Errors about tables: of the source, of the raw zone, and SCD tables."""

from __future__ import annotations

from pgcdc_assets.errors.base import (
    UNKNOWN_CAPTURE,
    DefiniteError,
    EndsWithCommand,
    SnapshotError,
    TransientError,
    rebuild_command,
    resnapshot_remedy,
)
from pgcdc_assets.lsn import Lsn


class SnapshotEnded(TransientError):
    """The server ended a snapshot, or canceled a statement that read in it."""


class TableChanged(TransientError):
    """A table or its publication was altered between the exported snapshot and the copy."""

    message = (
        "Table {relation} was altered after the snapshot, or its entry in the publication was. "
        "Nothing of this copy was kept; run it again."
    )

    relation: str


class WindowUnavailable(SnapshotError):
    """A window was confirmed to Postgres, but its rows are missing from the raw zone.

    Attributes:
        window: the window's key.
        confirmed_flush_lsn: a lower bound of the slot's position.
    """

    about = None

    message = (
        "Window {window} cannot be captured again: the slot is at {confirmed_flush_lsn} or "
        "beyond, and {reason}. {remedy}"
    )

    window: str
    confirmed_flush_lsn: Lsn


class RawExpired(DefiniteError):
    """Retention has removed requested windows of the raw zone."""

    message = (
        "{what} needs windows that retention has removed: the oldest LSN that the raw zone retains "
        "is {floor}. {remedy}"
    )

    what: str
    floor: Lsn
    remedy: str = ""
    capture: str = UNKNOWN_CAPTURE

    def __post_init__(self) -> None:
        if self.remedy in ("", resnapshot_remedy(UNKNOWN_CAPTURE)):
            self.remedy = resnapshot_remedy(self.capture)
        super().__post_init__()


class ReplicaIdentityError(DefiniteError, EndsWithCommand):
    """A table's replica identity does not allow the requested operation.

    Attributes:
        remedy: the statement that changes the replica identity.
    """

    about = "relation"
    before_command = "; then "
    message = (
        "Table {relation} has replica identity {identity}: {reason}. Change it with: {remedy}{then}"
    )

    relation: str
    identity: str
    remedy: str


class SchemaChangeError(SnapshotError):
    """A change of a table's columns cannot be replayed from the stream.

    Attributes:
        lsn: the first change that cannot be replayed; None: unknown.
        relation_id: OID of the relation; None: unknown.
        change: name of the kind of change; None: unknown.
    """

    about = "relation"
    message = "Table {relation}, column {column}: {reason}. {remedy}"

    relation: str
    column: str
    lsn: Lsn | None = None
    relation_id: int | None = None
    change: str | None = None


class TableMoved(SnapshotError):
    """A declared table was dropped or unpublished, or another table has its name."""

    about = "relation"
    message = (
        "Table {relation} {reason}, so its SCD tables do not follow the declared name. Restore the "
        "name and its entry in the publication, declare the other table, or remove the table from "
        "the capture's settings if it is gone for good. {remedy}"
    )

    relation: str


class RawZoneError(DefiniteError):
    """The raw zone is inconsistent, or does not match the slot."""

    message = "Raw zone {raw_zone}: {reason}"

    raw_zone: str


class TableDamaged(DefiniteError):
    """An SCD table's log or files are damaged.

    Attributes:
        table: the source table, for the remedy; empty: the code that found it knows the path only.
    """

    message = (
        "The Delta table {path} cannot be read: {reason}. Rebuild the table from the raw zone "
        "with: {remedy}"
    )

    path: str
    capture: str = UNKNOWN_CAPTURE
    table: str = ""

    @property
    def remedy(self) -> str:
        """The command that builds the table, or without its name all tables of the capture."""
        return rebuild_command(self.capture, *filter(None, [self.table]))


class TableRestored(TableDamaged):
    """An SCD table's rows are older than its watermark, as after a RESTORE.

    Attributes:
        version: of the RESTORE or CLONE.
        before: the version before it; None if a merge followed the older rows, so that a second
            RESTORE would lose its changes.
    """

    message = (
        "The Delta table {path} lacks changes that were merged: its version {version} is a RESTORE "
        "or CLONE of older rows, which does not reset the watermark. Rebuild the table from the "
        "raw zone with: {remedy}{undo}"
    )

    version: int = 0
    before: int | None = 0

    @property
    def undo(self) -> str:
        """The sentence about a second RESTORE; empty if it would lose changes."""
        if self.before is None:
            return ""
        return (
            f". Or undo version {self.version} in Spark: RESTORE TABLE delta.`{self.path}` TO "
            f"VERSION AS OF {self.before}"
        )


class MergeConflict(DefiniteError, EndsWithCommand):
    """A table cannot be merged as requested."""

    message = "Table {table} cannot be merged: {reason}{then}"

    table: str


class TableRefused(MergeConflict):
    """A table does not accept a merge as its owner or another tool has altered it."""


class SnapshotNeeded(SnapshotError, MergeConflict):
    """A table cannot be merged before a new snapshot."""

    message = "Table {table} cannot be merged: {reason}. {remedy}"


class WatermarkGap(SnapshotError):
    """Windows between a table's watermark and a requested window are missing from the raw zone."""

    message = (
        "Table {table} is merged through {expected}, but the raw zone continues at {found}: the "
        "windows in between were removed by retention or never captured. {remedy}"
    )

    table: str
    expected: Lsn
    found: Lsn
