"""The expected Delta type of every Postgres type, and the values that the type cannot hold.

The module follows docs/reference/types.md and is independent of `merge/fold/types.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pgcdc_assets.verify.values import Unreadable, array_elements
from pgcdc_assets_tests.support.merge.every_type import SourceType

_TYPED = {
    "boolean": "boolean",
    "smallint": "smallint",
    "integer": "int",
    "bigint": "bigint",
    "oid": "bigint",
    "real": "float",
    "double precision": "double",
    "date": "date",
    "timestamp without time zone": "timestamp_ntz",
    "timestamp with time zone": "timestamp",
    "bytea": "binary",
}
_NUMERIC = re.compile(r"numeric\((\d+),(-?\d+)\)")


def expected_type(each: SourceType, declared: str, by_oid: Mapping[int, SourceType]) -> str:
    """Return the Delta type of a column.

    Args:
        declared: the type with its length or precision.
    """
    if each.kind == "d":
        return expected_type(by_oid[each.base], each.declared_base, by_oid)
    if each.element:
        element = by_oid[each.element]
        below = element
        while below.kind == "d":
            below = by_oid[below.base]
        is_extension = below.kind == "b" and not below.is_builtin
        if is_extension or below.delimiter != ",":
            return "string"
        if below.element:
            # An array of a domain over an array.
            return "array<string>"
        return f"array<{expected_type(element, declared.removesuffix('[]'), by_oid)}>"
    match = _NUMERIC.fullmatch(declared)
    if match is not None:
        precision, scale = int(match[1]), int(match[2])
        digits = max(precision, scale) if scale >= 0 else precision - scale
        return f"decimal({digits},{max(scale, 0)})" if digits <= 38 else "string"
    return _TYPED.get(re.sub(r"\(\d+\)", "", declared), "string")


def must_rescue(kind: str, text: str) -> bool:
    """Return whether a text of Postgres has no value in a Delta type."""
    if kind.startswith("decimal"):
        return text == "NaN"
    if kind in ("date", "timestamp", "timestamp_ntz"):
        return "infinity" in text or text.endswith("BC") or re.match(r"\d{5}", text) is not None
    if kind.startswith("array<"):
        try:
            elements = array_elements(text)
        except Unreadable:
            return True
        element = kind.removeprefix("array<").removesuffix(">")
        return any(item is not None and must_rescue(element, item) for item in elements)
    return False
