"""The properties of SCD tables: relation, key and beginning of the contents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_QUOTED = re.compile(r'"((?:[^"]|"")*)"')

# The property of a table with the OID of the source table.
RELATION_ID = "pgcdc.relation_id"

# Prefixes of the properties that describe a table's contents. All other properties are the owner's.
OURS = ("pgcdc.", "delta.columnMapping.")

# For a table that no snapshot replaces: the key of its first snapshot.
BEGINS_WITH = "pgcdc.begins_with"

# Delta's property of a table whose Parquet files have other column names than the table.
MAPPING = "delta.columnMapping.mode"

# Delta's own count of the columns of such a table. Delta refuses a write of the property.
MAX_COLUMN_ID = "delta.columnMapping.maxColumnId"

# Delta's property: how long entries of the log are kept, 30 days by default.
LOG_RETENTION = "delta.logRetentionDuration"

# The value of `LOG_RETENTION` that the maintenance has set. Another value is the owner's.
OWN_LOG_RETENTION = "pgcdc.log_retention"

# Delta's property: how long VACUUM keeps replaced files, and checkpoints the removals; a week by
# default.
FILE_RETENTION = "delta.deletedFileRetentionDuration"

# The value of `FILE_RETENTION` that the maintenance has set. Another value is the owner's.
OWN_FILE_RETENTION = "pgcdc.file_retention"

# Delta's property: how long readers see an application transaction; without limit by default.
TRANSACTION_RETENTION = "delta.setTransactionRetentionDuration"

# The prefix of the CHECK constraints of an owner. delta-rs does not check the rows of files that it
# commits.
CONSTRAINT = "delta.constraints."
# Of an owner: Delta refuses commits that remove rows.
APPEND_ONLY = "delta.appendOnly"

KEY = "pgcdc.key"

# For a table that no snapshot replaces, and that had another key before: the key of the snapshot
# with which it got its key.
KEY_SINCE = "pgcdc.key_since"

# The types that the settings chose for columns of the table: JSON, by column.
CHOSEN_TYPES = "pgcdc.types"
RELATION_VERSION = "pgcdc.relation_version"

# The properties that say which relation version a table follows.
RELATION = (RELATION_ID, RELATION_VERSION, KEY)

# The source columns of a table by name, see `source_columns.py`.
COLUMNS = "pgcdc.columns"

# Digests of the comments that merges have written, see `comments.py`.
COMMENTS = "pgcdc.comments"

# The clustering columns that an unfinished overwrite has removed: JSON.
CLUSTERED_BY = "pgcdc.clustered_by"

_HOURS = {"week": 168.0, "day": 24.0, "hour": 1.0, "minute": 1 / 60, "second": 1 / 3600}


def interval_hours(text: str) -> float | None:
    """Return the hours of an interval as Delta's documentation shows it, else None."""
    found = re.findall(r"(\d+)\s+([a-z]+?)s?\b", text.lower())
    if not found or any(unit not in _HOURS for _, unit in found):
        return None
    return sum(int(count) * _HOURS[unit] for count, unit in found)


def is_append_only(properties: Mapping[str, str]) -> bool:
    """Return whether an owner has made the table append-only."""
    return properties.get(APPEND_ONLY, "").lower() == "true"


def key_text(names: Sequence[str]) -> str:
    """Return a key as the text of a table property."""
    return ", ".join('"' + name.replace('"', '""') + '"' for name in names)


def parse_key(text: str) -> tuple[str, ...]:
    """Read a key as `key_text` writes it."""
    return tuple(name.replace('""', '"') for name in _QUOTED.findall(text))
