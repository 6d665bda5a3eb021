"""The properties of SCD tables: what a table is made of, and where it begins."""

from __future__ import annotations

import re
from collections.abc import Sequence

_QUOTED = re.compile(r'"((?:[^"]|"")*)"')

# The property of a table with the OID of the source table.
RELATION_ID = "pgcdc.relation_id"

# What the names of properties begin with that describe a table's contents; others are its owner's.
OURS = ("pgcdc.", "delta.columnMapping.")

# The property of a table that is never replaced by a copy: the position of its first one.
BEGINS_WITH = "pgcdc.begins_with"

KEY = "pgcdc.key"
RELATION_VERSION = "pgcdc.relation_version"


def key_text(names: Sequence[str]) -> str:
    """Write a key for a table property."""
    return ", ".join('"' + name.replace('"', '""') + '"' for name in names)


def parse_key(text: str) -> tuple[str, ...]:
    """Read a key as `key_text` writes it."""
    return tuple(name.replace('""', '"') for name in _QUOTED.findall(text))
