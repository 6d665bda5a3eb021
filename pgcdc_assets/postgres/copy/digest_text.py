"""The text of a value before its digest, in SQL."""

from __future__ import annotations

import enum
from fractions import Fraction
from typing import TYPE_CHECKING

from psycopg2 import sql

if TYPE_CHECKING:
    from pgcdc_assets.protocol.relation import Column

# Numbers from here on, and down from here, have no nearest float of 64 bits but infinity and zero.
_TOO_LARGE = Fraction(2**1024 - 2**970)
_TOO_SMALL = Fraction(1, 2**1075)

_PLAIN_TEXT = frozenset({"text", "varchar"})

# The processor sets the sign of NaN as the result of `infinity - infinity`, and Postgres stores it.
# All NaN are equal, and have one text.
_BITS = "encode(float8send(case when {0} = 'NaN' then 'NaN' else {0}::float8 end), 'hex')"


class Form(enum.Enum):
    """The text form of a value before the digest. Both sides of a comparison use the same form."""

    TEXT = "the text of its output function"
    FLOAT = "the 64 bits of a float in hex: engines print the shortest digits differently"
    FLOATS = "an array of such bits"
    VECTOR = "a vector of pgvector as such an array"
    NUMERIC = "a numeric without trailing zeros, which a DECIMAL of another scale prints"
    NUMERIC_FLOAT = "the bits of a numeric's nearest float, or its text beyond the range of floats"
    PRESENCE = "whether there is a value: no engine prints a VARIANT as Postgres prints JSON"


def text_sql(column: Column, form: Form) -> sql.Composable:
    """Return the expression of a value's text; NULL for NULL.

    The expression uses IS DISTINCT FROM NULL, because IS NULL is true for a row of NULLs as well.
    """
    name: sql.Composable = sql.Identifier(column.name)
    if form is Form.FLOAT:
        return sql.SQL(_BITS).format(name)
    if column.element_type is None and column.base_type in _PLAIN_TEXT:
        return sql.SQL("{}::text").format(name)
    if form is Form.PRESENCE:
        return sql.SQL("case when {} is distinct from null then '' end").format(name)
    if form is Form.NUMERIC:
        return sql.SQL("trim_scale({})::text").format(name)
    text = sql.SQL("case when {name} is distinct from null then concat({name}) end").format(
        name=name
    )
    if form is Form.NUMERIC_FLOAT:
        # NaN is above every number.
        return sql.SQL(
            "case when {name} in ('NaN', 'Infinity', '-Infinity') or {name} = 0 or "
            "(abs({name}) < {most} and abs({name}) > {least}) "
            "then encode(float8send({name}::float8), 'hex') else {text} end"
        ).format(name=name, text=text, most=_number(_TOO_LARGE), least=_number(_TOO_SMALL))
    if form is Form.VECTOR:
        name = sql.SQL("{}::real[]").format(name)
    if form in (Form.FLOATS, Form.VECTOR):
        # Arrays of other dimensions have no Spark type: the tables keep them as text.
        return sql.SQL(
            "case when array_ndims({name}) = 1 and array_lower({name}, 1) = 1 then "
            "(select '{{' || string_agg(coalesce({bits}, 'NULL'), ',' order by n) || '}}' "
            "from unnest({name}) with ordinality u(e, n)) else {text} end"
        ).format(name=name, text=text, bits=sql.SQL(_BITS).format(sql.Identifier("e")))
    return text


def _number(value: Fraction) -> sql.Composable:
    """Return the literal of a number whose denominator is a power of two."""
    digits = value.denominator.bit_length() - 1
    scaled = str(value.numerator * 5**digits).rjust(digits + 1, "0")
    text = f"{scaled[:-digits]}.{scaled[-digits:]}" if digits else scaled
    return sql.SQL("{}::numeric").format(sql.Literal(text))
