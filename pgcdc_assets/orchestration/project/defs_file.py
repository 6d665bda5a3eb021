"""Check of a defs.yaml before Dagster loads it; an error names file, line, setting and remedy.

Dagster's own errors contain errors of pydantic, which quote values. This module compares the YAML
nodes of a file, which have line numbers, with the component's fields.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from dagster._utils.schedules import is_valid_cron_schedule
from pydantic import BaseModel, TypeAdapter, ValidationError

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project.defs_yaml import (
    read_documents,
    shown_path,
    shown_place,
    value_of,
)
from pgcdc_assets.orchestration.project.home import defs_files
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.catalog import CatalogPolicy
from pgcdc_assets.settings.policies import (
    CheckPolicy,
    HeartbeatPolicy,
    MessagePolicy,
    RetentionPolicy,
    SnapshotPolicy,
    StepLimit,
    StreamPolicy,
    WindowPolicy,
)
from pgcdc_assets.settings.selection import ALL_TABLES, TableSelection
from pgcdc_assets.settings.storage import CREDENTIAL_SETTINGS, Storage
from pgcdc_assets.settings.variables import check_variable_name
from pgcdc_assets.table_name import TableName

COMPONENT = "pgcdc_assets.PostgresCdcComponent"

_TOP_LEVEL = ("type", "attributes", "requirements", "post_processing", "template_vars_module")
# YAML's merge key, whose value is an alias.
_MERGE = "<<"
_TEMPLATE = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_VARIABLE = re.compile(
    r"""\{\{\s*env(?:\.([A-Za-z_]\w*)|\(\s*['"]([^'"]+)['"]\s*\)|\[\s*['"]([^'"]+)['"]\s*\])\s*\}\}"""
)
_VARIABLE_SETTINGS = ("dsn_env", "primary_dsn_env")
_ALLOWED: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
_POLICIES: dict[str, Callable[..., object]] = {
    "windows": WindowPolicy,
    "stream": StreamPolicy,
    "heartbeat": HeartbeatPolicy,
    "messages": MessagePolicy,
    "snapshot": SnapshotPolicy,
    "retention": RetentionPolicy,
    "checks": CheckPolicy,
    "merge_step": StepLimit,
    "catalog": CatalogPolicy,
    "storage": Storage,
}


class _Template(str):
    """A value that is unknown until Dagster renders its template."""


def check_defs_folders(folders: Sequence[Path]) -> None:
    """Check every file below the folders that declares components.

    Raises:
        ConfigurationError: the first error, with file, line and column.
    """
    declared: dict[str, str] = {}
    for path in defs_files(folders):
        for name in _File(path).check():
            if name in declared:
                raise ConfigurationError(
                    reason=f"{shown_path(path)}: {declared[name]} declares a capture named {name} "
                    "too; rename one of the two captures"
                )
            declared[name] = shown_path(path)


@dataclass(frozen=True)
class _File:
    path: Path

    def check(self) -> list[str]:
        """Check the file; return the names of its captures."""
        documents = [node for node in read_documents(self.path) if node is not None and node.value]
        if not documents:
            raise ConfigurationError(
                reason=f"{shown_path(self.path)}: the file is empty; it must have `type: "
                f"{COMPONENT}` and `attributes`, as `pgcdc init` writes them"
            )
        names = []
        for document in documents:
            component, attributes = self._component(document)
            if component is not None:
                name = self._capture(attributes, component)
                names += [name] if name is not None else []
        return names

    def fail(self, node: yaml.Node, sentence: str) -> NoReturn:
        """Raise a ConfigurationError that names the place of a node."""
        # Omit the cause, because pydantic's errors quote values.
        place = shown_place(self.path, node.start_mark)
        raise ConfigurationError(reason=f"{place}: {sentence}") from None

    def _component(self, document: yaml.Node) -> tuple[type[BaseModel] | None, yaml.Node]:
        """Find the class of a document's component; None for a class of another package."""
        entries = self._entries(document, "the file", _TOP_LEVEL)
        kind = entries.get("type")
        if kind is None:
            self.fail(document, f"`type` is missing; for a capture it is {COMPONENT}")
        if not isinstance(kind, yaml.ScalarNode) or not kind.value:
            self.fail(kind, f"`type` must name a class, such as {COMPONENT}")
        component = self._class(kind)
        if component is None:
            return None, document
        if "attributes" not in entries:
            self.fail(document, "`attributes` is missing; it has the settings of the capture")
        return component, entries["attributes"]

    def _class(self, kind: yaml.ScalarNode) -> type[BaseModel] | None:
        from pgcdc_assets.orchestration.component import PostgresCdcComponent

        module, _, name = kind.value.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name) if module else None
        except (ImportError, AttributeError):
            found = None
        if isinstance(found, type) and issubclass(found, PostgresCdcComponent):
            return found
        if found is None and difflib.get_close_matches(kind.value, [COMPONENT], cutoff=0.7):
            self.fail(kind, f"there is no component {kind.value}; did you mean {COMPONENT}?")
        return None

    def _capture(self, attributes: yaml.Node, component: type[BaseModel]) -> str | None:
        values = self._model(attributes, component, "attributes")
        nodes = self._nodes(attributes)
        tables, selection = self._selected(attributes, nodes)
        for section, policy in _POLICIES.items():
            if isinstance(values.get(section), dict):
                given = _known(values[section])
                names = self._nodes(nodes[section])
                self._judged(partial(policy, **given), nodes[section], names)
                self._check_schedule(section, given.get("schedule"), names)
        for setting in _VARIABLE_SETTINGS:
            if isinstance(_known(values).get(setting), str):
                check = partial(check_variable_name, values[setting], setting)
                self._judged(check, nodes[setting], nodes)
        own = ("name", "publication", "slot", "merge_parallelism", "verify_wait_seconds")
        given = {key: value for key, value in _known(values).items() if key in own}
        defaults = {"name": "name", "publication": "publication"}
        build = partial(
            CdcCapture, **{**defaults, **given, "tables": tables, "selection": selection}
        )
        self._judged(build, attributes, nodes)
        name = values["name"]
        return None if isinstance(name, _Template) else name

    def _check_schedule(
        self, section: str, schedule: str | None, nodes: dict[str, yaml.Node]
    ) -> None:
        if schedule is not None and not is_valid_cron_schedule(schedule):
            self.fail(
                nodes["schedule"],
                f"`{section}.schedule` must be a cron expression of five fields, such as "
                f"{RetentionPolicy.schedule}",
            )

    def _selected(
        self, attributes: yaml.Node, nodes: dict[str, yaml.Node]
    ) -> tuple[tuple[CdcTable, ...], TableSelection | None]:
        """Check the tables of a capture: a list, or `all` with patterns."""
        section = nodes.get("all_tables")
        if _value(nodes["tables"]) != ALL_TABLES:
            if section is not None:
                self.fail(section, f"`all_tables` has an effect with `tables: {ALL_TABLES}` only")
            return self._tables(nodes["tables"]), None
        if section is None:
            return (), TableSelection()
        own = self._nodes(section)
        values = _known({key: _value(node) for key, node in own.items() if key != "named"})
        lists: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        selection = self._judged(partial(TableSelection, **lists), section, own)
        named = self._tables(own["named"]) if "named" in own and own["named"].value else ()
        build = partial(CdcCapture, "name", "publication", named, selection=selection)
        self._judged(build, section, own)
        return named, selection

    def _tables(self, node: yaml.Node) -> tuple[CdcTable, ...]:
        tables: dict[TableName, CdcTable] = {}
        for entry in node.value:
            nodes = self._nodes(entry)
            values = {key: _value(value) for key, value in nodes.items()}
            if isinstance(values["name"], _Template):
                continue
            name = self._judged(partial(TableName.parse, values["name"]), nodes["name"], {})
            if name in tables:
                self.fail(entry, f"table {name} is listed twice")
            tables[name] = self._judged(partial(CdcTable.parse, **_known(values)), entry, nodes)
        return tuple(tables.values()) or (CdcTable("public", "unknown"),) * bool(node.value)

    def _judged(
        self, build: Callable[[], Any], node: yaml.Node, settings: dict[str, yaml.Node]
    ) -> Any:
        """Build a value. An error names the line of the wrong setting."""
        try:
            return build()
        except ConfigurationError as error:
            sentence = str(error)
            words = [error.setting, *re.findall(r"\w+", sentence)]
            at = next((settings[word] for word in words if word in settings), node)
            self.fail(at, sentence)

    def _model(self, node: yaml.Node, model: type[BaseModel], place: str) -> dict[str, Any]:
        """Compare a mapping with the fields of a model; return its values."""
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        entries = self._entries(node, f"`{place}`", list(fields))
        for name, field in fields.items():
            if field.is_required() and name not in entries:
                self.fail(node, f"`{name}` is missing: {_described(field.description)}")
        inner = "" if place == "attributes" else f"{place}."
        return {
            name: self._checked(value, fields[name].annotation, f"{inner}{name}")
            for name, value in entries.items()
        }

    def _entries(self, node: yaml.Node, place: str, known: Sequence[str]) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, f"{place} must be a mapping, with lines such as `{known[0]}: ...`")
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if name not in (*known, _MERGE):
                near = difflib.get_close_matches(name, known, 1)
                what = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
                self.fail(key, f"unknown setting `{name}` in {place}; {what}")
        self._check_names(node, place)
        return self._nodes(node)

    def _check_names(self, node: yaml.MappingNode, place: str) -> None:
        names: set[str] = set()
        for key, _ in node.value:
            if key.value in names:
                self.fail(key, f"`{key.value}` is set twice in {place}")
            names.add(key.value)

    def _checked(self, node: yaml.Node, wanted: Any, place: str) -> Any:
        value = _value(node)
        if isinstance(value, _Template):
            self._check_variables(node, value, place)
            return value
        options = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
        words = [word for o in options if get_origin(o) is Literal for word in get_args(o)]
        if words and isinstance(node, yaml.ScalarNode):
            # YAML reads the words off and on as booleans.
            if value in words or (bool in options and isinstance(value, bool)):
                return value
            known = ", ".join(words[:-1]) if bool in options else f"{_allowed(options[0])},"
            self.fail(node, f"`{place}` must be {known} or {words[-1]}")
        if value is None and type(None) in options:
            return None
        kind = next(option for option in options if option is not type(None))
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return self._model(node, kind, place)
        if get_origin(kind) is list:
            if not isinstance(node, yaml.SequenceNode):
                self.fail(node, f"`{place}` must be {_allowed(kind)}")
            (element,) = get_args(kind)
            return [
                self._checked(item, element, place if _is_scalar(element) else f"{place}[{number}]")
                for number, item in enumerate(node.value)
            ]
        if get_origin(kind) is dict:
            if not isinstance(node, yaml.MappingNode):
                self.fail(node, f"`{place}` must be {_allowed(kind)}")
            self._check_names(node, f"`{place}`")
            return {
                name: self._checked(item, str, f"{place}.{name}")
                for name, item in self._nodes(node).items()
            }
        try:
            if isinstance(value, bool) and kind is not bool:
                raise ValueError
            return TypeAdapter(kind).validate_python(value)
        except (ValidationError, ValueError):
            self.fail(node, f"`{place}` must be {_allowed(kind)}")

    def _check_variables(self, node: yaml.Node, value: str, place: str) -> None:
        section, _, setting = place.rpartition(".")
        is_credential = section == "storage" and setting in CREDENTIAL_SETTINGS
        for found in _VARIABLE.finditer(value):
            name = next(group for group in found.groups() if group)
            if is_credential and found[0] == value.strip():
                # A key of letters and digits cannot be distinguished from a name.
                self.fail(
                    node,
                    f"`{place}` must name an environment variable, and the template inserts the "
                    f"value of {name}. Write {name}",
                )
            if name not in os.environ:
                self.fail(
                    node,
                    f"`{place}` refers to the environment variable {name}, which is not set",
                )

    def _nodes(self, node: yaml.Node) -> dict[str, yaml.Node]:
        if isinstance(node, yaml.MappingNode):
            yaml.SafeLoader("").flatten_mapping(node)
        return {key.value: value for key, value in node.value}


def _value(node: yaml.Node) -> Any:
    """Return the value of a node."""
    if isinstance(node, yaml.ScalarNode) and _TEMPLATE.search(node.value):
        return _Template(node.value)
    if isinstance(node, yaml.MappingNode):
        return {key.value: _value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    return value_of(node)


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """Remove values that are unknown until Dagster renders their templates."""
    return {key: value for key, value in values.items() if not _has_template(value)}


def _has_template(value: Any) -> bool:
    if isinstance(value, list | dict):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return any(map(_has_template, items))
    return isinstance(value, _Template)


def _is_scalar(kind: Any) -> bool:
    return kind in _ALLOWED


def _allowed(kind: Any) -> str:
    if get_origin(kind) is list:
        (element,) = get_args(kind)
        if not _is_scalar(element):
            return "a list, with `- name: ...` for each entry"
        return f"a list, each entry {_ALLOWED[element]}"
    if get_origin(kind) is dict:
        return "a mapping of names to texts"
    return _ALLOWED.get(kind, "of another type")


def _described(description: str | None) -> str:
    text = (description or "the setting is required").rstrip(".")
    return text[0].lower() + text[1:]
