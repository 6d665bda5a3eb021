r"""Postgres array literals as Spark arrays, by expressions only.

A one-dimensional literal is `{a,"b,c",NULL}`: array_out quotes an element that is empty, spells
NULL, or holds a brace, comma, quote, backslash or blank, and escapes `"` and `\` with a backslash
(https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO). So a literal without a quote is
split at its commas, and one with quotes is cut by a regular expression whose loops are possessive:
Java's backtracking would overflow the stack on a long element. Several dimensions and shifted lower
bounds have no Spark array, and give NULL.
"""

from __future__ import annotations

from collections.abc import Callable

_TOKEN = r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|[^,{}"]+"""


def array_expression(
    text: str, element_ddl: str, element: Callable[[str], str], may_rescue: bool
) -> str:
    """Write the SQL of the typed array.

    Args:
        element: gives the SQL of a typed element for the SQL of its text.
        may_rescue: an element may have no typed value; the whole array is NULL then.
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
