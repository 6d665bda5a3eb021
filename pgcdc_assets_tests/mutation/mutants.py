"""The mutants of a module: their positions and source texts."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import (
    NEVER_MUTATE_FUNCTION_NAMES,
    MutationVisitor,
    deep_replace,
)
from mutmut.mutation.pragma_handling import get_ignored_lines

from pgcdc_assets_tests.mutation.operators import OPERATORS

# Arguments that are sentences for people, and calls that only write sentences.
_PROSE_ARGUMENTS = {"reason", "remedy", "doing", "help", "description"}
_PROSE_CALLS = {"info", "warning", "debug", "error", "exception", "add_note"}


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        line: the first line that differs.
        statement: the lines of the changed statement, as in `statement_lines`.
        function: the qualified name of the outermost function that is changed; empty for code that
            runs when the module is imported, such as the defaults of a function's arguments.
        is_sql: the change is in the SQL of a string.
        before, after: the lines that differ.
    """

    module: str
    path: str
    number: int
    line: int
    statement: range
    function: str
    is_sql: bool
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """The mutant's identity between runs, until its module changes."""
        return f"{self.module}:{self.number}:{self.before}=>{self.after}"

    @property
    def judgement(self) -> tuple[str, str, str]:
        """The mutant's key in the list of mutants that are equal in effect."""
        return self.module, self.before, self.after


class _Visitor(MutationVisitor):
    """mutmut's visitor, extended to decorated functions and module level, without prose.

    mutmut copies functions, which decorators prevent. This package does not copy functions.
    """

    def __init__(self, path: str, source: str, wrapper: MetadataWrapper) -> None:
        super().__init__(OPERATORS, get_ignored_lines(path, source, wrapper))
        self._prose_depth = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._prose_depth += _is_prose(node)
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._prose_depth -= _is_prose(original_node)
        super().on_leave(original_node)

    def _should_mutate_node(self, node: cst.CSTNode) -> bool:
        # A list in prose is that of `__all__`.
        is_text = isinstance(node, cst.BaseString | cst.FormattedStringText | cst.Assign)
        if self._prose_depth and is_text:
            return False
        return super()._should_mutate_node(node)

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            return node.name.value in NEVER_MUTATE_FUNCTION_NAMES
        if isinstance(node, cst.If) and "TYPE_CHECKING" in cst.Module([]).code_for_node(node.test):
            return True
        return super()._skip_node_and_children(node)


def _is_prose(node: cst.CSTNode) -> bool:
    match node:
        case cst.Raise() | cst.Assert():
            return True
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value="__all__"))]):
            return True
        case cst.Arg(keyword=cst.Name(value=name)):
            return name in _PROSE_ARGUMENTS
        case cst.Call(func=cst.Attribute(attr=cst.Name(value=name))):
            return name in _PROSE_CALLS
        case cst.Call(func=cst.Name(value=name)):
            return name.endswith("Error") or name == "Finding"
        case _:
            return False


def module_name(root: Path, path: Path) -> str:
    """Return the module name of a file."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def mutants_of(root: Path, path: Path) -> Iterator[Mutant]:
    """Write the mutants of a file, in the order of the file."""
    source = path.read_text()
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor(str(path), source, wrapper)
    module = wrapper.visit(visitor)
    names = _qualified_names(module)
    # Generate only the changed statement, because the text of a module takes 20 ms.
    texts = [module.code_for_node(statement) for statement in module.body]
    head = "".join(module.code_for_node(line) for line in module.header)
    statements, signatures = statement_lines(source), _signature_lines(source)
    places = {
        id(node): place for place, statement in enumerate(module.body) for node in _below(statement)
    }
    for number, mutation in enumerate(visitor.mutations):
        place = places.get(id(mutation.original_node))
        if place is None:
            continue
        statement = module.body[place]
        replaced = deep_replace(statement, mutation.original_node, mutation.mutated_node)
        assert isinstance(replaced, cst.CSTNode)
        text = module.code_for_node(replaced)
        if not _compiles(text):
            continue
        before, after = _difference(texts[place], text)
        if before == after:
            continue
        line = _first_difference(source, head + "".join(texts[:place]), text)
        function = mutation.contained_by_top_level_function
        yield Mutant(
            module=module_name(root, path),
            path=str(path.relative_to(root)),
            number=number,
            line=line,
            statement=statements.get(line, range(0)),
            function="" if function is None or line in signatures else names.get(function, ""),
            is_sql=isinstance(mutation.original_node, cst.BaseString | cst.FormattedStringText)
            and "XX" not in after,
            before=before,
            after=after,
            source=head + "".join([*texts[:place], text, *texts[place + 1 :]]),
        )


def statement_lines(source: str) -> dict[int, range]:
    """Return the lines of the innermost statement of each line, without the statement's body."""
    found: dict[int, range] = {}
    # ast.walk() yields outer statements first.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            first = node.lineno
        elif isinstance(node, ast.match_case):
            first = node.pattern.lineno
        else:
            continue
        body = getattr(node, "body", None)
        last = max(first, body[0].lineno - 1) if body else getattr(node, "end_lineno", first)
        lines = range(first, last + 1)
        found.update(dict.fromkeys(lines, lines))
    return found


def _signature_lines(source: str) -> set[int]:
    """Return the lines of decorators and arguments of the functions that an import defines."""
    found: set[int] = set()
    statements = list(ast.parse(source).body)
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            statements += statement.body
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(node.lineno for node in [statement, *statement.decorator_list])
            found.update(range(first, statement.body[0].lineno))
    return found


def _first_difference(source: str, before: str, text: str) -> int:
    start = before.count("\n")
    lines = zip(source.splitlines()[start:], text.splitlines(), strict=False)
    return start + next(n for n, (old, new) in enumerate([*lines, ("", "x")], 1) if old != new)


def _below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _below(child)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _difference(before: str, after: str) -> tuple[str, str]:
    removed: list[str] = []
    added: list[str] = []
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""):
        if line.startswith(("---", "+++", "@@")):
            continue
        (removed if line[0] == "-" else added).append(line[1:].strip())
    return " / ".join(removed), " / ".join(added)


def _qualified_names(module: cst.Module) -> dict[cst.CSTNode, str]:
    names: dict[cst.CSTNode, str] = {}
    for statement in module.body:
        if isinstance(statement, cst.FunctionDef):
            names[statement] = statement.name.value
        if isinstance(statement, cst.ClassDef):
            for method in statement.body.body:
                if isinstance(method, cst.FunctionDef):
                    names[method] = f"{statement.name.value}.{method.name.value}"
    return names
