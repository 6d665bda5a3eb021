"""Errors of reading an SCD table's log or files, with the name of the table."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import ConfigurationError, TableDamaged, TransientError
from pgcdc_assets.raw.delta.refused_commits import is_unsupported
from pgcdc_assets.raw.store_errors import explain_store_error

# A table is not damaged by them. A rebuild would replace its log.
_PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)

# The table is as it was, but this user may not read it, as after a restore by another user.
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})


@contextmanager
def explain_read_errors(path: str) -> Iterator[None]:
    """Turn errors of reading a table's log or files into an error that names the table.

    Raises:
        TableDamaged: a file is missing, truncated or malformed.
        ConfigurationError: the object store or the operating system refused access, or delta-rs
            cannot read a feature of the table.
        TransientError: the object store did not answer, or the operating system lacks something.
    """
    try:
        yield
    except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
        refused = explain_store_error(path, error)
        if refused is not None:
            raise refused from error
        if (number := _error_number(error)) in _PASSING:
            raise TransientError(
                reason=f"The Delta table {path} could not be read: {os.strerror(number)}. "
                "Run it again."
            ) from error
        if number in _FORBIDDEN:
            raise ConfigurationError(
                reason=f"The Delta table {path} cannot be read: {os.strerror(number)}. Give this "
                "user access to all its files and folders, and run it again"
            ) from error
        if is_unsupported(error):
            features = re.search(r"\[[\w, ]+\]", str(error))
            raise ConfigurationError(
                reason=f"The Delta table {path} has features that merges cannot read: "
                f"{features[0] if features else type(error).__name__}. Remove them in Spark (ALTER "
                "TABLE ... DROP FEATURE), or move the table to another folder; the next merge "
                "creates it again"
            ) from error
        # The text of the library's error may quote statistics, which are values of rows.
        missing = isinstance(error, FileNotFoundError) or "not found" in str(error).lower()
        reason = "a file is missing" if missing else "its log is damaged"
        raise TableDamaged(path=path, reason=f"{reason} ({type(error).__name__})") from error


def _error_number(error: Exception) -> int:
    """Return the operating system's number of an error, which delta-rs has in its text; else 0."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is not None:
        return int(found[1])
    return (error.errno or 0) if isinstance(error, OSError) else 0
