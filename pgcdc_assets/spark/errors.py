"""Classification of Spark's errors: conflicts, definite errors, and transient errors."""

from __future__ import annotations

from py4j.protocol import Py4JError
from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    ParseException,
    PySparkException,
    SparkRuntimeException,
    UnsupportedOperationException,
)

# Prefixes of Delta's error conditions for concurrent writers.
_CONFLICTS = (
    "DELTA_CONCURRENT_",
    "DELTA_METADATA_CHANGED",
    "DELTA_PROTOCOL_CHANGED",
    "DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS",
    "DELTA_SCHEMA_CHANGED",
    "DELTA_MAX_COMMIT_RETRIES_EXCEEDED",
    # Of a column that is to be added: another merge has added it since the columns were read.
    "FIELD_ALREADY_EXISTS",
)
_CONFLICT_CLASSES = ("Concurrent", "MetadataChanged", "ProtocolChanged")

# Errors about the query, the schema or a value, which a repetition does not change.
_DEFINITE = (
    AnalysisException,
    ArithmeticException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    ParseException,
    SparkRuntimeException,
    UnsupportedOperationException,
)

_DEFINITE_CONDITIONS = (
    "CAST_",
    "DATATYPE_MISMATCH",
    "DELTA_",
    "EXPECT_",
    "INCOMPATIBLE_",
    "UNRESOLVED_",
)

# Conditions that appear only within the text of an error of a Spark task.
_IN_TEXT = (
    "DELTA_VIOLATE_CONSTRAINT_WITH_VALUES",
    "DELTA_NOT_NULL_CONSTRAINT_VIOLATED",
    "CAST_INVALID_INPUT",
    "CAST_OVERFLOW",
)

# In errors of several classes. The JVM also raises a FileNotFoundException for a file that it
# cannot create.
_FULL_DISK = ("No space left on device", "Disk quota exceeded", "File too large")

# In errors of several classes: the JVM, or a task, has used up its memory.
OUT_OF_MEMORY = "OutOfMemoryError"

MEMORY_REMEDY = (
    "Give Spark more memory: spark.driver.memory in the capture's spark_config, or pgcdc spark "
    "start --memory"
)

# The setting of the folder for Spark's temporary files.
TEMPORARY = "spark.local.dir"


def is_conflict(error: Exception) -> bool:
    """Return whether the error is a conflict with a concurrent writer of the table."""
    return condition_of(error).startswith(_CONFLICTS) or any(
        kind.__name__.startswith(_CONFLICT_CLASSES) for kind in type(error).__mro__
    )


def is_definite(error: Exception) -> bool:
    """Return whether a repetition of the work raises the same error."""
    if is_conflict(error):
        return False
    return isinstance(error, _DEFINITE) or condition_of(error).startswith(_DEFINITE_CONDITIONS)


def definite_condition_of(error: Exception) -> str | None:
    """Return the condition of an error that a repetition raises again; None for another error."""
    text = text_of(error) or ""
    inner = next((known for known in _IN_TEXT if known in text), None)
    if inner is None and is_definite(error):
        return condition_of(error)
    return inner


def condition_of(error: Exception) -> str:
    """Return Spark's error condition, or the name of the error's class."""
    condition = error.getCondition() if isinstance(error, PySparkException) else None
    return condition or type(error).__name__


def full_disk_of(error: Exception) -> str | None:
    """Return the operating system's text about a disk without space; None for another error."""
    text = text_of(error) or ""
    return next((known for known in _FULL_DISK if known in text), None)


def describe_failure(error: Exception) -> str:
    """Return what failed, for a sentence: a full disk with the remedy, or Spark's condition."""
    full = full_disk_of(error)
    if full is None:
        return f"Spark reported {condition_of(error)}"
    return (
        f"{full}. Free space on the disk of the lake, or of Spark's temporary files ({TEMPORARY})"
    )


def text_of(error: Exception) -> str | None:
    """Return an error's text; None for a Java exception of an ended JVM, which holds the text."""
    try:
        return str(error)
    except (Py4JError, OSError):
        return None
