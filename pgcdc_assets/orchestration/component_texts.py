"""Texts of a component's YAML, with their templates replaced and otherwise as written.

Dagster reads each text as a Python value: the text "2024" becomes a number, "1,2" a tuple, and
"None" nothing. All of them are names that Postgres allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import dagster as dg


def resolve_text(context: dg.ResolutionContext, text: str) -> str:
    """Return a text with its templates replaced."""
    # This call raises the error of an undefined template, which is empty in a longer text.
    context.resolve_value(text)
    # No Python value begins with "=".
    return str(context.resolve_value(f"={text}"))[1:]


def _resolve_texts(
    context: dg.ResolutionContext, texts: Sequence[str] | str | None
) -> list[str] | None:
    if texts is None:
        return None
    if isinstance(texts, str):
        # A template whose value is a list.
        value: list[str] = context.resolve_value(texts, as_type=list)
        return value
    return [resolve_text(context.at_path(number), text) for number, text in enumerate(texts)]


def _resolve_optional(context: dg.ResolutionContext, text: str | None) -> str | None:
    return None if text is None else resolve_text(context, text)


Text = Annotated[str, dg.Resolver(resolve_text, model_field_type=str, inject_before_resolve=False)]
OptionalText = Annotated[
    str | None,
    dg.Resolver(_resolve_optional, model_field_type=str | None, inject_before_resolve=False),
]
Texts = Annotated[
    list[str], dg.Resolver(_resolve_texts, model_field_type=list[str], inject_before_resolve=False)
]
OptionalTexts = Annotated[
    list[str] | None,
    dg.Resolver(_resolve_texts, model_field_type=list[str] | None, inject_before_resolve=False),
]
