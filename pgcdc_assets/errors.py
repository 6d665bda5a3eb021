"""The exceptions of the package, by the action that an error requires.

    PgcdcError
    ├── ConfigurationError      correct the settings: no retry          exit status 2
    ├── TransientError          retry                                   exit status 3
    │   ├── ConnectionLost
    │   ├── SlotBusy
    │   ├── SnapshotEnded
    │   └── TableChanged
    ├── DefiniteError           a person must act: no retry             exit status 4
    │   ├── SlotUnusable
    │   │   ├── SlotLost
    │   │   ├── SlotMissing
    │   │   └── SlotAdvanced
    │   ├── SlotTaken
    │   ├── WindowUnavailable
    │   ├── RawExpired
    │   ├── ReplicaIdentityError
    │   ├── SchemaChangeError
    │   ├── TableMoved
    │   ├── ProtocolError
    │   ├── RawZoneError
    │   ├── TableDamaged
    │   ├── MergeConflict
    │   │   └── SnapshotNeeded
    │   └── WatermarkGap
    ├── CaptureCancelled        the caller ended the capture: no retry  exit status 130
    └── DifferenceFound         a comparison found differing contents   exit status 1

Each error has its facts as attributes, and builds its message from these facts. A message names the
object and the remedy, and contains neither a row value nor a secret. All errors can be pickled,
because Dagster's multiprocess executor sends errors between processes.
"""

from __future__ import annotations

import shlex
from typing import Any, ClassVar, Self, cast

UNKNOWN_CAPTURE = "NAME"


def resnapshot_remedy(capture: str, *tables: str) -> str:
    """Return the remedy "take a new snapshot" for some tables, or for all tables by default."""
    return f"Take a new snapshot with: {shlex.join(['pgcdc', 'resnapshot', capture, *tables])}"


def renewal_command(capture: str) -> str:
    """Return the command that begins a new epoch."""
    name = () if capture == UNKNOWN_CAPTURE else ("--name", capture)
    return shlex.join(["pgcdc", "renew", *name])


