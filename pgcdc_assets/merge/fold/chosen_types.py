"""The Delta types that the settings may choose for a column in place of its default type.

Each expression is NULL whenever the chosen type cannot hold the text's value exactly, as in
`types.py`. DOUBLE is the exception: the nearest double is what the setting asks for, and only a
number beyond its range has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pgcdc_assets.errors import MergeConflict, SchemaChangeError, rebuild_command
from pgcdc_assets.merge.fold.table_schema import TEXT, DeltaType, Field, TableSchema
from pgcdc_assets.protocol.relation import Column
from pgcdc_assets.settings.column_types import INTERVAL_PARTS
from pgcdc_assets.tables.properties import CHOSEN_TYPES

# Default types whose values give the text that Postgres printed.
_WITH_TEXT = ("SMALLINT", "INT", "BIGINT", "DECIMAL", "DATE", "TIMESTAMP", "BINARY")

# A key is compared, also with what is rescued, and two rows may have one nearest double.
_OF_KEYS = ("STRING",)

_DECIMAL = re.compile(r"DECIMAL\((\d+),(\d+)\)")

# Of a quoted part of a JSON or hstore text, without its quotes; possessive, so that a long text
# costs no stack.
_INSIDE = r'[^"\\]*+(?:\\.[^"\\]*+)*+'
_PAIR = rf'(?s)"({_INSIDE})"=>(NULL|"{_INSIDE}")'

# Years, months, days, and the sign, hours, minutes, seconds and fraction of an interval's text.
_INTERVAL = (
    r"(?:([+-]?\d+) years?)? ?(?:([+-]?\d+) mons?)? ?(?:([+-]?\d+) days?)? ?"
    r"(?:([+-]?)(\d+):(\d\d):(\d\d)(?:[.](\d{1,6}))?)?"
)

# A number with more digits than a DECIMAL, or with an exponent: a VARIANT would hold a double.
_INEXACT_NUMBER = r"[0-9.]{39}|[0-9][eE]"
# Half of a surrogate pair, which UTF-8 cannot hold, behind an odd number of backslashes.
_LONE_SURROGATE = (
    r"(?<!\\)(?:\\\\)*+(?:\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F])"
)


def choose_types(schema: TableSchema, types: Mapping[str, str]) -> TableSchema:
    """Return a schema with the types that the settings choose. A column that is gone has none.

    Args:
        types: by column.

    Raises:
        MergeConflict: a column cannot have its type.
    """
    columns = {column.name: column for column in schema.relation.columns}
    fields = list(schema.fields)
    for i, field in enumerate(fields):
        ddl, column = types.get(field.name), columns.get(field.name)
        if ddl is None or column is None:
            continue
        found = chosen_type(column, ddl)
        if found is None or (i in schema.key and ddl not in _OF_KEYS):
            allowed = _OF_KEYS if i in schema.key else choices(column)
            raise MergeConflict(
                table=schema.relation.qualified_name,
                reason=f'the settings choose {ddl} for column "{field.name}" ({field.comment}'
                f"{', part of the key' if i in schema.key else ''}), which can be "
                f"{' or '.join(allowed)}. Correct `types` of this table.",
            )
        fields[i] = replace(field, type=found, chosen=found.ddl)
    return replace(schema, fields=tuple(fields))


def check_chosen(schema: TableSchema, properties: Mapping[str, str], stored: str) -> None:
    """Check that the columns of a table have the types that the settings choose.

    Args:
        properties: of the table.
        stored: the table's schema, as Delta's log writes it.

    Raises:
        SchemaChangeError: the settings changed after the table was written.
    """
    for field, before in _changed(schema, properties, stored):
        raise SchemaChangeError(
            relation=schema.relation.qualified_name,
            column=field.name,
            reason=f"its type in the settings changed from {before} to {field.type.ddl}",
        )


def check_retypes(schema: TableSchema, properties: Mapping[str, str], stored: str) -> None:
    """Check that the values of a table can be rewritten with the types that the settings choose.

    The new value comes from the text that Postgres printed, so the stored value must give this
    text.

    Raises:
        MergeConflict: a stored value does not give its text; raw has the text.
    """
    known = json.loads(properties.get(CHOSEN_TYPES, "{}"))
    for field, before in _changed(schema, properties, stored):
        has_text = known.get(field.name, before) == before and (
            before == "STRING" or (field.name not in known and before.startswith(_WITH_TEXT))
        )
        if not has_text or (field.chosen is None and field.type.ddl.startswith("ARRAY")):
            raise MergeConflict(
                table=schema.relation.qualified_name,
                reason=f'the type of column "{field.name}" in the settings changed from {before} '
                f"to {field.type.ddl}, and its stored values do not give the source's texts. "
                "Restore the setting, or write the table from the raw zone with",
                command=rebuild_command,
            )


def _changed(
    schema: TableSchema, properties: Mapping[str, str], stored: str
) -> Iterator[tuple[Field, str]]:
    """Find the columns with another choice than the table was written with, and their types."""
    known = json.loads(properties.get(CHOSEN_TYPES, "{}"))
    types = {column["name"]: _ddl(column["type"]) for column in json.loads(stored)["fields"]}
    for field in schema.fields:
        before = types.get(field.name)
        if before is None:
            continue
        is_chosen_only = before.startswith(("MAP", "VARIANT", "STRUCT"))
        if known.get(field.name) != field.chosen or (is_chosen_only and field.chosen is None):
            yield field, before


def _ddl(kind: Any) -> str:
    """Write a type of Delta's log in SQL."""
    if isinstance(kind, str):
        names = {"integer": "INT", "long": "BIGINT", "short": "SMALLINT", "byte": "TINYINT"}
        return names.get(kind, kind.upper())
    if kind["type"] == "array":
        return f"ARRAY<{_ddl(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"MAP<{_ddl(kind['keyType'])}, {_ddl(kind['valueType'])}>"
    parts = (f"{field['name']}: {_ddl(field['type'])}" for field in kind["fields"])
    return f"STRUCT<{', '.join(parts)}>"


