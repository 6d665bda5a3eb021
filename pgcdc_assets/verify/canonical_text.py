"""Typed columns as texts in the form of Postgres, in Spark SQL: the input of digests.

The expressions are independent of the merge's casts on purpose, so that an error in either is
detected. If the engines print values differently, both convert the values to a common form
(`Form`): floats to their bits, timestamps to UTC. A rescued value is its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.copy.digest_text import Form
from pgcdc_assets.postgres.copy.digests import DigestedColumn
from pgcdc_assets.protocol.relation import Column, Relation
from pgcdc_assets.spark.sql import identifier, string
from pgcdc_assets.tables.columns import RESCUED

_FLOATS = frozenset({"float", "double"})
_SOURCE_FLOATS = frozenset({"float4", "float8"})
_PRINTED_ALIKE = frozenset({"tinyint", "smallint", "int", "bigint", "date", "timestamp_ntz"})


@dataclass(frozen=True)
class ComparedColumn:
    """A column that both source and target have.

    Attributes:
        text: Spark SQL of the column's text; NULL for NULL.
    """

    source: DigestedColumn
    text: str

    @property
    def name(self) -> str:
        """The column's name on both sides."""
        return self.source.name


def pair_columns(relation: Relation, types: Mapping[str, str]) -> list[ComparedColumn]:
    """Pair the columns that both source and target have.

    Args:
        types: the target's Spark types by column.

    Raises:
        ConfigurationError: a column has a type that cannot be compared.
    """
    columns = []
    for column in relation.columns:
        kind = types.get(column.name)
        if kind is None:
            continue
        form = _form(kind, column)
        text = _chosen_text(form, kind, identifier(column.name), column)
        if text is None:
            raise ConfigurationError(
                reason=f'Table {relation.qualified_name}: column "{column.name}" is a {kind} in '
                "the lake, which cannot be compared with the source."
            )
        if RESCUED in types and kind != "string":
            rescued = f"try_element_at({RESCUED}, {string(column.name)})"
            text = f"IF({rescued} IS NOT NULL, {_shown(form, rescued)}, {text})"
        if kind == "date" and column.base_type == "timestamp":
            text = _at_midnight(text)
        columns.append(ComparedColumn(DigestedColumn(column.name, form), text))
    return columns


def key_indexes(columns: Sequence[ComparedColumn], *keys: Sequence[str]) -> list[int]:
    """Return the indexes of the first key whose columns are all compared, else of all columns.

    A part of a key does not identify a row.
    """
    order = {column.name: index for index, column in enumerate(columns)}
    for key in keys:
        if key and order.keys() >= set(key):
            return [order[name] for name in key]
    return list(range(len(columns)))


def _chosen_text(form: Form, kind: str, value: str, column: Column) -> str | None:
    """Write a value's text in a form; `docs/reference/types.md` lists the types to choose from."""
    if form is Form.PRESENCE:
        return _shown(form, value)
    if form is Form.NUMERIC:
        return _shown(form, f"CAST({value} AS STRING)")
    if kind == "binary" and column.base_type != "bytea":
        return f"hex({value})"
    if kind == "map<string,string>":
        return _hstore(value)
    if kind == "struct<months:int,days:int,microseconds:bigint>":
        return _interval(value)
    return spark_text(kind, value)


def _shown(form: Form, text: str) -> str:
    """Write a rescued text, or the text of a DECIMAL, in a form."""
    if form is Form.PRESENCE:
        return f"IF({text} IS NOT NULL, '', NULL)"
    if form is Form.NUMERIC:
        return f"IF(contains({text}, '.'), regexp_replace({text}, r'[.]?0+$', ''), {text})"
    return text


def _at_midnight(date: str) -> str:
    """Write the text of a date as that of the timestamp to which the source has widened it.

    The table gets the type with its next row. Infinity has no time.
    """
    return rf"regexp_replace({date}, r'^(\d+-\d+-\d+)', '$1 00:00:00')"


def _hstore(value: str) -> str:
    """Write a map as hstore_out does (contrib/hstore/hstore_io.c)."""

    def quoted(text: str) -> str:
        escaped = rf"""regexp_replace({text}, r'(["\\])', r'\\$1')"""
        return f"concat('\"', {escaped}, '\"')"

    pairs = (
        f"transform(map_entries({value}), e -> concat({quoted('e.key')}, '=>', "
        f"coalesce({quoted('e.value')}, 'NULL')))"
    )
    return f"array_join({pairs}, ', ')"


