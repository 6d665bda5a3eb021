"""A project in which the commands run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets_tests.support.database import Database


@pytest.fixture
def project(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty project of the database, and make it the current folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PGCDC_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("PGCDC_DSN", database.conninfo)
    return folder
