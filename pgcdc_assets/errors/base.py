"""The base of the errors, one class for each action that an error requires, and general errors."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, dataclass_transform

from pgcdc_assets.error_text import FULL_DISK

UNKNOWN_CAPTURE = "NAME"


def resnapshot_command(capture: str, *tables: str) -> str:
    """Return the command that takes new snapshots of some tables, or of all tables by default."""
    return shlex.join(["pgcdc", "resnapshot", capture, *tables])


def resnapshot_remedy(capture: str, *tables: str) -> str:
    """Return the remedy "take a new snapshot" for some tables, or for all tables by default."""
    return f"Take a new snapshot with: {resnapshot_command(capture, *tables)}"


def renewal_command(capture: str) -> str:
    """Return the command that begins a new epoch."""
    return shlex.join(["pgcdc", "renew", "--name", capture])


def rebuild_command(capture: str, *tables: str, through: str | None = None) -> str:
    """Return the command that builds some tables, or all tables by default.

    Args:
        through: the LSN at which the tables end; None: all landed changes.
    """
    end = [] if through is None else ["--through", through]
    return shlex.join(["pgcdc", "rebuild", capture, *tables, *end])


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
@dataclass(kw_only=True, eq=False, repr=False)
class PgcdcError(Exception):
    """The base of the package's errors. Each subclass becomes a dataclass.

    Attributes:
        exit_status: exit status of `pgcdc` after this error.
        message: format string over the attributes of the error.
        reason: what is wrong, and the remedy; empty if the message of the class says it.
    """

    exit_status: ClassVar[int] = 1
    message: ClassVar[str] = "{reason}"

    reason: str = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(kw_only=True, eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        super().__init__(self.message.format_map(_Attributes(self)))

    @property
    def facts(self) -> Mapping[str, Any]:
        """The arguments of the constructor, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def in_capture(self, capture: str, table: str = "") -> Self:
        """Return the error with the names of the capture and of the table in its remedy.

        The code that raises an error about a table does not know the table's capture. It may know
        the path of the table only, or the name that the source has given to the table.
        """
        facts = self.facts
        unknown = {"capture": UNKNOWN_CAPTURE, "table": "", "declared": ""}
        names = {"capture": capture, "table": table, "declared": table}
        found = {name: names[name] for name in names if facts.get(name) == unknown[name]}
        if not found:
            return self
        named = type(self)(**{**facts, **found})
        named.__cause__ = self.__cause__
        return named.with_traceback(self.__traceback__)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts)


class _Attributes(dict[str, Any]):
    """The attributes of an error, for a format string."""

    def __init__(self, error: PgcdcError) -> None:
        self._error = error

    def __missing__(self, name: str) -> Any:
        return getattr(self._error, name)


def _rebuild(kind: type[PgcdcError], facts: Mapping[str, Any]) -> PgcdcError:
    return kind(**facts)


class ConfigurationError(PgcdcError):
    """A setting, a privilege or a server parameter is wrong. A retry fails again.

    Attributes:
        setting: name of the setting; empty: unknown.
    """

    exit_status = 2

    setting: str = ""


class TransientError(PgcdcError):
    """A temporary problem. A retry may succeed."""

    exit_status = 3


def local_write_error(
    path: object, error: OSError, remedy: str
) -> ConfigurationError | TransientError:
    """Return the error of a local file or folder that cannot be written.

    Args:
        path: the file or the folder.
        remedy: what to do unless the disk is full.
    """
    reason = f"{path} cannot be written ({error.strerror or error})"
    if error.errno in FULL_DISK:
        return TransientError(reason=f"{reason}. Free space on its disk, then run it again.")
    return ConfigurationError(reason=f"{reason}: {remedy}")


class ConnectionLost(TransientError):
    """The connection was lost, or the server did not answer in time."""

    message = (
        "Lost the connection to {server} while {doing}: {reason}. No change is lost; run it again."
    )

    server: str
    doing: str


class DefiniteError(PgcdcError):
    """Continuing would lose or falsify data: the operator has to act."""

    exit_status = 4


@dataclass(kw_only=True, eq=False, repr=False)
class EndsWithCommand:
    """The part of an error whose sentence ends with a command for its table.

    Attributes:
        about: name of the attribute with the table's name; None: all tables of the capture.
        before_command: the words between the sentence and the command.
        declared: the table's name in the settings; empty: the same name.
        command: returns the command of a capture and tables; None: no command follows.
    """

    about: ClassVar[str | None] = "table"
    before_command: ClassVar[str] = ": "

    capture: str = UNKNOWN_CAPTURE
    declared: str = ""
    command: Callable[..., str] | None = None

    @property
    def then(self) -> str:
        """The end of the sentence, with the command."""
        if self.command is None:
            return ""
        tables = () if self.about is None else (self.declared or getattr(self, self.about),)
        return f"{self.before_command}{self.command(self.capture, *tables)}"


class SnapshotError(DefiniteError, EndsWithCommand):
    """An error that a new snapshot corrects."""

    command: Callable[..., str] | None = resnapshot_command

    @property
    def remedy(self) -> str:
        """The command that takes the snapshot."""
        return f"Take a new snapshot with{self.then}"


class ProtocolError(DefiniteError):
    """A message does not follow the replication protocol or pgoutput's message formats.

    Attributes:
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

    message_type: str
    offset: int
    relation: str | int | None = None
    commit_lsn: int | None = None
    start: int | None = None

    @property
    def place(self) -> str:
        """The table and the transaction, as far as they are known, in brackets."""
        named = [f"table {self.relation}"] if self.relation is not None else []
        if self.commit_lsn is not None:
            named.append(f"transaction committed at {self.commit_lsn}")
        return f" ({', '.join(named)})" if named else ""

    def at(self, start: int) -> ProtocolError:
        """Return the error with the offset of its message in the batch."""
        return replace(self, start=start)

    def of(self, relation: str | int | None, commit_lsn: int | None) -> ProtocolError:
        """Return the error with the table and the transaction of its message."""
        return replace(self, relation=relation, commit_lsn=commit_lsn)


class CaptureCancelled(PgcdcError):
    """The caller of a capture cancelled the capture by its token."""

    exit_status = 130
    message = "The capture was cancelled. No change is lost; the next run continues."


class DifferenceFound(PgcdcError):
    """Source and target hold different contents."""


class FailedRun(PgcdcError):
    """The error of a Dagster run: its sentence and its exit status.

    Attributes:
        relation: the table of the error; empty: unknown, or several.
        run_id: the run.
        kind: name of the class of the error in the run.
    """

    relation: str = ""
    run_id: str = ""
    kind: str = ""

    @classmethod
    def of(cls, kind: type[PgcdcError], sentence: str, run_id: str) -> PgcdcError:
        """Build the error of one run."""
        error = cls(reason=sentence, run_id=run_id, kind=kind.__name__)
        error.__dict__["exit_status"] = kind.exit_status
        return error

    @classmethod
    def like(cls, other: PgcdcError, sentence: str) -> PgcdcError:
        """Return an error with the table, the run and the exit status of another error."""
        relation = str(other.facts.get("relation") or "")
        error = cls(reason=sentence, relation=relation)
        if isinstance(other, FailedRun):
            error.run_id, error.kind = other.run_id, other.kind
        error.__dict__["exit_status"] = other.exit_status
        return error
