"""What can go wrong, sorted by what the reader has to do about it.

    PgcdcError
    ├── ConfigurationError      fix the settings: no retry              exit status 2
    ├── TransientError          try again                               exit status 3
    │   ├── ConnectionLost
    │   ├── SlotBusy
    │   └── TableChanged
    ├── DefiniteError           a person must act: no retry             exit status 4
    │   ├── SlotLost
    │   ├── SlotMissing
    │   ├── SlotAdvanced
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
    └── DifferenceFound         a comparison found differing contents   exit status 1

Each error carries its facts as attributes and writes its own message: one sentence that names the
thing and the remedy, never a row value and never a secret. All can be pickled, because Dagster's
multiprocess executor sends them between processes.
"""

from __future__ import annotations

import shlex
from typing import Any, ClassVar, Self, cast

UNKNOWN_CAPTURE = "NAME"


def resnapshot_remedy(capture: str, *tables: str) -> str:
    """Write the remedy of every error that new snapshots of tables end; of all if none is named."""
    return f"Take a new snapshot with: {shlex.join(['pgcdc', 'resnapshot', capture, *tables])}"


class PgcdcError(Exception):
    """The root of every error this package raises on purpose.

    Facts are keyword arguments; `message` is a format string over them.
    """

    exit_status: ClassVar[int] = 1
    message: ClassVar[str] = "{reason}"

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        super().__init__(self.message.format(**facts))

    def in_capture(self, capture: str) -> Self:
        """Return the error with the capture's name in its remedy.

        What is raised about a table does not know which capture the table belongs to.
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
    """A setting, a privilege or a server parameter is wrong; trying again cannot help."""

    exit_status = 2


class TransientError(PgcdcError):
    """The same call may succeed later."""

    exit_status = 3


class ConnectionLost(TransientError):
    """The server went away, or did not answer in time."""

    message = (
        "Lost the connection to {server} while {doing}: {reason}. Nothing un-landed was "
        "confirmed; run it again."
    )


class SlotBusy(TransientError):
    """Another process reads the slot, or holds its lease."""

    message = (
        "Replication slot {slot} is in use by process {active_pid} ({application_name}). Wait "
        "until it ends, or stop it with: select pg_terminate_backend({active_pid})"
    )


class TableChanged(TransientError):
    """A table was altered between the snapshot and its copy; a new snapshot sees it whole."""

    message = (
        "Table {relation} was altered, or its place in the publication, after the snapshot of its "
        "copy was taken; nothing of this copy is kept. Copy it again."
    )


class DefiniteError(PgcdcError):
    """Going on would lose or falsify data; a person has to decide."""

    exit_status = 4


class SnapshotError(DefiniteError):
    """An error that a new snapshot ends.

    Attributes:
        about: the fact that names the table; None for all tables of the capture.
    """

    about: ClassVar[str | None] = "table"

    def __init__(self, *, capture: str = UNKNOWN_CAPTURE, **facts: Any) -> None:
        tables = () if self.about is None else (facts[self.about],)
        facts["remedy"] = resnapshot_remedy(capture, *tables)
        super().__init__(capture=capture, **facts)


class SlotLost(DefiniteError):
    """The server invalidated the slot.

    `restart_lsn` is None where the server does not tell it; `reason` is the server's own sentence,
    where it gave one.

    Args:
        invalidation_reason: as in pg_replication_slots; None: WAL was removed.
    """

    message = (
        "Replication slot {slot} is lost (wal_status {wal_status}): {reason}. Begin a new epoch "
        "with pgcdc renew, and {prevention} to prevent it."
    )
    causes: ClassVar[dict[str, tuple[str, str]]] = {
        "wal_removed": (
            "the server removed WAL that it needed",
            "raise max_slot_wal_keep_size",
        ),
        "rows_removed": (
            "the primary removed rows of its catalogs that decoding on this standby needed",
            "set hot_standby_feedback = on here",
        ),
        "wal_level_insufficient": (
            "wal_level of the primary was lowered",
            "keep it at logical",
        ),
        "idle_timeout": (
            "no capture read it for longer than idle_replication_slot_timeout",
            "set that to 0",
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


class SlotMissing(DefiniteError):
    """The slot that the raw zone was filled from does not exist any more.

    `raw_zone` is the folder of all its tables.
    """

    message = (
        "Replication slot {slot} does not exist, but raw zone {raw_zone} was captured from it "
        "through {captured_through}. Changes since then are gone from this stream: begin a new "
        "epoch, with new copies of the tables, by pgcdc renew."
    )


class SlotAdvanced(DefiniteError):
    """Somebody else moved the slot beyond what was landed, or re-created it."""

    message = (
        "Replication slot {slot} stands at {confirmed_flush_lsn}, beyond {expected} where the raw "
        "zone ends: the {gap_bytes} bytes of WAL between were confirmed by somebody else and "
        "cannot be read again. If another lake or program uses the slot, give this capture a slot "
        "of its own (`slot`), then begin a new epoch with pgcdc renew; if none does, pgcdc renew "
        "--adopt-slot."
    )


class SlotTaken(DefiniteError):
    """Something that the lake does not know has read the slot."""

    message = (
        "Replication slot {slot} was read before, through {confirmed_flush_lsn} (restart_lsn "
        "{restart_lsn}), and not into {lake}: another lake or program may need what it holds. If "
        "so, set PGCDC_LAKE to that lake, or give this capture a slot of its own (`slot`). If "
        "nothing else uses the slot, take it over with {remedy}."
    )


class WindowUnavailable(SnapshotError):
    """The window was confirmed to Postgres, and its rows are not in the raw zone any more.

    `confirmed_flush_lsn` is the least that the slot was told.
    """

    about = None

    message = (
        "Window {window} cannot be captured again: the slot stands at {confirmed_flush_lsn} or "
        "beyond and {reason}. {remedy}"
    )


class RawExpired(DefiniteError):
    """Retention removed windows of the raw zone that are asked for."""

    message = (
        "{what} needs windows that retention has removed: the raw zone keeps what was committed "
        "from {floor} on. {remedy}"
    )

    def __init__(
        self,
        *,
        remedy: str | None = None,
        capture: str = UNKNOWN_CAPTURE,
        **facts: Any,
    ) -> None:
        if remedy in (None, resnapshot_remedy(UNKNOWN_CAPTURE)):
            remedy = resnapshot_remedy(capture)
        super().__init__(remedy=remedy, capture=capture, **facts)


class ReplicaIdentityError(DefiniteError):
    """A table's replica identity does not allow what is asked of it."""

    message = "Table {relation} has replica identity {identity}: {reason}. Mend it with: {remedy}"


