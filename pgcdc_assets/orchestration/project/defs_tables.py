"""The tables in the text of a defs.yaml: read them, and insert further tables.

Users edit the file, so an insertion keeps comments, order, quotes and settings. New tables follow
the last table. The new text is checked before the file is replaced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project.defs_yaml import DefsLoader, shown_place
from pgcdc_assets.orchestration.project.home import defs_files
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.selection import ALL_TABLES
from pgcdc_assets.table_name import TableName


@dataclass(frozen=True)
class DefsTables:
    """The text of a file, and the place of one capture's tables in it.

    Attributes:
        attributes: the capture's settings and their values.
    """

    path: Path
    text: str
    tables: yaml.SequenceNode
    attributes: dict[str, Any]

    @classmethod
    def read(cls, path: Path, capture: str) -> DefsTables:
        """Read a file that `check_defs_folders` accepts.

        Raises:
            ConfigurationError: the file does not declare the capture, or does not list its tables.
        """
        # `read_text` would change the line ends.
        text = path.read_bytes().decode()
        for node, document in zip(
            yaml.compose_all(text, DefsLoader), yaml.load_all(text, DefsLoader), strict=True
        ):
            attributes = document.get("attributes") if isinstance(document, dict) else None
            if isinstance(attributes, dict) and _declares(attributes, capture):
                tables = _child(_child(node, "attributes"), "tables")
                if isinstance(tables, yaml.SequenceNode):
                    return cls(path, text, tables, attributes)
        raise ConfigurationError(
            reason=f"{path} lists no tables of a capture named {capture} (`tables: all` needs "
            "none): name the file's folder with --defs, or write the file by `pgcdc init` without "
            "--update"
        )

    @property
    def names(self) -> list[TableName]:
        """The names of the tables in the order of the file."""
        return [TableName.parse(entry["name"]) for entry in self.attributes["tables"]]

    def place(self, name: TableName, setting: str) -> str | None:
        """Return the place of a table's setting, or of the table; None if the table is missing."""
        if name not in self.names:
            return None
        entry = self.tables.value[self.names.index(name)]
        values = {key.value: value for key, value in entry.value}
        return shown_place(self.path, values.get(setting, entry).start_mark)

    def key(self, name: TableName) -> list[str]:
        """Return the declared key of a table."""
        entry = self.attributes["tables"][self.names.index(name)]
        return list(entry.get("key") or [])

    def add(self, tables: Sequence[CdcTable]) -> None:
        """Insert tables after the last table, and replace the file.

        Raises:
            ConfigurationError: the form of the text does not allow an insertion.
        """
        if not tables:
            return
        text = self._inserted(tables)
        expected = [*self.attributes["tables"], *map(table_entry, tables)]
        try:
            documents = list(yaml.load_all(text, DefsLoader))
        except yaml.YAMLError:
            documents = []
        wanted = {**self.attributes, "tables": expected}
        if wanted not in [(document or {}).get("attributes") for document in documents]:
            lines = ", ".join(_line(table) for table in tables)
            raise ConfigurationError(
                reason=f"The form of {self.path} does not allow an insertion. Add to its list of "
                f"tables: {lines}"
            )
        replace_text(self.path, text)

    def _inserted(self, tables: Sequence[CdcTable]) -> str:
        entries = self.tables.value
        if self.tables.flow_style:
            # An empty list begins with `[`. Other lists get the entries after their last entry.
            at = entries[-1].end_mark.index if entries else self.tables.start_mark.index + 1
            comma = ", " if entries else ""
            return self.text[:at] + comma + ", ".join(map(_line, tables)) + self.text[at:]
        newline = "\r\n" if "\r\n" in self.text else "\n"
        indent = " " * self.tables.start_mark.column
        at = self.text.find("\n", _end(entries[-1]))
        head = self.text if at < 0 else self.text[: at + 1]
        if at < 0:
            head += newline
        added = "".join(
            f"{indent}{'  ' if number else '- '}{line}{newline}"
            for table in tables
            for number, line in enumerate(_block(table))
        )
        return head + added + self.text[len(head) :]


def find_defs_tables(folders: Sequence[Path], capture: str) -> DefsTables | None:
    """Find the file that lists a capture's tables; None for a capture that is declared in Python.

    A name in a template (`{{ env.NAME }}`) is not found.
    """
    for path in defs_files(folders):
        with suppress(ConfigurationError, OSError, RecursionError, UnicodeError, yaml.YAMLError):
            found = DefsTables.read(path, capture)
            if found.names:
                return found
    return None


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash, the file has either the old or the new text."""
    target = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, name)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _line(table: CdcTable) -> str:
    text: str = yaml.safe_dump(
        table_entry(table), sort_keys=False, default_flow_style=True, width=1e9, allow_unicode=True
    )
    return text.strip()


def _block(table: CdcTable) -> list[str]:
    text: str = yaml.safe_dump(
        table_entry(table), sort_keys=False, default_flow_style=None, width=1e9, allow_unicode=True
    )
    return text.splitlines()


def _declares(attributes: dict[str, Any], capture: str) -> bool:
    """Return whether a mapping, which may be anything, lists the tables of a capture."""
    tables = attributes.get("tables")
    return attributes.get("name") == capture and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str)
        for entry in (tables if isinstance(tables, list) else [None])
    )


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    if node is None:
        return None
    # A merge key has the entries of another mapping.
    return next((value for key, value in node.value if key.value == name), None)


def _end(node: yaml.Node) -> int:
    """Return the end of a node's own text. The end mark of a block is the next token."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def component_yaml(
    name: str,
    publication: str,
    tables: Sequence[CdcTable] | None,
    *,
    slot: str | None = None,
    failover: bool = False,
) -> str:
    """Return the text of the `defs.yaml` that `pgcdc init` writes.

    Args:
        tables: the tables; None: all tables of the publication.
    """
    attributes: dict[str, Any] = {"name": name, "publication": publication}
    if slot is not None and slot != f"pgcdc_{name}":
        attributes["slot"] = slot
    if failover:
        attributes["failover"] = True
    attributes["tables"] = ALL_TABLES if tables is None else list(map(table_entry, tables))
    document = {"type": "pgcdc_assets.PostgresCdcComponent", "attributes": attributes}
    return yaml.safe_dump(
        document, sort_keys=False, default_flow_style=None, width=96, allow_unicode=True
    )


def table_entry(table: CdcTable) -> dict[str, Any]:
    """Return the entry of a table that `pgcdc init` writes."""
    key = {"key": list(table.key)} if table.key is not None else {}
    return {"name": table.qualified_name, **key, "scd": list(table.scd)}
