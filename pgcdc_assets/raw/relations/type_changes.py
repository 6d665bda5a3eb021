"""Changes of a column's type that keep every value.

A widened type prints each stored value as before, or as an equal number, date or time. For arrays,
and for numerics of any length, only a change that leaves every text as it is counts.
"""

from __future__ import annotations

from typing import NamedTuple

from pgcdc_assets.protocol.relation import Column

# VARHDRSZ: the modifiers of numeric and of character types include it (src/include/c.h).
_HEADER = 4

_INTEGERS = ("int2", "int4", "int8")
_FLOATS = ("float4", "float8")
_DIGITS = {"int2": 5, "int4": 10, "int8": 19}
# A numeric with more digits is stored as text in a Delta table.
_MAX_DIGITS = 38
_TEXTS = ("varchar", "text")
# The modifier is a number of characters, bits or digits of a second; -1 is no limit.
_LIMITED = ("varchar", "varbit", "time", "timetz", "timestamp", "timestamptz")


class _Type(NamedTuple):
    name: str
    typmod: int


def is_widened(before: Column, after: Column) -> bool:
    """Return whether the type of `after` holds every value of the type of `before`.

    Domains count as their base types, and arrays as their elements.
    """
    if before.base_type is None or after.base_type is None:
        return False
    is_array = before.element_type is not None
    if is_array != (after.element_type is not None):
        return False
    wide, narrow = _type(after), _type(before)
    if not _holds(wide, narrow, is_same_type=after.type_oid == before.type_oid):
        return False
    is_long = wide.name == "numeric" and wide.typmod - _HEADER >> 16 > _MAX_DIGITS
    return not (is_array or is_long) or not changes_text(before, after)


def changes_text(before: Column, after: Column) -> bool:
    """Return whether a widened type prints a stored value otherwise than before."""
    wide, narrow = _type(after), _type(before)
    if (narrow.name, wide.name) in {("float4", "float8"), ("date", "timestamp")}:
        return True
    if wide.name != "numeric" or wide.typmod == -1:
        return False
    return numeric_scale(after) > (numeric_scale(before) if narrow.name == "numeric" else 0)


def numeric_scale(column: Column) -> int:
    """Return the number of digits that a numeric of limited precision prints after the point."""
    return max(0, _digits(_type(column).typmod)[1])


def _type(column: Column) -> _Type:
    if column.element_type is not None:
        return _Type(column.element_type, column.element_typmod)
    return _Type(str(column.base_type), column.base_typmod)


def modifier_text(column: Column) -> str:
    """Return a column's type modifier as SQL has it, such as `(10,2)`; empty without one."""
    if column.typmod == -1:
        return ""
    name = column.element_type or column.base_type
    if name == "numeric":
        whole, scale = _digits(column.typmod)
        return f"({whole + scale},{scale})"
    header = _HEADER if name in ("varchar", "bpchar") else 0
    return f"({column.typmod - header})"


def _holds(wide: _Type, narrow: _Type, is_same_type: bool) -> bool:
    if wide == narrow:
        # Two types of one name outside of pg_catalog: the earlier type was dropped.
        return is_same_type or "." not in wide.name
    if wide.name == "numeric":
        return _numeric_holds(wide.typmod, narrow)
    if wide.name in _INTEGERS:
        return _is_above(_INTEGERS, wide, narrow)
    if wide.name in _FLOATS:
        return _is_above(_FLOATS, wide, narrow)
    if wide.name in _TEXTS and narrow.name in _TEXTS:
        return _has_more(wide.typmod, narrow.typmod)
    if (narrow.name, wide.name) == ("date", "timestamp"):
        return True
    return wide.name == narrow.name and wide.name in _LIMITED and _has_more(*wide[1:], *narrow[1:])


def _is_above(order: tuple[str, ...], wide: _Type, narrow: _Type) -> bool:
    return narrow.name in order and order.index(narrow.name) <= order.index(wide.name)


def _has_more(wide: int, narrow: int) -> bool:
    return wide == -1 or (narrow != -1 and wide >= narrow)


def _numeric_holds(typmod: int, narrow: _Type) -> bool:
    if narrow.name not in ("numeric", *_DIGITS):
        return False
    if typmod == -1:
        return True
    whole, scale = _digits(typmod)
    if narrow.name != "numeric":
        return scale >= 0 and whole >= _DIGITS[narrow.name]
    if narrow.typmod == -1:
        return False
    narrow_whole, narrow_scale = _digits(narrow.typmod)
    return whole >= narrow_whole and scale >= narrow_scale


def _digits(typmod: int) -> tuple[int, int]:
    """Return the digits before the point, and the scale, which may be negative.

    The scale has 11 bits with a sign (numeric_typmod_scale in src/backend/utils/adt/numeric.c).
    """
    packed = typmod - _HEADER
    precision, scale = packed >> 16, ((packed & 0x7FF) ^ 1024) - 1024
    return precision - scale, scale
