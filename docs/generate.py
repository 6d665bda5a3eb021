"""Write the generated parts of the documentation.

These are the tables of settings, the commands, and the index of the decisions. A generated part is
between `<!-- generated: NAME -->` and `<!-- end -->`. `make docs` writes all parts. A test fails if
a part is out of date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pgcdc_assets.cli.arguments import build_parser
from pgcdc_assets.orchestration import component

DOCS = Path(__file__).parent
_COMMON = ("debug", "verbose")
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generate(folder: Path = DOCS) -> dict[Path, str]:
    """Return the current text of each page with a generated part."""
    pages = {}
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text()
        if _PART.search(text):
            pages[path] = _PART.sub(_filled, text)
    return pages


def _filled(part: re.Match[str]) -> str:
    builders: dict[str, Callable[[], str]] = {
        "commands": build_commands,
        "common_options": build_common_options,
        "decisions": build_decisions,
    }
    build = builders.get(part[2])
    text = build() if build else build_settings_table(getattr(component, part[2]))
    return f"{part[1]}\n{text}\n{part[3]}"


def build_decisions(folder: Path = DOCS / "decisions") -> str:
    """Return a Markdown table of the decision records, from their names and titles."""
    lines = ["| | decision |", "|---|---|"]
    for path in sorted(folder.glob("0*.md")):
        title = path.read_text().splitlines()[0]
        number, _, name = title.removeprefix("# ").partition(". ")
        if int(number) != int(path.name[:4]):
            raise ValueError(f"{path.name}: the title has number {number}")
        lines.append(f"| {number} | [{name}]({path.name}) |")
    return "\n".join(lines) + "\n"


def build_settings_table(model: type[BaseModel]) -> str:
    """Return a Markdown table of the fields of a settings model."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        lines.append(
            f"| `{field.alias or name}` | {_default(field.default)} | {field.description} |"
        )
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None or value == "" or value == {} or isinstance(value, BaseModel):
        return ""
    text = str(value).lower() if isinstance(value, bool) else f"{value}"
    return f"`{text.removesuffix('.0')}`"


def build_commands() -> str:
    """Return a section for each command of `pgcdc`."""
    return "\n".join(_command(name, parser) for name, parser in _commands(build_parser()))


def build_common_options() -> str:
    """Return a table of the options that every command takes."""
    _, parser = next(_commands(build_parser()))
    return _table(action for action in parser._actions if action.dest in _COMMON)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    # Not the parser's own usage and help, whose form differs between versions of Python.
    own = [action for action in parser._actions if action.dest not in {*_COMMON, "help"}]
    return f"### pgcdc {name}\n\n{parser.description}\n\n{_table(own)}"


def _table(actions: Iterable[argparse.Action]) -> str:
    rows = [f"| {_names(action)} | {_help(action)} |" for action in actions]
    return "\n".join(["| argument | meaning |", "|---|---|", *rows, ""])


def _names(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        value = "\\|".join(map(str, action.choices))
    if not action.option_strings:
        return f"`{value} ...`" if action.nargs == "*" else f"`{value}`"
    takes_value = action.nargs != 0
    if action.nargs == "?":
        value = f"[{value}]"
    names = ", ".join(
        f"`{option} {value}`" if takes_value else f"`{option}`" for option in action.option_strings
    )
    return f"{names} (required)" if action.required else names


def _help(action: argparse.Action) -> str:
    text = action.help or ""
    for name in ("default", "const"):
        value = getattr(action, name)
        shown = f"{value:g}" if isinstance(value, float) else value
        text = re.sub(rf"%\({name}\)\w", f"`{shown}`", text)
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for page, text in generate().items():
        page.write_text(text)
