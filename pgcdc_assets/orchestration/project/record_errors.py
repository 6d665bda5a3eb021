"""Errors of the storage of Dagster's records, as errors with a remedy.

Commands read and write the records of an instance, in SQLite or in a Postgres of its own. Errors of
the source are errors of this package already.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import (
    DatabaseError,
    InterfaceError,
    NoSuchTableError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pgcdc_assets.errors import ConfigurationError, PgcdcError, TransientError

# The SQLSTATEs of a column and of a table that do not exist, and SQLite's texts of them.
_MISSING_STATES = ("42703", "42P01")
_MISSING_TEXTS = ("no such column", "no such table", "has no column named")


@contextmanager
def explained_record_errors(home: Path) -> Iterator[None]:
    """Convert errors of the storage of an instance inside the block.

    Args:
        home: the folder of the instance.

    Raises:
        TransientError: the storage is not available now.
        ConfigurationError: the records are those of another release of Dagster, or damaged.
    """
    try:
        yield
    except PgcdcError:
        raise
    except Exception as error:
        found = _find_cause(error)
        explained = None if found is None else _explain(found, home)
        if explained is None:
            raise
        # The cause may quote what the text above leaves out. Dagster logs it.
        raise explained from None


def _find_cause(error: BaseException | None) -> SQLAlchemyError | None:
    """Return the error of the database in a chain of causes, which begins with one of Dagster."""
    while error is not None and not isinstance(error, SQLAlchemyError):
        error = error.__cause__
    return error


def _explain(error: SQLAlchemyError, home: Path) -> PgcdcError | None:
    original = getattr(error, "orig", None)
    # The texts of other databases may quote values of records, or parts of an address.
    text = str(original) if isinstance(original, sqlite3.Error) else type(error).__name__
    records = f"The records of the Dagster instance {home}"
    is_missing = (
        isinstance(error, NoSuchTableError)
        or getattr(original, "pgcode", None) in _MISSING_STATES
        or any(each in text for each in _MISSING_TEXTS)
    )
    if is_missing:
        return ConfigurationError(
            reason=f"{records} are those of another release of Dagster: stop Dagster, and run "
            "`dagster instance migrate`"
        )
    if isinstance(error, OperationalError | InterfaceError | PoolTimeout):
        return TransientError(
            reason=f"{records} are not available ({text}). Check the database or the disk of "
            "`storage` in its dagster.yaml, then run the command again."
        )
    if type(error) is DatabaseError:
        return ConfigurationError(
            reason=f"{records} cannot be read ({text}): restore them, or set DAGSTER_HOME to a new "
            "folder, which gets the newest windows of the lake"
        )
    return None
