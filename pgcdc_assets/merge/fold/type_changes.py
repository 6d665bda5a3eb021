"""The text of an older value in the type that its column has now.

A widening (`raw/relations/type_changes.py`) loses nothing: each old value has one value of the
new type, which the source shows from then on. The text that Postgres prints can differ, as in
these cases of `ALTER TYPE`:

    from                to              older text          text of the same value now
    int4                int8            5                   5
    int4                numeric(8,2)    5                   5.00
    numeric(4,1)        numeric(8,2)    1.5                 1.50
    float4              float8          0.1                 0.10000000149011612
    date                timestamp       2024-01-02          2024-01-02 00:00:00
    varchar(5)          text            a                   a

Every other change can alter values, by rounding or by an expression after USING. Only a snapshot
has the result.
"""

from __future__ import annotations

from collections.abc import Callable

from pgcdc_assets.protocol.relation import Column
from pgcdc_assets.raw.relations.type_changes import changes_text, is_widened, numeric_scale
from pgcdc_assets.spark.sql import string

# The OIDs below belong to the types of Postgres (FirstNormalObjectId), which keep their names.
_FIRST_OF_USERS = 16384


def is_followed(older: Column, newer: Column) -> bool:
    """Return whether each old value has one value of the new type, found without the source.

    A type of a user has the same values after it was renamed, or moved to another schema.
    """
    if older.type_oid >= _FIRST_OF_USERS and _type_of(older) == _type_of(newer):
        return True
    return _values_of(older) == _values_of(newer) or is_widened(older, newer)


def converted_text(older: Column, newer: Column) -> Callable[[str], str] | None:
    """Return a function that writes the SQL of an older text in the new type; None: the same."""
    if not is_widened(older, newer) or not changes_text(older, newer):
        return None
    if newer.base_type == "float8":
        return lambda text: f"CAST(CAST(try_cast({text} AS FLOAT) AS DOUBLE) AS STRING)"
    if newer.base_type == "timestamp":
        return date_as_timestamp
    scale = numeric_scale(older) if older.base_type == "numeric" else 0
    zeros = string(("." if scale == 0 else "") + "0" * (numeric_scale(newer) - scale))
    return lambda text: f"IF({text} = 'NaN', {text}, concat({text}, {zeros}))"


def date_as_timestamp(text: str) -> str:
    """Write the SQL of the text of a date as a timestamp."""
    # Infinity has no time. In `0044-03-15 BC` the time precedes the era.
    return (
        f"IF(endswith({text}, 'infinity'), {text}, "
        f"regexp_replace({text}, '^([^ ]+)', '$1 00:00:00'))"
    )


def _type_of(column: Column) -> tuple[int, int]:
    return column.type_oid, column.typmod


def _values_of(column: Column) -> tuple[object, ...]:
    return column.base_type, column.base_typmod, column.element_type, column.element_typmod
