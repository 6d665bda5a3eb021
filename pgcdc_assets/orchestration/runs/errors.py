"""The errors of a one-shot run, built from the errors of its Dagster runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import dagster as dg
from dagster import DagsterEventType
from dagster_shared.error import SerializableErrorInfo

from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    FailedRun,
    PgcdcError,
    TransientError,
    error_named,
)

# Errors that need a decision come first, and errors that a retry may resolve come last.
_WORST_FIRST = [
    kind.exit_status for kind in (DefiniteError, ConfigurationError, PgcdcError, TransientError)
]


def name_tables(what: str, tables: Collection[str], error: PgcdcError) -> PgcdcError:
    """Return an error that names the tables of a run. Only transient errors lack the names."""
    if error.exit_status != TransientError.exit_status:
        return error
    return FailedRun.like(error, f"{what}: {', '.join(sorted(tables))}. {error}")


def join_errors(errors: Sequence[PgcdcError]) -> PgcdcError:
    """Combine errors: the result has the class of the worst error and the sentences of all."""
    worst, *others = sorted(errors, key=lambda error: _WORST_FIRST.index(error.exit_status))
    if not others:
        return worst
    sentences = [str(error).removesuffix(".") for error in (worst, *others)]
    return FailedRun.like(worst, ". ".join(sentences) + ".")


def sentence_in(message: str) -> str:
    """Return an error's text without the class that a traceback prints before it."""
    return message.partition(": ")[2].strip() or message.strip()


def error_of_run(result: dg.ExecuteInProcessResult) -> PgcdcError:
    """Rebuild the error that ended a run, from its event.

    The error of a step is in the event of the step. An error before a step, such as the end of its
    wait for a pool, is in the event of the run.
    """
    for event in result.all_events:
        if event.event_type != DagsterEventType.STEP_FAILURE:
            continue
        data = event.step_failure_data
        if data.error is None:
            continue
        if data.error.cls_name == "DagsterExecutionInterruptedError":
            raise KeyboardInterrupt
        # This package's Failure names the tables; the cause of the failure does not.
        said = data.user_failure_data.description if data.user_failure_data else None
        return _error_in(data.error, said, result.run_id)
    for event in result.all_events:
        if event.is_job_failure and event.job_failure_data.error is not None:
            return _error_in(event.job_failure_data.error, None, result.run_id)
    return PgcdcError(reason=f"Run {result.run_id} failed without an error")


def _error_in(error: SerializableErrorInfo, said: str | None, run_id: str) -> PgcdcError:
    """Rebuild the first error of this package in a chain of causes.

    Args:
        said: the sentence of the error, if its message is not the one to show.
    """
    chain = [error]
    while (cause := chain[-1].cause) is not None:
        chain.append(cause)
    for each in chain:
        kind = error_named(each.cls_name or "")
        if kind is not None:
            return FailedRun.of(kind, said or sentence_in(each.message), run_id)
    return PgcdcError(
        reason=f"Run {run_id} failed with an unexpected error: {chain[-1].message.strip()}"
    )