class PgcdcError(Exception):
    """The base class of the package's errors.

    Attributes:
        exit_status: exit status of `pgcdc` after this error.
        message: format string over the facts.
        facts: the keyword arguments, which are attributes of the error as well.
    """

    exit_status: ClassVar[int] = 1
    message: ClassVar[str] = "{reason}"

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        super().__init__(self.message.format(**facts))

    def in_capture(self, capture: str) -> Self:
        """Return the error with the capture's name in its remedy.

        The code that raises an error about a table does not know the table's capture.
        """
        if self.facts.get("capture") != UNKNOWN_CAPTURE:
            return self
        named = type(self)(**{**self.facts, "capture": capture})
        named.__cause__ = self.__cause__
        return named.with_traceback(self.__traceback__)

    def __getattr__(self, name: str) -> Any:
        facts = cast("dict[str, Any]", self.__dict__.get("facts", {}))
        try:
            return facts[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no fact {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts)


def _rebuild(kind: type[PgcdcError], facts: dict[str, Any]) -> PgcdcError:
    return kind(**facts)


class ConfigurationError(PgcdcError):
    """A setting, a privilege or a server parameter is wrong. A retry fails again."""

    exit_status = 2


class TransientError(PgcdcError):
    """A temporary problem. A retry may succeed."""

    exit_status = 3


class ConnectionLost(TransientError):
    """The connection was lost, or the server did not answer in time."""

    message = (
        "Lost the connection to {server} while {doing}: {reason}. Nothing un-landed was "
        "confirmed; run it again."
    )


class SlotBusy(TransientError):
    """Another process reads the slot, or holds the lease of the slot."""

    message = (
        "Replication slot {slot} is in use by process {active_pid} ({application_name}). Wait "
        "until the process ends, or end it with: select pg_terminate_backend({active_pid})"
    )


class SnapshotEnded(TransientError):
    """The server ended a snapshot, or canceled a statement that read in it."""


class TableChanged(TransientError):
    """A table or its publication was altered between the exported snapshot and the copy."""

    message = (
        "Table {relation} was altered after the snapshot, or its entry in the publication was. "
        "Nothing of this copy was kept; run it again."
    )


class DefiniteError(PgcdcError):
    """Continuing would lose or falsify data: the operator has to act."""

    exit_status = 4


class SnapshotError(DefiniteError):
    """An error that a new snapshot corrects.

    Attributes:
        about: name of the fact with the table's name; None: all tables of the capture.
    """

    about: ClassVar[str | None] = "table"

    def __init__(self, *, capture: str = UNKNOWN_CAPTURE, **facts: Any) -> None:
        tables = () if self.about is None else (facts[self.about],)
        facts["remedy"] = resnapshot_remedy(capture, *tables)
        super().__init__(capture=capture, **facts)


class SlotUnusable(DefiniteError):
    """The slot cannot continue: only a new epoch helps."""

    def __init__(self, *, capture: str = UNKNOWN_CAPTURE, **facts: Any) -> None:
        super().__init__(capture=capture, **{**facts, "renewal": renewal_command(capture)})


class SlotLost(SlotUnusable):
    """The server invalidated the slot.

    Args:
        restart_lsn: the slot's restart_lsn; None if unknown.
        invalidation_reason: column of pg_replication_slots; None: WAL was removed.
        reason: the server's sentence; None: a sentence of the invalidation reason.
    """

    message = (
        "Replication slot {slot} is lost (wal_status {wal_status}): {reason}. Begin a new epoch "
        "with {renewal}, and {prevention} to prevent it."
    )
    causes: ClassVar[dict[str, tuple[str, str]]] = {
        "wal_removed": (
            "the server removed WAL that the slot needs",
            "raise max_slot_wal_keep_size",
        ),
        "rows_removed": (
            "the primary removed catalog rows that decoding on this standby needs",
            "set hot_standby_feedback = on on the standby",
        ),
        "wal_level_insufficient": (
            "wal_level of the primary was lowered",
            "keep wal_level at logical",
        ),
        "idle_timeout": (
            "no capture read the slot for longer than idle_replication_slot_timeout",
            "set idle_replication_slot_timeout to 0",
        ),
    }

    def __init__(
        self,
        *,
        restart_lsn: int | None = None,
        invalidation_reason: str | None = None,
        reason: str | None = None,
        **facts: Any,
    ) -> None:
        cause, prevention = self.causes.get(invalidation_reason or "", self.causes["wal_removed"])
        super().__init__(
            restart_lsn=restart_lsn,
            invalidation_reason=invalidation_reason,
            reason=reason or cause,
            **{"prevention": prevention, **facts},
        )


class SlotMissing(SlotUnusable):
    """The slot of the raw zone does not exist any more. `raw_zone` is the folder of its tables."""

    message = (
        "Replication slot {slot} does not exist, but raw zone {raw_zone} was captured from this "
        "slot through {captured_through}. It was dropped, or the server is a standby that was "
        "promoted without a copy of the slot. No slot has the later changes: begin a new epoch, "
        "with new snapshots of the tables, with {renewal}."
    )


class SlotAdvanced(SlotUnusable):
    """Another program advanced the slot beyond the end of the raw zone, or re-created the slot."""

    message = (
        "Replication slot {slot} is at {confirmed_flush_lsn}, beyond {expected} where the raw "
        "zone ends: another program confirmed the {gap_bytes} bytes of WAL in between, which "
        "cannot be read again. If another lake or program uses the slot, give this capture a slot "
        "of its own (`slot`), then begin a new epoch with {renewal}. Otherwise run {renewal} "
        "--adopt-slot."
    )


class SlotTaken(DefiniteError):
    """Another lake or program has read the slot. `reader` names the lake, if it is known."""

    message = (
        "Replication slot {slot} was read before, through {confirmed_flush_lsn} (restart_lsn "
        "{restart_lsn}), and does not belong to {lake}: {reader} may need the changes of the slot. "
        "If so, set PGCDC_LAKE to that lake, or give this capture a slot of its own (`slot`). If "
        "nothing else uses the slot, adopt the slot with {remedy}."
    )


class WindowUnavailable(SnapshotError):
    """A window was confirmed to Postgres, but its rows are missing from the raw zone.

    `confirmed_flush_lsn` is a lower bound of the slot's position.
    """

    about = None

    message = (
        "Window {window} cannot be captured again: the slot is at {confirmed_flush_lsn} or "
        "beyond, and {reason}. {remedy}"
    )


class RawExpired(DefiniteError):
    """Retention has removed requested windows of the raw zone."""

    message = (
        "{what} needs windows that retention has removed: the oldest LSN that the raw zone retains "
        "is {floor}. {remedy}"
    )

    def __init__(
        self, *, remedy: str | None = None, capture: str = UNKNOWN_CAPTURE, **facts: Any
    ) -> None:
        if remedy in (None, resnapshot_remedy(UNKNOWN_CAPTURE)):
            remedy = resnapshot_remedy(capture)
        super().__init__(remedy=remedy, capture=capture, **facts)


class ReplicaIdentityError(DefiniteError):
    """A table's replica identity does not allow the requested operation."""

    message = "Table {relation} has replica identity {identity}: {reason}. Change it with: {remedy}"


class SchemaChangeError(SnapshotError):
    """A change of a table's columns cannot be replayed from the stream."""

    about = "relation"
    message = "Table {relation}, column {column}: {reason}. {remedy}"


class TableMoved(SnapshotError):
    """A declared table was dropped or unpublished, or another table has its name."""

    about = "relation"
    message = (
        "Table {relation} {reason}, so its SCD tables do not follow the declared name. Restore the "
        "name and its entry in the publication, or declare the other table. {remedy}"
    )


class ProtocolError(DefiniteError):
    """A message does not follow the replication protocol or pgoutput's message formats.

    Args:
        relation: name or OID of the table; None: unknown.
        commit_lsn: LSN of the transaction; None: unknown.
        start: offset of the message in its batch; None: unknown.
        message_type: type of the message.
        offset: offset of the malformed field in the message.
        reason: the problem.
    """

    message = (
        "Malformed replication message of type {message_type} at byte {offset}{place}: {reason}. "
        "Nothing of this window was landed. Check that the slot's plugin is pgoutput and that "
        "nothing alters the connection's bytes."
    )

    def __init__(
        self,
        *,
        relation: str | int | None = None,
        commit_lsn: int | None = None,
        start: int | None = None,
        **facts: Any,
    ) -> None:
        named = [f"table {relation}"] if relation is not None else []
        named += [f"transaction committed at {commit_lsn}"] if commit_lsn is not None else []
        facts["place"] = f" ({', '.join(named)})" if named else ""
        super().__init__(relation=relation, commit_lsn=commit_lsn, start=start, **facts)

    def at(self, start: int) -> ProtocolError:
        """Return the error with the offset of its message in the batch."""
        return ProtocolError(**{**self.facts, "start": start})

    def of(self, relation: str | int | None, commit_lsn: int | None) -> ProtocolError:
        """Return the error with the table and the transaction of its message."""
        return ProtocolError(**{**self.facts, "relation": relation, "commit_lsn": commit_lsn})


class RawZoneError(DefiniteError):
    """The raw zone is inconsistent, or does not match the slot."""

    message = "Raw zone {raw_zone}: {reason}"


class TableDamaged(DefiniteError):
    """An SCD table's log or files are damaged."""

    message = (
        "The Delta table {path} cannot be read: {reason}. Rebuild the table from the raw zone "
        "with: pgcdc rebuild {capture}"
    )

    def __init__(self, *, capture: str = UNKNOWN_CAPTURE, **facts: Any) -> None:
        super().__init__(capture=capture, **facts)


class MergeConflict(DefiniteError):
    """A table cannot be merged as requested."""

    message = "Table {table} cannot be merged: {reason}"


class SnapshotNeeded(SnapshotError, MergeConflict):
    """A table cannot be merged before a new snapshot."""

    message = "Table {table} cannot be merged: {reason}. {remedy}"


class WatermarkGap(SnapshotError):
    """Windows between a table's watermark and a requested window are missing from the raw zone."""

    message = (
        "Table {table} is merged through {expected}, but the raw zone continues at {found}: the "
        "windows in between were removed by retention or never captured. {remedy}"
    )


class CaptureCancelled(PgcdcError):
    """The caller of a capture cancelled the capture by its token."""

    exit_status = 130
    message = "The capture was cancelled. Nothing un-landed was confirmed; the next run continues."


class DifferenceFound(PgcdcError):
    """Source and target hold different contents."""


def error_named(name: str) -> type[PgcdcError] | None:
    """Return the error class with this name, or None."""
    found = [PgcdcError]
    for kind in found:
        if kind.__name__ == name:
            return kind
        found += kind.__subclasses__()
    return None
