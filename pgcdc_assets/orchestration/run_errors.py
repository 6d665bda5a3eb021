"""The errors that a one-shot run makes of those of its runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    PgcdcError,
    TransientError,
)

# What asks most of its reader comes first: against the last kind another try is all it takes.
_WORST_FIRST = [
    kind.exit_status for kind in (DefiniteError, ConfigurationError, PgcdcError, TransientError)
]


class FailedRun(PgcdcError):
    """An error read back from a run's events: its sentence and its kind's exit status."""

    @classmethod
    def of(cls, kind: type[PgcdcError], sentence: str, run_id: str) -> PgcdcError:
        """Make the error of one run."""
        error = cls(reason=sentence, run_id=run_id, kind=kind.__name__)
        error.__dict__["exit_status"] = kind.exit_status
        return error

    @classmethod
    def like(cls, other: PgcdcError, sentence: str) -> PgcdcError:
        """Say something else with another error's facts and exit status."""
        error = cls(**{**other.facts, "reason": sentence})
        error.__dict__["exit_status"] = other.exit_status
        return error


def naming(what: str, tables: Collection[str], error: PgcdcError) -> PgcdcError:
    """Name the tables that a run's error is about; a transient one tells of the first alone."""
    if error.exit_status != TransientError.exit_status:
        return error
    return FailedRun.like(error, f"{what}: {', '.join(sorted(tables))}. {error}")


def joined(errors: Sequence[PgcdcError]) -> PgcdcError:
    """Make one error of several: of the worst one's kind, with the sentences of all."""
    worst, *others = sorted(errors, key=lambda error: _WORST_FIRST.index(error.exit_status))
    if not others:
        return worst
    sentences = [str(error).removesuffix(".") for error in (worst, *others)]
    return FailedRun.like(worst, ". ".join(sentences) + ".")


def sentence_in(message: str) -> str:
    """Take the class off an error's text as a traceback ends with it."""
    return message.partition(": ")[2].strip() or message.strip()
