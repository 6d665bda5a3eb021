"""Identifiers and literals in Spark SQL.

The merge builds expressions as SQL text: one string costs one call to the JVM, or one message to
the Connect server. The Column functions cost one call per operator.
"""

from __future__ import annotations

import datetime as dt


def identifier(name: str) -> str:
    """Return a quoted identifier. The name may contain any character except NUL."""
    return "`" + name.replace("`", "``") + "`"


def string(text: str) -> str:
    """Return a string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def delta_table(path: str) -> str:
    """Return the SQL name of the Delta table at a path."""
    return f"delta.{identifier(path)}"


def timestamp(at: dt.datetime) -> str:
    """Return an expression of a TIMESTAMP with microseconds."""
    return f"timestamp_micros({round(at.timestamp() * 1_000_000)})"
