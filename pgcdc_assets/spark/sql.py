"""Names and literals as Spark SQL writes them.

Expressions are built as SQL text, because one parsed string costs one call to the JVM (or one
message to the Connect server) where the Column functions cost one call per operator.
"""

from __future__ import annotations

import datetime as dt


def identifier(name: str) -> str:
    """Quote a name: any character but NUL may be in it."""
    return "`" + name.replace("`", "``") + "`"


def string(text: str) -> str:
    """Write a string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def delta_table(path: str) -> str:
    """Name the Delta table that lies at a path."""
    return f"delta.{identifier(path)}"


def timestamp(at: dt.datetime) -> str:
    return f"timestamp_micros({round(at.timestamp() * 1_000_000)})"
