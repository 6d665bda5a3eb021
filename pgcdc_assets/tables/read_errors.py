"""Errors of reading an SCD table's log or files, with the name of the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import TableDamaged
from pgcdc_assets.raw.store_errors import explain_store_error


@contextmanager
def explain_read_errors(path: str) -> Iterator[None]:
    """Turn errors of reading a table's log or files into an error that names the table.

    Raises:
        TableDamaged: a file is missing, truncated or malformed.
        ConfigurationError: the object store refused access.
        TransientError: the object store did not answer.
    """
    try:
        yield
    except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
        refused = explain_store_error(path, error)
        if refused is not None:
            raise refused from error
        # The text of the library's error may quote statistics, which are values of rows.
        missing = isinstance(error, FileNotFoundError) or "not found" in str(error).lower()
        reason = "a file is missing" if missing else "its log is damaged"
        raise TableDamaged(path=path, reason=f"{reason} ({type(error).__name__})") from error
