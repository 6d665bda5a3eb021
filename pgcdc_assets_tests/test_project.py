"""Rules of the project: format, types, layers, module sizes, documents."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from graphlib import CycleError
from pathlib import Path

import pytest

import pgcdc_assets
from pgcdc_assets_tests.support.imports import imports_of, longest_chains
from pgcdc_assets_tests.support.syntax import syntax_tree

ROOT = Path(__file__).resolve().parents[1]
MAX_LINE_COUNT = 400
# From `merge.run` down.
MAX_FLOORS_OF_A_MERGE = 8

PYTHON_FILES = sorted(
    path
    for folder in ("pgcdc_assets", "pgcdc_assets_tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def run(*command: str) -> str:
    """Run a tool in the project's folder, return its output, and fail with it."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ruff_finds_nothing() -> None:
    run("-m", "ruff", "check", "--no-cache", ".")


def test_the_code_is_formatted() -> None:
    run("-m", "ruff", "format", "--check", "--no-cache", ".")


def test_mypy_finds_nothing_in_strict_mode() -> None:
    files = [*PYTHON_FILES, *(ROOT / "docs").rglob("*.py")]
    assert f"no issues found in {len(files)} source files" in run("-m", "mypy")


def test_type_checkers_see_the_signatures_of_the_public_names(tmp_path: Path) -> None:
    # The test group prevents two concurrent runs of mypy, which would share a cache.
    names = [name for name in pgcdc_assets.__all__ if name != "__version__"]
    program = tmp_path / "typed.py"
    program.write_text(
        f"from pgcdc_assets import {', '.join(names)}\n"
        + "".join(f"reveal_type({name})\n" for name in names)
        + "build_cdc_definitions(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    revealed = [line for line in done.stdout.splitlines() if "Revealed type is" in line]
    assert len(revealed) == len(names), done.stdout + done.stderr
    assert [line for line in revealed if '"Any"' in line] == []
    (signature,) = (line for line in revealed if "capture: pgcdc_assets." in line)
    assert signature.endswith('-> dagster._core.definitions.definitions_class.Definitions"')
    assert 'incompatible type "int"; expected "CdcCapture"' in done.stdout


def test_imports_follow_the_layers() -> None:
    run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo")


def test_no_modules_import_each_other_and_a_merge_has_few_floors() -> None:
    """docs/decisions/0089-layers-of-a-merge.md"""
    imports = imports_of("pgcdc_assets")
    assert len(imports) > 300
    with pytest.raises(CycleError):
        longest_chains({**imports, "pgcdc_assets.lsn": {"pgcdc_assets.merge.run"}}, "pgcdc_assets")
    chain = longest_chains(imports, "pgcdc_assets.merge.")["pgcdc_assets.merge.run"]
    assert len(chain) <= MAX_FLOORS_OF_A_MERGE, " -> ".join(chain)


def test_no_module_is_too_long() -> None:
    counts = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in PYTHON_FILES}
    assert len(counts) > 100
    assert {path: count for path, count in counts.items() if count > MAX_LINE_COUNT} == {}


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in PYTHON_FILES
        if path.stat().st_size and ast.get_docstring(syntax_tree(path)) is None
    ]
    assert silent == []


def make_targets() -> set[str]:
    """Return the targets of the Makefile that `make help` lists."""
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_no_message_tells_users_of_a_wheel_to_use_make() -> None:
    targets = make_targets()
    assert {"demo", "dev", "install", "test"} <= targets
    to_make = re.compile(rf"\bmake ({'|'.join(targets)})\b")
    found = []
    for path in (ROOT / "pgcdc_assets").rglob("*.py"):
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(syntax_tree(path))
            if isinstance(node, ast.Constant) and to_make.search(str(node.value))
        ]
    for path in (ROOT / "pgcdc_assets").rglob("*.yaml"):
        found += [str(path.relative_to(ROOT))] * bool(to_make.search(path.read_text()))
    assert found == []


def test_no_file_contains_a_path_of_a_machine_or_a_todo() -> None:
    suspicious = re.compile(r"\bTODO\b|\bFIXME\b|\bXXX\b|/home/\w|/root/")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*PYTHON_FILES, *DOCUMENTS]
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if suspicious.search(line)
    ]
    assert found == []


def shell_lines(document: Path) -> list[str]:
    """Return the lines of a document's shell blocks, and its inline code."""
    text = document.read_text()
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", text)


def test_commands_in_the_documents_exist() -> None:
    targets = make_targets()
    missing = []
    for document in DOCUMENTS:
        for line in shell_lines(document):
            target = re.match(r"make ([a-z-]+)", line)
            if target and target[1] not in targets:
                missing.append(f"{document.relative_to(ROOT)}: {target[0]}")
            module = re.search(r"python3? -m ([a-z_.]+)", line)
            if module and module[1] != "venv" and importlib.util.find_spec(module[1]) is None:
                missing.append(f"{document.relative_to(ROOT)}: {module[0]}")
    assert not missing, "\n".join(missing)


def test_links_in_the_documents_are_not_broken() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {link}"
        for document in DOCUMENTS
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text())
        if not re.match(r"[a-z]+://", link) and not (document.parent / link).exists()
    ]
    assert not broken, "\n".join(broken)


def test_make_help_lists_the_targets_of_the_readme() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    names = {line.split()[0] for line in listed.splitlines()}
    assert names >= {
        "install",
        "format",
        "lint",
        "test",
        "test-all",
        "demo",
        "dev",
        "bench",
        "help",
    }
