"""Conversion of Spark's errors to errors that name the table and the remedy.

The text of a Spark error may quote values of rows, so the errors here name only the error
condition, and keep the Spark error as their cause. An error is definite if the next run would raise
it again: a missing column, a type mismatch, a constraint of the owner, a missing file. Conflicts
with other writers, lost executors, lost connections and unknown errors are transient.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from pyspark.sql import SparkSession

from pgcdc_assets.errors import (
    ConfigurationError,
    MergeConflict,
    PgcdcError,
    SnapshotNeeded,
    TableDamaged,
    TableRefused,
    TransientError,
    rebuild_command,
    resnapshot_command,
)
from pgcdc_assets.merge.fold.events import NULL_KEY
from pgcdc_assets.merge.fold.toast import UNKNOWN_VALUE
from pgcdc_assets.merge.kinds.keyless import MISSING_ROW
from pgcdc_assets.merge.report import MergeFailure, MergeReport
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.raw.store_errors import explain_store_error
from pgcdc_assets.spark.errors import (
    MEMORY_REMEDY,
    OUT_OF_MEMORY,
    TEMPORARY,
    condition_of,
    definite_condition_of,
    full_disk_of,
    text_of,
)
from pgcdc_assets.spark.session import runs_embedded, session_has_ended
from pgcdc_assets.spark.sql import delta_table, identifier
from pgcdc_assets.table_name import quoted
from pgcdc_assets.tables.owned_columns import find_owned

# Delta's conditions of a NULL in a column that is NOT NULL, and Spark's condition of a file that
# lacks such a column.
_NOT_NULL = ("DELTA_NOT_NULL_CONSTRAINT_VIOLATED", "DELTA_MISSING_NOT_NULL_COLUMN_VALUE")
_LACKS_REQUIRED = "FAILED_READ_FILE.NO_HINT"

# Conditions and texts of errors about a missing file.
_MISSING_FILE = (
    "DELTA_FILE_NOT_FOUND",
    "DELTA_LOG_FILE_NOT_FOUND",
    "DELTA_MISSING_PART_FILES",
    "DELTA_VERSIONS_NOT_CONTIGUOUS",
    "FAILED_READ_FILE",
    "FileNotFoundException",
    "PATH_NOT_FOUND",
)

# The folders of the raw zone whose files no compaction replaces.
_SNAPSHOTS = ("/raw/snapshots/", "/raw/partial_snapshots/")


def explain(task: MergeTask, error: Exception, session: SparkSession | None) -> PgcdcError:
    """Turn an error of a table's merge into one that names the table and the remedy."""
    explained = _explained(task, error, session)
    explained.__cause__ = error
    return explained


def _explained(task: MergeTask, error: Exception, session: SparkSession | None) -> PgcdcError:
    name, text = task.plan.target.qualified_name, text_of(error) or ""
    condition = condition_of(error)
    if UNKNOWN_VALUE in text:
        return _unknown_row(
            task,
            "an update leaves out a TOASTed value, and neither the earlier changes nor the table "
            "have the row",
        )
    if MISSING_ROW in text:
        return _unknown_row(
            task,
            "a row was changed or deleted at the source that the table without a key does not hold",
        )
    for number, column in enumerate(task.plan.target.key or ()):
        if f"{NULL_KEY} {number};" in text:
            return _null_key(task, column)
    if OUT_OF_MEMORY in text or (session is not None and session_has_ended(session, error)):
        return _ended(name, is_lasting=OUT_OF_MEMORY in text or runs_embedded())
    refused = explain_store_error(task.path, error) if text else None
    if isinstance(refused, ConfigurationError):
        return refused
    full = full_disk_of(error)
    if full is not None:
        return full_disk_error(task, full)
    required = _required_columns(task, f"{condition} {text}")
    if required:
        return _must_be_nullable(task, required)
    if any(part in condition or part in text for part in _MISSING_FILE):
        # The first line of the text names the table, whichever file is missing.
        missing = [line for line in text.splitlines() if any(p in line for p in _MISSING_FILE)]
        if any(folder in line for line in missing for folder in _SNAPSHOTS):
            return SnapshotNeeded(
                table=name,
                reason="a file of its snapshot in the raw zone is missing. Restore the file from a "
                "backup, or replace the snapshot",
            )
        if task.path in text:
            return TableDamaged(path=task.path, reason=f"a file is missing ({condition})")
        # A compaction may have replaced a file of the raw zone: the next run reads the new file.
        return _transient(name, condition)
    definite = definite_condition_of(error)
    if definite is not None:
        return TableRefused(
            table=name,
            reason=f"Spark reported {definite}, which a retry would raise again. Nothing was "
            "committed; Spark's log may have the details. If the Delta table was altered by "
            "hand, undo the alteration; otherwise rebuild the table",
            command=rebuild_command,
        )
    return _transient(name, condition)