def chosen_type(column: Column, ddl: str) -> DeltaType | None:
    """Return the type that the settings choose for a column; None if the column cannot have it.

    Args:
        ddl: as `type_setting.parse_types` returns it.
    """
    if ddl == "STRING":
        return TEXT
    if column.element_type is not None:
        return None
    base = column.base_type or ""
    decimal = _DECIMAL.fullmatch(ddl)
    if decimal is not None:
        precision, scale = int(decimal[1]), int(decimal[2])
        return _decimal(ddl, scale) if base == "numeric" and scale <= precision else None
    # The schema of an extension's types is a choice of its owner.
    name = base.rpartition(".")[2] if "." in base and column.kind == "b" else base
    return _CHOICES.get((name, ddl))


def choices(column: Column) -> list[str]:
    """Return the types that a column can have, for a sentence."""
    found = ["STRING"]
    if column.element_type is None:
        found += ["DECIMAL(p,s)"] if column.base_type == "numeric" else []
        chosen = (chosen_type(column, ddl) for _, ddl in _CHOICES)
        found += [each.ddl for each in chosen if each is not None]
    return list(dict.fromkeys(found))


def _decimal(ddl: str, scale: int) -> DeltaType:
    # A cast to fewer digits rounds.
    exact = rf"^-?[0-9]+([.][0-9]{{0,{scale}}}0*)?$"

    def expression(text: str) -> str:
        return f"IF({text} RLIKE r'{exact}', try_cast({text} AS {ddl}), NULL)"

    return DeltaType(ddl, expression, may_rescue=True)


def _double(text: str) -> str:
    value = f"try_cast({text} AS DOUBLE)"
    is_beyond = f"abs({value}) = double('Infinity') AND NOT endswith({text}, 'Infinity')"
    is_below = f"{value} = 0 AND {text} RLIKE '[1-9]'"
    return f"IF(({is_beyond}) OR ({is_below}), NULL, {value})"