def _interval(value: str) -> str:
    """Write an interval's parts as EncodeInterval does (src/backend/utils/adt/datetime.c).

    A part after a negative one shows its plus sign.
    """
    months, days, time = (f"{value}.{part}" for part in ("months", "days", "microseconds"))

    def counted(number: str, unit: str, sign: str = "''") -> str:
        shown = f"concat({sign}, {number}, ' {unit}', IF({number} = 1, '', 's'))"
        return f"IF({number} = 0, NULL, {shown})"

    def digits(number: str, count: int = 2) -> str:
        return f"lpad({number}, greatest({count}, length({number})), '0')"

    after = f"({days} < 0 OR ({days} = 0 AND {months} < 0))"
    sign = f"CASE WHEN {time} < 0 THEN '-' WHEN {after} THEN '+' ELSE '' END"
    fraction = f"rtrim('0', {digits(f'abs({time} % 1000000)', 6)})"
    clock = (
        f"concat({sign}, {digits(f'abs({time} div 3600000000)')}, ':', "
        f"{digits(f'abs({time} div 60000000 % 60)')}, ':', "
        f"{digits(f'abs({time} div 1000000 % 60)')}, IF({time} % 1000000 = 0, '', "
        f"concat('.', {fraction})))"
    )
    parts = [
        counted(f"({months} div 12)", "year"),
        counted(f"({months} % 12)", "mon"),
        counted(days, "day", f"IF({days} > 0 AND {months} < 0, '+', '')"),
        f"IF({time} = 0 AND ({months} <> 0 OR {days} <> 0), NULL, {clock})",
    ]
    return f"IF({value} IS NULL, NULL, concat_ws(' ', {', '.join(parts)}))"


def spark_text(kind: str, value: str) -> str | None:
    """Write the SQL of a typed value's text; None for an unknown type.

    Args:
        kind: the type as Spark's `simpleString` names it.
        value: SQL of the value.
    """
    if kind == "string":
        return value
    if kind == "boolean":
        return f"CASE WHEN {value} THEN 't' WHEN NOT {value} THEN 'f' END"
    if kind in _PRINTED_ALIKE or kind.startswith("decimal("):
        return f"CAST({value} AS STRING)"
    if kind == "timestamp":
        # The session and our connections to Postgres have the time zone UTC.
        return f"concat(CAST({value} AS STRING), '+00')"
    if kind == "binary":
        return rf"concat(r'\x', lower(hex({value})))"
    if kind in _FLOATS:
        return _bits(f"format_string('%a', CAST({value} AS DOUBLE))", value)
    if kind.startswith("array<"):
        return _array(kind.removeprefix("array<").removesuffix(">"), value)
    return None


def _bits(printed: str, value: str) -> str:
    """Write a float's bits in hex, as `encode(float8send(...), 'hex')` does.

    Java's `%a` prints a float exactly: `-0x1.8p3`, with `0x0.` for zero and subnormal numbers
    (https://docs.oracle.com/en/java/javase/17/docs/api/java.base/java/lang/Double.html#toHexString(double)).
    """
    mantissa = f"substring_index(substring_index({printed}, 'p', 1), '.', -1)"
    exponent = f"CAST(substring_index({printed}, 'p', -1) AS BIGINT)"
    biased = f"IF(contains({printed}, '0x1.'), {exponent} + 1023, 0L)"
    sign = f"IF(startswith({printed}, '-'), 2048L, 0L)"
    return (
        f"CASE WHEN {value} IS NULL THEN NULL "
        f"WHEN {printed} = 'NaN' THEN '7ff8000000000000' "
        f"WHEN {printed} = 'Infinity' THEN '7ff0000000000000' "
        f"WHEN {printed} = '-Infinity' THEN 'fff0000000000000' "
        f"ELSE concat(lower(lpad(hex({sign} + {biased}), 3, '0')), rpad({mantissa}, 13, '0')) END"
    )


def _array(element: str, value: str) -> str | None:
    """Write a one-dimensional array like array_out (src/backend/utils/adt/arrayfuncs.c)."""
    text = spark_text(element, "e")
    if text is None:
        return None
    texts = f"transform({value}, e -> {text})"
    if element == "string" or element in {"binary", "timestamp", "timestamp_ntz"}:
        # array_out quotes an empty text, NULL, and delimiters, braces, quotes, backslashes, blanks.
        odd = r"""r'[{}",\\ \t\n\r\x0B\f]'"""
        escaped = r"""regexp_replace(q, r'(["\\])', r'\\$1')"""
        quoted = f"concat('\"', {escaped}, '\"')"
        texts = (
            f"transform({texts}, q -> IF(q = '' OR lower(q) = 'null' OR q RLIKE {odd}, "
            f"{quoted}, q))"
        )
    return f"concat('{{', array_join(transform({texts}, x -> coalesce(x, 'NULL')), ','), '}}')"


def _form(kind: str, column: Column) -> Form:
    if kind == "variant":
        return Form.PRESENCE
    if column.element_type is None and column.base_type == "numeric":
        if kind == "double":
            return Form.NUMERIC_FLOAT
        return Form.TEXT if kind == "string" or _scale(column) == kind else Form.NUMERIC
    if kind == "array<float>" and column.element_type is None:
        return Form.VECTOR
    if kind in _FLOATS and column.element_type is None and column.base_type in _SOURCE_FLOATS:
        return Form.FLOAT
    element = kind.removeprefix("array<").removesuffix(">")
    if kind.startswith("array<") and element in _FLOATS and column.element_type in _SOURCE_FLOATS:
        return Form.FLOATS
    return Form.TEXT


def _scale(column: Column) -> str | None:
    """Return the DECIMAL that prints a numeric as Postgres does; None without a scale.

    See make_numeric_typmod in src/backend/utils/adt/numeric.c.
    """
    if column.base_typmod < 4:
        return None
    precision = (column.base_typmod - 4) >> 16 & 0xFFFF
    scale = (((column.base_typmod - 4) & 0x7FF) ^ 0x400) - 0x400
    if scale < 0:
        precision, scale = precision - scale, 0
    return f"decimal({max(precision, scale)},{scale})"
