"""Errors of reading an SCD1 table during a comparison, as errors of that table alone.

The text of a library's error may quote values of rows, so the errors here have its condition only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    PgcdcError,
    TableDamaged,
    TransientError,
    rebuild_command,
)
from pgcdc_assets.raw.store_errors import explain_store_error
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import open_table, table_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's conditions, and names of Java's classes, of errors about a file.
_FILE_ERRORS = ("FAILED_READ_FILE", "FileNotFoundException", "DELTA_FILE_NOT_FOUND")


@contextmanager
def comparison_session(spark: SparkSession) -> Iterator[SparkSession]:
    """Open a session for comparisons inside the block.

    Raises:
        TransientError: Spark has ended.
    """
    from pgcdc_assets.spark.errors import condition_of
    from pgcdc_assets.spark.session import own_session, release_session

    try:
        session = own_session(spark)
    except PgcdcError:
        raise
    except Exception as error:
        raise TransientError(
            reason=f"No table was compared: Spark has ended ({condition_of(error)}). Run it again."
        ) from error
    try:
        yield session
    finally:
        release_session(session)


@dataclass(frozen=True)
class TableReading:
    """The reading of one table's SCD1, also from a staged copy that shares its files."""

    zone: RawZone
    table: CdcTable

    @property
    def path(self) -> str:
        """The folder of the live table."""
        return table_path(self.zone.lake, self.zone.name, *self.table.name, 1)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise the errors of Spark and delta-rs as errors that name the table.

        Raises:
            TableDamaged: a file of the table is missing or damaged.
            ConfigurationError: the object store refused access.
            DefiniteError: a repetition would raise the same error.
            TransientError: any other error.
        """
        try:
            yield
        except PgcdcError:
            raise
        except Exception as error:
            raise self.explain(error) from error

    def explain(self, error: Exception) -> PgcdcError:
        """Return the error of this table for an error of a library."""
        from pgcdc_assets.spark.errors import (
            MEMORY_REMEDY,
            OUT_OF_MEMORY,
            condition_of,
            describe_failure,
            full_disk_of,
            is_definite,
            text_of,
        )

        text, condition = text_of(error) or "", condition_of(error)
        refused = explain_store_error(self.path, error) if text else None
        if isinstance(refused, ConfigurationError):
            return refused
        what = f"Table {self.table.qualified_name} was not compared"
        if OUT_OF_MEMORY in text:
            return ConfigurationError(
                reason=f"{what}, because Spark's memory was used up. {MEMORY_REMEDY}."
            )
        if full_disk_of(error) is not None:
            return TransientError(reason=f"{what}: {describe_failure(error)}. Run it again.")
        if any(known in text for known in _FILE_ERRORS):
            if self._has_file_in(text):
                reason = f"a file is missing or damaged ({condition})"
                return TableDamaged(
                    path=self.path,
                    reason=reason,
                    capture=self.zone.name,
                    table=self.table.qualified_name,
                )
            return TransientError(
                reason=f"{what}: a file of the compared version was deleted, because a merge has "
                "replaced it. Run it again. If comparisons take longer than "
                "retention.old_version_hours, raise this setting."
            )
        if is_definite(error):
            return DefiniteError(
                reason=f"{what}: Spark reported {condition}, which a repetition would raise again. "
                f"If the Delta table {self.path} was altered by hand, undo the alteration; "
                f"otherwise: {rebuild_command(self.zone.name, self.table.qualified_name)}"
            )
        return TransientError(
            reason=f"{what}: the reading of {self.path} ended with {condition}. Run it again."
        )

    def _has_file_in(self, text: str) -> bool:
        """Return whether the text names a file of the newest version."""
        try:
            table: DeltaTable | None = open_table(self.zone.lake, self.path)
            files = [] if table is None else table.file_uris()
        except (PgcdcError, DeltaError, OSError):
            return False
        return any(PurePosixPath(file).name in text for file in files)