def _variant(text: str) -> str:
    outside = f"""regexp_replace({text}, r'(?s)"{_INSIDE}"', '')"""
    return (
        f"IF(({text} RLIKE r'{_INEXACT_NUMBER}' AND {outside} RLIKE r'{_INEXACT_NUMBER}') "
        f"OR ({text} RLIKE r'\\\\u[dD][89a-fA-F]' AND {text} RLIKE r'{_LONE_SURROGATE}'), "
        f"NULL, try_parse_json({text}))"
    )


def _map(text: str) -> str:
    """Write the map of an hstore's text, such as `"a"=>"1", "b"=>NULL`."""

    def plain(quoted: str) -> str:
        return rf"regexp_replace({quoted}, r'(?s)\\(.)', '$1')"

    keys = f"transform(regexp_extract_all({text}, r'{_PAIR}', 1), k -> {plain('k')})"
    inner = plain("substr(v, 2, length(v) - 2)")
    values = (
        f"transform(regexp_extract_all({text}, r'{_PAIR}', 2), v -> IF(v = 'NULL', NULL, {inner}))"
    )
    return f"IF({text} = '' OR startswith({text}, '\"'), map_from_arrays({keys}, {values}), NULL)"


def _floats(text: str) -> str:
    items = f"split(substr({text}, 2, length({text}) - 2), ',')"
    return f"IF(startswith({text}, '['), transform({items}, e -> try_cast(e AS FLOAT)), NULL)"


def _ewkb(text: str) -> str:
    return f"unhex({text})"


def _interval(text: str) -> str:
    """Write the parts of an interval such as `1 year -2 mons +3 days -04:05:06.7`."""

    def number(group: int) -> str:
        digits = f"nullif(regexp_extract({text}, r'^{_INTERVAL}$', {group}), '')"
        return f"coalesce(CAST({digits} AS BIGINT), 0L)"

    fraction = f"rpad(regexp_extract({text}, r'^{_INTERVAL}$', 8), 6, '0')"
    seconds = f"{number(6)} * 60 + {number(7)}"
    # The sign is that of each part, since the least number of microseconds is no negative of one.
    sign = f"IF(regexp_extract({text}, r'^{_INTERVAL}$', 4) = '-', -1L, 1L)"
    parts = (
        f"'months', {number(1)} * 12 + {number(2)}, 'days', {number(3)}, 'microseconds', "
        f"{sign} * {number(5)} * 3600000000 + "
        f"{sign} * (({seconds}) * 1000000 + CAST({fraction} AS BIGINT))"
    )
    typed = f"CAST(named_struct({parts}) AS {_INTERVAL_DDL})"
    return f"IF({text} <> '' AND {text} RLIKE r'^{_INTERVAL}$', {typed}, NULL)"


def _choice(ddl: str, expression: Callable[[str], str], *, may_rescue: bool = False) -> DeltaType:
    return DeltaType(ddl, expression, may_rescue=may_rescue)


_INTERVAL_DDL = "STRUCT<months: INT, days: INT, microseconds: BIGINT>"

_CHOICES: dict[tuple[str, str], DeltaType] = {
    ("numeric", "DOUBLE"): _choice("DOUBLE", _double, may_rescue=True),
    ("json", "VARIANT"): _choice("VARIANT", _variant, may_rescue=True),
    ("jsonb", "VARIANT"): _choice("VARIANT", _variant, may_rescue=True),
    ("hstore", "MAP<STRING,STRING>"): _choice("MAP<STRING, STRING>", _map, may_rescue=True),
    ("vector", "ARRAY<FLOAT>"): _choice("ARRAY<FLOAT>", _floats),
    ("halfvec", "ARRAY<FLOAT>"): _choice("ARRAY<FLOAT>", _floats),
    ("interval", INTERVAL_PARTS): _choice(_INTERVAL_DDL, _interval, may_rescue=True),
    ("geometry", "BINARY"): _choice("BINARY", _ewkb),
    ("geography", "BINARY"): _choice("BINARY", _ewkb),
}