class SchemaChangeError(SnapshotError):
    """A change of a table's columns that cannot be replayed from the stream."""

    about = "relation"
    message = "Table {relation}, column {column}: {reason}. {remedy}"


class TableMoved(DefiniteError):
    """A declared table is not what it was captured from: renamed, moved, dropped, unpublished."""

    message = (
        "Table {relation} {reason}, so its changes do not arrive under its name. Give it back its "
        "name and its place in the publication, or declare the new one, and take a new snapshot."
    )


class ProtocolError(DefiniteError):
    """The bytes do not follow the replication protocol or pgoutput's message formats."""

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
        """Return the same error, with where in the batch its message begins."""
        return ProtocolError(**{**self.facts, "start": start})

    def of(self, relation: str | int | None, commit_lsn: int | None) -> ProtocolError:
        """Return the same error, with the table and the transaction that it is about."""
        return ProtocolError(**{**self.facts, "relation": relation, "commit_lsn": commit_lsn})


class RawZoneError(DefiniteError):
    """The raw zone disagrees with itself or with the slot."""

    message = "Raw zone {raw_zone}: {reason}"


class TableDamaged(DefiniteError):
    """An SCD table's files do not fit together any more."""

    message = (
        "The Delta table {path} cannot be read: {reason}. Build it again from the raw zone with: "
        "pgcdc rebuild {capture}"
    )

    def __init__(self, *, capture: str = UNKNOWN_CAPTURE, **facts: Any) -> None:
        super().__init__(capture=capture, **facts)


class MergeConflict(DefiniteError):
    """A table cannot be merged as asked."""

    message = "Table {table} cannot be merged: {reason}"


class SnapshotNeeded(SnapshotError, MergeConflict):
    """A table cannot be merged before a new snapshot of it is taken."""

    message = "Table {table} cannot be merged: {reason}. {remedy}"


class WatermarkGap(SnapshotError):
    """Windows between a table's watermark and the asked one are missing from the raw zone."""

    message = (
        "Table {table} is merged through {expected}, but the raw zone goes on at {found}: the "
        "windows between are missing, removed by retention or never captured. {remedy}"
    )


class DifferenceFound(PgcdcError):
    """Source and target hold different contents."""

    exit_status = 1


def error_named(name: str) -> type[PgcdcError] | None:
    """Find one of these classes, or one derived from them, by its name."""
    found = [PgcdcError]
    for kind in found:
        if kind.__name__ == name:
            return kind
        found += kind.__subclasses__()
    return None
