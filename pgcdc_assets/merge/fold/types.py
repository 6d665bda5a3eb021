"""The Delta type of a Postgres type, and the SQL that casts a text to the type.

Each expression is native SQL over the text that Postgres printed, and is NULL whenever the typed
column cannot hold that text exactly; the caller then keeps the text in `_rescued`. Spark's casts
are lenient: a cast trims blanks, accepts a year of seven digits, and ignores the rest of a text.
The expressions of dates and times therefore check the form of the text before the cast. A type
without an exact Delta type stays text.

The texts are those of DateStyle ISO, IntervalStyle postgres and bytea_output hex, which every
connection of the package pins.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pgcdc_assets.merge.fold.table_schema import TEXT, DeltaType, as_text
from pgcdc_assets.protocol.relation import Column

_TOKEN = r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|[^,{}"]+"""

_MAX_PRECISION = 38


def _cast(ddl: str) -> Callable[[str], str]:
    return lambda text: f"try_cast({text} AS {ddl})"


def _date(text: str) -> str:
    # Years 0001 to 9999 only: longer texts are years beyond that, BC, or -infinity.
    return f"IF(length({text}) = 10, try_cast({text} AS DATE), NULL)"


def _timestamp(ddl: str) -> Callable[[str], str]:
    def expression(text: str) -> str:
        return (
            f"IF(substr({text}, 5, 1) = '-' AND right({text}, 2) <> 'BC', "
            f"try_cast({text} AS {ddl}), NULL)"
        )

    return expression


def _bytea(text: str) -> str:
    return f"IF(startswith({text}, r'\\x'), unhex(substr({text}, 3)), NULL)"


_SCALARS = {
    "bool": DeltaType("BOOLEAN", _cast("BOOLEAN"), is_fixed_length=True),
    "int2": DeltaType("SMALLINT", _cast("SMALLINT"), is_fixed_length=True),
    "int4": DeltaType("INT", _cast("INT"), is_fixed_length=True),
    "int8": DeltaType("BIGINT", _cast("BIGINT"), is_fixed_length=True),
    "oid": DeltaType("BIGINT", _cast("BIGINT"), is_fixed_length=True),
    "float4": DeltaType("FLOAT", _cast("FLOAT"), is_fixed_length=True),
    "float8": DeltaType("DOUBLE", _cast("DOUBLE"), is_fixed_length=True),
    "date": DeltaType("DATE", _date, may_rescue=True, is_fixed_length=True),
    "timestamp": DeltaType(
        "TIMESTAMP_NTZ", _timestamp("TIMESTAMP_NTZ"), may_rescue=True, is_fixed_length=True
    ),
    "timestamptz": DeltaType(
        "TIMESTAMP", _timestamp("TIMESTAMP"), may_rescue=True, is_fixed_length=True
    ),
    "bytea": DeltaType("BINARY", _bytea, may_rescue=True),
    "uuid": DeltaType("STRING", as_text, is_fixed_length=True),
}

# Types whose typmod is a length or a precision, and is shown as it is.
_LIMITED = frozenset({"varbit", "timestamp", "timestamptz", "time", "timetz"})

# Types whose arrays use another delimiter than a comma.
_OTHER_DELIMITER = frozenset({"box"})


def delta_type(column: Column) -> DeltaType:
    """Choose the Delta type of a column."""
    if column.element_type is not None:
        return _array_type(column)
    return _scalar_type(column.base_type, column.base_typmod)


def full_type(column: Column) -> str:
    """Return a column's type with its length or precision, in the form of format_type."""
    name, typmod = column.type or "unknown", column.typmod
    kind = column.element_type or column.base_type
    if typmod < 0:
        return name
    if kind == "numeric":
        limit = ",".join(map(str, _precision(typmod)))
    elif kind in ("varchar", "bpchar"):
        limit = str(typmod - 4)
    elif kind == "bit" or kind in _LIMITED:
        limit = str(typmod)
    else:
        return name
    # The limit comes before an array's brackets and a timestamp's zone.
    return re.sub(r"^(.*?)((?: with(?:out)? time zone)?(?:\[\])?)$", rf"\1({limit})\2", name)


def _scalar_type(base_type: str | None, typmod: int) -> DeltaType:
    if base_type == "numeric":
        return _numeric_type(typmod)
    return _SCALARS.get(base_type or "", TEXT)


def _numeric_type(typmod: int) -> DeltaType:
    """Return DECIMAL if it holds every value of the declared precision and scale, else text."""
    if typmod < 4:
        return TEXT
    precision, scale = _precision(typmod)
    if scale < 0:
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    if precision > _MAX_PRECISION:
        return TEXT
    ddl = f"DECIMAL({precision},{scale})"
    return DeltaType(ddl, _cast(ddl), may_rescue=True)


def _precision(typmod: int) -> tuple[int, int]:
    """Read precision and scale of a numeric from its typmod.

    Its layout is that of make_numeric_typmod in Postgres's src/backend/utils/adt/numeric.c; since
    Postgres 15 the scale may be negative (digits before the point are rounded) or above the
    precision.
    """
    return (typmod - 4) >> 16 & 0xFFFF, (((typmod - 4) & 0x7FF) ^ 0x400) - 0x400


def _array_type(column: Column) -> DeltaType:
    element = _scalar_type(column.element_type, column.element_typmod)
    is_extension = "." in (column.element_type or "") and column.kind == "b"
    if is_extension or column.element_type in _OTHER_DELIMITER:
        # A type of an extension may have its own delimiter, as in PostGIS, and the relation does
        # not record the delimiter.
        return TEXT
    return DeltaType(
        f"ARRAY<{element.ddl}>",
        lambda text: array_sql(text, element.ddl, element.expression, element.may_rescue),
        may_rescue=True,
    )


def array_sql(text: str, element_ddl: str, element: Callable[[str], str], may_rescue: bool) -> str:
    """Write the SQL of the typed array. For column `x` of type ARRAY<INT> it is

        CASE WHEN x = '{}' THEN CAST(array() AS ARRAY<INT>)
            WHEN startswith(x, '{{') OR NOT startswith(x, '{') THEN NULL
            ELSE transform(IF(contains(x, '"'), ..., split(...)), item -> try_cast(item AS INT)) END

    Args:
        element: returns the SQL of a typed element for the SQL of its text.
        may_rescue: an element may have no typed value; then the whole array is NULL.
    """
    bare = f"split(substr({text}, 2, length({text}) - 2), ',')"
    quoted = (
        f"transform(regexp_extract_all({text}, r'(?s){_TOKEN}', 0), token -> "
        "IF(startswith(token, '\"'), "
        r"regexp_replace(substr(token, 2, length(token) - 2), r'(?s)\\(.)', '$1'), "
        "nullif(token, 'NULL')))"
    )
    unquoted = f"transform({bare}, token -> nullif(token, 'NULL'))"
    tokens = f"IF(contains({text}, '\"'), {quoted}, {unquoted})"
    value = element("item")
    if value == "item":
        items = tokens
    elif may_rescue:
        items = (
            f"IF(exists({tokens}, item -> item IS NOT NULL AND {value} IS NULL), NULL, "
            f"transform({tokens}, item -> {value}))"
        )
    else:
        items = f"transform({tokens}, item -> {value})"
    return (
        f"CASE WHEN {text} = '{{}}' THEN CAST(array() AS ARRAY<{element_ddl}>) "
        f"WHEN startswith({text}, '{{{{') OR NOT startswith({text}, '{{') THEN NULL "
        f"ELSE {items} END"
    )
