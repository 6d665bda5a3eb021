"""The names that `pgcdc_assets` exports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import pgcdc_assets
from pgcdc_assets_tests.support.syntax import syntax_tree

ROOT = Path(__file__).resolve().parents[1]
SUBMODULES = {path.stem for path in (ROOT / "pgcdc_assets").iterdir()}


def names_for_type_checkers() -> dict[str, str]:
    """Return the names that the package imports for type checkers, each with its module."""
    tree = syntax_tree(ROOT / "pgcdc_assets" / "__init__.py")
    return {
        alias.name: node.module or ""
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_all_lists_the_names_for_type_checkers() -> None:
    exported = [name for name in pgcdc_assets.__all__ if not name.startswith("__")]
    assert sorted(exported) == sorted(names_for_type_checkers())
    assert len(set(pgcdc_assets.__all__)) == len(pgcdc_assets.__all__)


def test_all_lists_the_existing_names() -> None:
    modules = names_for_type_checkers()
    for name in pgcdc_assets.__all__:
        value = getattr(pgcdc_assets, name)
        assert name == "__version__" or value is getattr(sys.modules[modules[name]], name)
    # `annotations` comes from the __future__ import. Dagster searches these names for components.
    public = {name for name in dir(pgcdc_assets) if not name.startswith("_")} - SUBMODULES
    helpers = {"annotations", "importlib", "TYPE_CHECKING"}
    assert public - helpers == set(pgcdc_assets.__all__) - {"__version__"}


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pgcdc_assets.nothing  # type: ignore[attr-defined]
