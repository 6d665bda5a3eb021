"""The YAML nodes of a defs.yaml, which have line numbers, and their values as Dagster reads them.

A text of PyYAML may quote the file, which may have a password. A password that begins with `!` or
`*` is a tag or an alias to YAML. So the errors here contain neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from pgcdc_assets.errors import ConfigurationError

_DATE = "tag:yaml.org,2002:timestamp"

# What an error says instead of a part of PyYAML's text.
_EXPLAINED: Mapping[str, str] = {
    "undefined alias": "a text that begins with * must be in quotes",
    "for the tag": "a text that begins with ! must be in quotes, else it is an unknown tag",
    "tag handle": "a text that begins with ! must be in quotes, else it is an unknown tag",
    "second occurrence": "two anchors have the same name",
    "unhashable key": "a template must be in quotes, such as '{{ env.NAME }}'",
}


class DefsLoader(yaml.SafeLoader):
    """A loader with the values of Dagster's loader, for which a date is a text."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Return the value of a node.

        Raises:
            ConstructorError: the node has no value, such as `!!int sesame`, or contains itself.
        """
        try:
            return super().construct_object(node, deep=True)
        except (AttributeError, LookupError, ValueError):
            problem = "a value does not have the form of its type"
            raise ConstructorError(None, None, problem, node.start_mark) from None


DefsLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_documents(path: Path) -> list[yaml.Node | None]:
    """Read the documents of a file, whose nodes all have values.

    Raises:
        ConfigurationError: the file cannot be read, or is not valid. The error names the place.
    """
    try:
        text = path.read_text("utf-8")
        list(yaml.load_all(text, DefsLoader))
        return list(yaml.compose_all(text, DefsLoader))
    except yaml.MarkedYAMLError as error:
        # --debug would show the cause, which quotes the line.
        raise ConfigurationError(
            reason=f"{shown_place(path, error.problem_mark)}: not valid YAML: {_problem(error)}"
        ) from None
    except (OSError, RecursionError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            reason=f"{shown_path(path)} cannot be read as YAML in UTF-8 ({type(error).__name__})"
        ) from error


def value_of(node: yaml.Node) -> Any:
    """Return the value of a node of `read_documents`."""
    return DefsLoader("").construct_object(node)


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    if "\\t" in problem:
        return f"{problem}; indent with blanks, because YAML does not allow tabs"
    return next((said for part, said in _EXPLAINED.items() if part in problem), problem)


def shown_place(path: Path, mark: yaml.Mark | None) -> str:
    """Format a place in a file as `file:line:column`."""
    shown = shown_path(path)
    return shown if mark is None else f"{shown}:{mark.line + 1}:{mark.column + 1}"


def shown_path(path: Path) -> str:
    """Format a path, relative to the current folder if it is below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
