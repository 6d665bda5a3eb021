"""What Spark reported, sorted by what a reader has to do about it.

Spark's own text may quote values, so the errors here name its error condition; the text is the
cause. An error that the next run meets again is definite: a column that is not there, a type that
does not fit, a constraint of the owner's, a file that is gone. Conflicts with other writers, lost
executors and lost connections are transient, and so is what is not known.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from pgcdc_assets.errors import (
    ConfigurationError,
    MergeConflict,
    PgcdcError,
    SnapshotNeeded,
    TableDamaged,
    TransientError,
)
from pgcdc_assets.merge.fold.events import NULL_KEY
from pgcdc_assets.merge.fold.toast import UNKNOWN_VALUE
from pgcdc_assets.merge.kinds.keyless import MISSING_ROW
from pgcdc_assets.merge.task import MergeTask
from pgcdc_assets.spark.errors import condition_of, is_definite, text_of
from pgcdc_assets.spark.session import runs_embedded, session_has_ended
from pgcdc_assets.table_name import quoted

_OUT_OF_MEMORY = "OutOfMemoryError"

# What an error of a task says within its text, which has values too.
_IN_TEXT = (
    "DELTA_VIOLATE_CONSTRAINT_WITH_VALUES",
    "DELTA_NOT_NULL_CONSTRAINT_VIOLATED",
    "CAST_INVALID_INPUT",
    "CAST_OVERFLOW",
)
# Parts of what is said about a file that should be there.
_MISSING_FILE = (
    "DELTA_FILE_NOT_FOUND",
    "DELTA_LOG_FILE_NOT_FOUND",
    "DELTA_MISSING_PART_FILES",
    "DELTA_VERSIONS_NOT_CONTIGUOUS",
    "FAILED_READ_FILE",
    "FileNotFoundException",
    "PATH_NOT_FOUND",
)


def explain(task: MergeTask, error: Exception, session: SparkSession | None) -> PgcdcError:
    """Turn an error of a table's merge into one that names the table and the remedy."""
    explained = _explained(task, error, session)
    explained.__cause__ = error
    return explained


def _explained(task: MergeTask, error: Exception, session: SparkSession | None) -> PgcdcError:
    name, text = task.plan.target.qualified_name, text_of(error) or ""
    condition = condition_of(error)
    if UNKNOWN_VALUE in text:
        return SnapshotNeeded(
            table=name,
            reason="an update leaves out a TOASTed value, and neither the changes before it nor "
            "the table have the row",
        )
    if MISSING_ROW in text:
        return SnapshotNeeded(
            table=name,
            reason="a row was changed or deleted at the source that the table without a key does "
            "not hold",
        )
    for number, column in enumerate(task.plan.target.key or ()):
        if f"{NULL_KEY} {number};" in text:
            return _null_key(task, column)
    if _OUT_OF_MEMORY in text or (session is not None and session_has_ended(session, error)):
        return _ended(name, is_lasting=_OUT_OF_MEMORY in text or runs_embedded())
    if any(part in condition or part in text for part in _MISSING_FILE):
        if task.path in text:
            return TableDamaged(path=task.path, reason=f"a file is missing ({condition})")
        # A file of the raw zone may have been replaced by a compaction: the next run reads anew.
        return _transient(name, condition)
    inner = next((known for known in _IN_TEXT if known in text), None)
    if inner is not None or is_definite(error):
        condition = inner or condition
        return MergeConflict(
            table=name,
            reason=f"Spark reported {condition}, which a retry meets again. Nothing was "
            "committed; the cause is in the log. If the Delta table was altered by hand, undo "
            "that; otherwise build it again: pgcdc rebuild",
        )
    return _transient(name, condition)


def _null_key(task: MergeTask, column: str) -> MergeConflict:
    table = task.plan.target
    return MergeConflict(
        table=table.qualified_name,
        reason=f'column "{column}" of its configured key is NULL in a row, so nothing tells that '
        "row from others. Fill the column and run: "
        f"alter table {quoted(table.schema, table.table)} alter column {quoted(column)} set not "
        "null; or name another key in the settings. Then take a new snapshot of the table",
    )


def _transient(name: str, condition: str) -> TransientError:
    return TransientError(
        reason=f"Table {name} was not merged: Spark reported {condition}. Nothing of it was "
        "committed; the cause is in the log."
    )


def _ended(name: str, *, is_lasting: bool) -> PgcdcError:
    """Say that Spark ended.

    Args:
        is_lasting: a retry cannot help: the same heap would be used up again, or the process has an
            embedded session, of which there is one in its life.
    """
    if is_lasting:
        return ConfigurationError(
            reason=f"Table {name} was not merged, because Spark's memory was used up, or its "
            "process was ended. The next run goes on from what was committed. Give Spark more "
            "memory: spark.driver.memory in the capture's spark_config, or pgcdc spark start "
            "--memory; a row of 200 MB takes 3 GB."
        )
    return TransientError(
        reason=f"Table {name} was not merged, because the Spark server ended. The next run goes on "
        "from what was committed; pgcdc spark start starts the server again."
    )
