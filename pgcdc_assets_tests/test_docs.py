"""The documentation builds without a warning and agrees with the code."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import pgcdc_assets
from pgcdc_assets_tests.support.syntax import syntax_tree

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outdated_pages(generator: ModuleType, folder: Path) -> list[str]:
    """Return the pages of a folder whose generated parts differ from the code."""
    pages = generator.generate(folder)
    return [str(path.relative_to(folder)) for path in pages if path.read_text() != pages[path]]


def test_no_page_shows_a_placeholder_of_a_help_text() -> None:
    assert "%(" not in (DOCS / "reference/cli.md").read_text()


def test_generated_parts_are_up_to_date(generator: ModuleType) -> None:
    assert outdated_pages(generator, DOCS) == [], "run: make docs"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("reference/settings.md", "Maximum size of a window"),
        ("reference/cli.md", "replace an existing defs.yaml"),
        ("decisions/README.md", "(0001-stream-over-psycopg-3.md)"),
    ],
)
def test_an_edited_generated_part_is_out_of_date(
    generator: ModuleType, tmp_path: Path, page: str, text: str
) -> None:
    folder = shutil.copytree(DOCS, tmp_path / "docs")
    edited = folder / page
    assert text in edited.read_text()
    edited.write_text(edited.read_text().replace(text, "other"))
    assert outdated_pages(generator, folder) == [page]


def build_site(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = build_site(ROOT, tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "repository" / "CHANGELOG.html").exists()
    assert (tmp_path / "repository" / "pgcdc_assets" / "raw" / "maintenance.py").exists()
    page = (tmp_path / "reference" / "python.html").read_text()
    names = set(pgcdc_assets.__all__) - {"__version__"}
    documented = {
        name.rpartition(".")[2] for name in re.findall(r'id="(pgcdc_assets[.\w]+)"', page)
    }
    assert names - documented == set()


def test_the_index_links_every_page() -> None:
    index = (DOCS / "index.md").read_text()
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"index.md"}
    records = {page for page in pages if page.startswith("decisions/0")}
    assert {page for page in pages - records if f"]({page})" not in index} == set()


def test_broken_links_and_anchors_fail_the_build(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "pgcdc_assets").symlink_to(ROOT / "pgcdc_assets")
    for path in ROOT.glob("*.md"):
        shutil.copy(path, tmp_path)
    page = tmp_path / "docs" / "guides" / "recover.md"
    page.write_text(
        page.read_text()
        + "\n[a](nothing.md) [b](operate.md#nothing) [c](../../nothing.py) [d](../../README.md#e)\n"
    )
    built = build_site(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    for link in ("nothing.md", "operate.md#nothing", "repository/nothing.py", "README.md#e"):
        assert re.search(rf"guides/recover.md.*{re.escape(link)}", built.stderr), built.stderr


def metadata_names() -> set[str]:
    """Return the names of metadata entries in the code."""
    names: set[str] = set()
    for path in (ROOT / "pgcdc_assets" / "orchestration").rglob("*.py"):
        for node in ast.walk(syntax_tree(path)):
            names |= set(_constants(node))
    return names


def _constants(node: ast.AST) -> Iterator[str]:
    """Find the keys of dicts that are named metadata or returned by a function with this name."""
    named = re.compile(r"(metadata|figures|state)$")
    dicts: list[ast.expr | None] = []
    if isinstance(node, ast.keyword) and node.arg == "metadata":
        dicts.append(node.value)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and named.search(target.id):
                dicts.append(node.value)
            elif isinstance(target, ast.Subscript) and named.search(ast.unparse(target.value)):
                if isinstance(target.slice, ast.Constant):
                    yield str(target.slice.value)
    elif isinstance(node, ast.FunctionDef) and named.search(node.name):
        dicts += [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
    for found in dicts:
        if isinstance(found, ast.Dict):
            for key in found.keys:
                if isinstance(key, ast.Constant):
                    yield str(key.value)


def test_the_page_of_metrics_lists_the_metadata_of_the_code() -> None:
    from pgcdc_assets.orchestration.metadata import THROUGH_METADATA
    from pgcdc_assets.verify.findings import Rule

    page = (DOCS / "reference" / "metrics.md").read_text()
    names = metadata_names() | {THROUGH_METADATA} | {rule.value for rule in Rule}
    of_specs = {"dagster/table_name", "dagster/code_references", "publication", "slot"}
    of_specs |= {"key_columns", "tracked_columns"}
    assert {name for name in names - of_specs if f"`{name}`" not in page} == set()
    rows = [line for line in page.splitlines() if re.match(r"\| [`|]", line)]
    listed = {
        name for line in rows for name in re.findall(r"`([a-z0-9_/]+)`", line.split(" | ")[0])
    }
    assert len(listed) > 50
    # Entries that are not in a dict: totals by operation, timestamps, names of checks.
    others = {"inserts", "updates", "deletes", "truncates", "messages", "parked_rows"}
    others |= {
        "first_commit",
        "last_commit",
        "slot_health",
        "source_table",
        "replica_identity",
        "equals_source",
        "registered",
    }
    others |= {
        "windows_without_gaps",
        "rows_as_decoded",
        "no_parked_rows",
        "invariants",
        "invariants_in_full",
    }
    assert listed - names - others == set()


def messages() -> str:
    """Return the messages of the package, with ... in place of values."""
    texts = []
    for path in (ROOT / "pgcdc_assets").rglob("*.py"):
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"\{[^}]*\}", "...", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (n.value if isinstance(n, ast.Constant) else "..." for n in node.values)
                texts.append("".join(map(str, parts)))
    return "\n".join(texts)


def test_the_guides_quote_messages_of_the_code() -> None:
    rows = [
        line.split(" | ")[0]
        for guide in sorted((DOCS / "guides").glob("*.md"))
        for line in guide.read_text().splitlines()
        if line.startswith("| ")
    ]
    quoted = [text for row in rows for text in re.findall(r'"([^"]+)"', row)]
    assert len(quoted) >= 10
    known = messages().lower()
    parts = {part.strip().lower() for text in quoted for part in text.split("...")}
    assert {part for part in parts if part not in known} == set()


def test_the_settings_page_lists_every_environment_variable() -> None:
    page = (DOCS / "reference" / "settings.md").read_text()
    used = set()
    for path in (ROOT / "pgcdc_assets").rglob("*.py"):
        used |= set(re.findall(r'"(PGCDC_[A-Z_]+)"', path.read_text()))
    assert {name for name in used if f"`{name}`" not in page} <= {"PGCDC_FAILPOINT"}


def purposes() -> set[str]:
    """Return the purposes of the connections in the code: the texts among the arguments."""
    found = set()
    for path in (ROOT / "pgcdc_assets").rglob("*.py"):
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                if name in ("connect", "conninfo_for", "open_session", "query_connection"):
                    found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return {str(each) for each in found}


def test_the_guide_lists_the_purpose_of_every_session() -> None:
    """B18."""
    guide = (DOCS / "guides" / "your-database.md").read_text()
    section = guide.partition("## Sessions of a capture")[2].partition("\n## ")[0]
    listed = {
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert listed == purposes()