def _unknown_row(task: MergeTask, reason: str) -> PgcdcError:
    """Return the error of changes of a row that came without an insert.

    A look at the catalog records a change above its first rows. So the rows of an attached
    partition may change below the event whose snapshot copies them.
    """
    name = task.plan.target.qualified_name
    if not task.awaits_snapshot:
        return SnapshotNeeded(table=name, reason=reason)
    return TransientError(
        reason=f"Table {name} was not merged: {reason}. The table waits for a snapshot, which the "
        f"lag sensor or the next pgcdc sync takes. {task.awaits_snapshot}"
    )


def _required_columns(task: MergeTask, text: str) -> list[str]:
    """Return the columns that another tool has made NOT NULL, if an error is about them.

    Merges make no column NOT NULL. A file that lacks a required column can only be one of a merge
    if the column is the owner's.
    """
    if task.state is None:
        return []
    schema, properties = task.state.schema, task.state.properties
    if any(condition in text for condition in _NOT_NULL):
        fields = json.loads(schema)["fields"]
    elif _LACKS_REQUIRED in text:
        fields = find_owned(schema, properties, task.relations).fields
    else:
        return []
    return [field["name"] for field in fields if not field["nullable"]]


def _must_be_nullable(task: MergeTask, columns: Sequence[str]) -> TableRefused:
    names = ", ".join(f'"{column}"' for column in columns)
    statements = "; ".join(
        f"ALTER TABLE {delta_table(task.path)} ALTER COLUMN {identifier(column)} DROP NOT NULL"
        for column in columns
    )
    return TableRefused(
        table=task.plan.target.qualified_name,
        reason=f"another tool has made columns of the Delta table NOT NULL: {names}. A merge has "
        f"no value for such a column. Nothing was committed. Run in Spark: {statements}",
    )


def _null_key(task: MergeTask, column: str) -> MergeConflict:
    table = task.plan.target
    return MergeConflict(
        table=table.qualified_name,
        reason=f'column "{column}" of its configured key is NULL in a row, so the key does not '
        "identify the row. Fill the column and run: "
        f"alter table {quoted(table.schema, table.table)} alter column {quoted(column)} set not "
        "null; or name another key in the settings. Then run",
        command=resnapshot_command,
    )


def _transient(name: str, condition: str) -> TransientError:
    return TransientError(
        reason=f"Table {name} was not merged: Spark reported {condition}. Nothing of it was "
        "committed, and the next run tries again; Spark's log may have the details."
    )


def full_disk_error(task: MergeTask, reason: str) -> TransientError:
    """Return the error of a table whose rows do not fit on a disk.

    Args:
        reason: the operating system's text.
    """
    return TransientError(
        reason=f"Table {task.plan.target.qualified_name} was not merged: {reason}. Nothing of it "
        f"was committed. Free space on the disk of {task.path}, or on that of Spark's temporary "
        f"files ({TEMPORARY}), then run it again."
    )


def _ended(name: str, *, is_lasting: bool) -> PgcdcError:
    """Return the error of a merge whose Spark process ended.

    Args:
        is_lasting: a retry cannot help: the memory would be used up again, or the session is
            embedded, and a process can start only one embedded session.
    """
    if is_lasting:
        return ConfigurationError(
            reason=f"Table {name} was not merged, because Spark's memory was used up, or its "
            f"process was ended. The next run continues from the last commit. {MEMORY_REMEDY}; "
            "a row of 200 MB takes 3 GB."
        )
    return TransientError(
        reason=f"Table {name} was not merged, because the Spark server ended. The next run "
        "continues from the last commit; pgcdc spark start starts the server again."
    )


def guarded(
    task: MergeTask,
    action: Callable[[MergeTask], MergeReport | MergeFailure],
    session: SparkSession | None = None,
) -> MergeReport | MergeFailure:
    """Run an action on one table; turn an error into a failure of that table."""
    try:
        return action(task)
    except PgcdcError as error:
        return MergeFailure(*task.name, error)
    except Exception as error:
        return MergeFailure(*task.name, explain(task, error, session))
