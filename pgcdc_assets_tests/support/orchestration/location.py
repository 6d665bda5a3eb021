"""A code location in a Python module, and the environment of its commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets_tests.support.database import Database


def write_location(
    database: Database,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    lake: str = "lake",
) -> str:
    """Write a code location, and point the environment to the database and an empty lake.

    Args:
        folder: folder for the module, the Dagster home and the lake.
        code: Python code that defines `defs`.
        lake: name of the lake's folder.

    Returns:
        The name of the module, for `-m`.
    """
    name = f"location_{database.name}"
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    home = folder / "dagster"
    home.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("PGCDC_LAKE", str(folder / lake))
    monkeypatch.setenv("PGCDC_DSN", database.conninfo)
    return name
