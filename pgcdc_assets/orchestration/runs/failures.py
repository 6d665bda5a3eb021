"""Conversion of the package's errors to Dagster's: a retry, or a failure with a sentence.

A transient error is retried a few times inside the run. Any other error fails the step at once. The
original error remains in the chain of causes, so that its class can be read from the run's events.

Dagster records the texts of the whole chain in the events of a run. The text of another library's
error may quote values of rows, so a `LibraryError` replaces the error: it has the stack only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import dagster as dg

from pgcdc_assets import errors
from pgcdc_assets.orchestration.runs.sync_progress import sync_progress

MAX_RETRIES = 2
SECONDS_BETWEEN = 2.0

# The metadata entry of a failure that lists its tables.
FAILED_TABLES = "tables"
_EXPLAINED = 10


class LibraryError(Exception):
    """An error of another library, or a defect, without its text, which may quote values of rows.

    The error has the traceback of the original error.
    """

    @classmethod
    def of(cls, error: BaseException) -> LibraryError:
        """Return the error with the class of the original error, and with its condition."""
        from pgcdc_assets.spark.errors import condition_of

        name = type(error).__name__
        detail = error.strerror if isinstance(error, OSError) and error.errno else None
        if detail is None and isinstance(error, Exception):
            # Spark's condition is unknown if the JVM has ended.
            with suppress(Exception):
                detail = condition_of(error)
        known = f"{name} ({detail})" if detail not in (None, name) else name
        text = f"{known}. Its text may quote values of rows, so the text is not recorded"
        return cls(text).with_traceback(error.__traceback__)


_SAFE = (errors.PgcdcError, LibraryError)


@contextmanager
def dagster_failures(capture: str) -> Iterator[None]:
    """Convert errors of this package to errors of Dagster inside the block.

    Args:
        capture: the capture's name, which remedies show.

    Raises:
        RetryRequested: for a transient error.
        Failure: for any other error of this package, without retries.
        LibraryError: for an error of another library, or a defect.
    """
    try:
        yield
    except (dg.Failure, dg.RetryRequested, dg.DagsterError):
        raise
    except errors.TransientError as error:
        raise dg.RetryRequested(MAX_RETRIES, SECONDS_BETWEEN) from without_values(error)
    except errors.PgcdcError as error:
        named = error.in_capture(capture)
        raise build_failure(named) from without_values(named)
    except Exception as error:
        shown = without_values(error)
        raise shown from shown.__cause__


@contextmanager
def tick_failures(capture: str) -> Iterator[None]:
    """Record the error of a sensor's evaluation without texts of other libraries.

    A sensor is evaluated again, so an error of this package keeps its class.

    Args:
        capture: the capture's name, which remedies show.

    Raises:
        PgcdcError: the error of the block.
        LibraryError: for an error of another library, or a defect.
    """
    try:
        yield
    except dg.DagsterError:
        raise
    except Exception as error:
        if sync_progress.get() is not None:
            # A command evaluates the sensor without a record.
            raise
        named = error.in_capture(capture) if isinstance(error, errors.PgcdcError) else error
        shown = without_values(named)
        raise shown from shown.__cause__


def without_values(error: Exception) -> BaseException:
    """Return the error with a chain of causes without texts of other libraries.

    An error of this package is the same object with a new cause. Any other error is replaced.
    """
    chain: list[BaseException] = [error]
    while (cause := _cause_of(chain[-1])) is not None and cause not in chain:
        chain.append(cause)
    shown = [each if isinstance(each, _SAFE) else LibraryError.of(each) for each in chain]
    for each, cause in zip(shown, [*shown[1:], None], strict=True):
        # The assignment also hides the context.
        each.__cause__ = cause
    return shown[0]


def _cause_of(error: BaseException) -> BaseException | None:
    """Return the error that a traceback shows above an error."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def build_failure(error: errors.PgcdcError) -> dg.Failure:
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
        (table, error.in_capture(capture, table) if isinstance(error, errors.PgcdcError) else error)
        for table, error in failures
    ]
    lasting = [error for _, error in failures if not isinstance(error, errors.TransientError)]
    if not lasting:
        raise dg.RetryRequested(MAX_RETRIES, SECONDS_BETWEEN) from without_values(failures[0][1])
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
    ) from without_values(first)


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
