"""Conversion of the package's errors to Dagster's: a retry, or a failure with a sentence.

A transient error is retried a few times inside the run. Any other error fails the step at once. The
original error remains in the chain of causes, so that its class can be read from the run's events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import dagster as dg

from pgcdc_assets import errors

MAX_RETRIES = 2
SECONDS_BETWEEN = 2.0

# The metadata entry of a failure that lists its tables.
FAILED_TABLES = "tables"
_EXPLAINED = 10


@contextmanager
def dagster_failures(capture: str) -> Iterator[None]:
    """Convert errors of this package to errors of Dagster inside the block.

    Args:
        capture: the capture's name, which remedies show.

    Raises:
        RetryRequested: for a transient error.
        Failure: for any other error, without retries.
    """
    try:
        yield
    except errors.TransientError as error:
        raise dg.RetryRequested(MAX_RETRIES, SECONDS_BETWEEN) from error
    except errors.PgcdcError as error:
        named = error.in_capture(capture)
        raise failure_of(named) from named


def failure_of(error: errors.PgcdcError) -> dg.Failure:
    """Return the failure of an error that retries cannot resolve."""
    metadata = {"error": type(error).__name__}
    return dg.Failure(str(error), metadata=metadata, allow_retries=False)


def raise_failed(what: str, failures: Sequence[tuple[str, Exception]], capture: str) -> NoReturn:
    """End a step in which some tables failed, and name these tables.

    Args:
        capture: the capture's name, which remedies show.

    Raises:
        RetryRequested: all errors are transient.
        Failure: an error is not transient.
    """
    failures = [
        (table, error.in_capture(capture) if isinstance(error, errors.PgcdcError) else error)
        for table, error in failures
    ]
    lasting = [error for _, error in failures if not isinstance(error, errors.TransientError)]
    if not lasting:
        raise dg.RetryRequested(MAX_RETRIES, SECONDS_BETWEEN) from failures[0][1]
    first = lasting[0]
    records = [
        dg.TableRecord(
            {"table": table, "error": type(error).__name__, "reason": sentence_of(error)}
        )
        for table, error in failures
    ]
    raise dg.Failure(
        f"{what}: {', '.join(dict.fromkeys(table for table, _ in failures))}. "
        f"{_explained(lasting)}",
        metadata={
            "error": type(first).__name__,
            FAILED_TABLES: dg.MetadataValue.table(records),
        },
        allow_retries=False,
    ) from first


def _explained(failures: Sequence[Exception]) -> str:
    """Join the sentences of several tables' errors, up to a limit."""
    sentences = list(dict.fromkeys(map(sentence_of, failures)))
    left_out = len(sentences) - _EXPLAINED
    if left_out > 0:
        sentences[_EXPLAINED:] = [f"And {left_out} more: see pgcdc status"]
    # Keep the end of the last sentence, because a dot may not follow a command.
    return ". ".join([*(sentence.rstrip(".") for sentence in sentences[:-1]), *sentences[-1:]])


def sentence_of(error: Exception) -> str:
    """Return an error's sentence, or the class of an error that may quote values of rows."""
    return str(error) if isinstance(error, errors.PgcdcError) else f"{type(error).__name__}"
