"""The setting `types` of a table: the Delta types that it may choose for columns."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pgcdc_assets.errors import ConfigurationError

# The parts of an interval, which Postgres stores separately. Delta has no interval types.
INTERVAL_PARTS = "STRUCT<MONTHS INT,DAYS INT,MICROSECONDS BIGINT>"

# The Delta types that `types` may choose, with blanks only between a name and its type.
_CHOSEN = re.compile(
    r"STRING|DOUBLE|VARIANT|BINARY|ARRAY<FLOAT>|MAP<STRING,STRING>|"
    rf"DECIMAL\((\d{{1,2}}),(\d{{1,2}})\)|{INTERVAL_PARTS}"
)


def parse_types(table: str, types: Mapping[str, str]) -> dict[str, str]:
    """Return the Delta types of columns without needless blanks and in capitals.

    Raises:
        ConfigurationError: a type is not one that can be chosen.
    """
    found = {}
    for column, given in types.items():
        ddl = re.sub(r"\s*([<>(),])\s*", r"\1", str(given).strip())
        ddl = re.sub(r"\s*:\s*|\s+", " ", ddl).upper()
        match = _CHOSEN.fullmatch(ddl)
        digits = tuple(map(int, match.groups())) if match is not None and match[1] else (1, 0)
        if match is None or not 1 <= digits[0] <= 38 or digits[1] > digits[0]:
            raise ConfigurationError(
                reason=f"Table {table}: types gives column {column} the type {given!r}, but it "
                "must be STRING, DECIMAL(p,s) with p up to 38, DOUBLE, VARIANT, "
                "MAP<STRING,STRING>, ARRAY<FLOAT>, BINARY or STRUCT<months INT, days INT, "
                "microseconds BIGINT> (of an interval: Delta cannot store Spark's interval types)"
            )
        found[column] = ddl
    return found
