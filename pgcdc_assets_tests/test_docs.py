"""The documentation agrees with the code: generated parts, environment variables."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

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
    """Return the pages of a folder whose generated parts differ from what the code gives."""
    pages = generator.generate(folder)
    return [str(path.relative_to(folder)) for path in pages if path.read_text() != pages[path]]


def test_generated_parts_are_up_to_date(generator: ModuleType) -> None:
    assert outdated_pages(generator, DOCS) == [], "run: python docs/generate.py"


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


def test_the_settings_page_lists_every_environment_variable() -> None:
    page = (DOCS / "reference" / "settings.md").read_text()
    used = set()
    for path in (ROOT / "pgcdc_assets").rglob("*.py"):
        used |= set(re.findall(r'"(PGCDC_[A-Z_]+)"', path.read_text()))
    assert {name for name in used if f"`{name}`" not in page} <= {"PGCDC_FAILPOINT"}
