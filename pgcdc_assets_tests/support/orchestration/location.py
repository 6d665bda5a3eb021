"""A code location in a Python module, and the environment of its commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pgcdc_assets_tests.support.database import Database

_OVER_DEFS = """
from pathlib import Path
from pgcdc_assets.orchestration.project.code_location import load_defs_folders

defs = load_defs_folders([Path({folder!r})])
"""


@dataclass(frozen=True)
class Locations:
    """Writes code locations into a folder, with the Dagster home and the lake beside them."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def defs(self) -> Path:
        """The folder of `write_over_defs`, for `pgcdc init`."""
        return self.folder / "defs"

    def write(self, database: Database, code: str, lake: str = "lake") -> str:
        """Write a code location, and point the environment to the database and an empty lake.

        Args:
            code: Python code that defines `defs`.
            lake: name of the lake's folder.

        Returns:
            The name of the module, for `-m`.
        """
        name = f"location_{database.name}"
        (self.folder / f"{name}.py").write_text(code)
        self.monkeypatch.syspath_prepend(str(self.folder))
        home = self.folder / "dagster"
        home.mkdir()
        self.monkeypatch.setenv("DAGSTER_HOME", str(home))
        self.monkeypatch.setenv("PGCDC_LAKE", str(self.folder / lake))
        self.monkeypatch.setenv("PGCDC_DSN", database.conninfo)
        return name

    def write_over_defs(self, database: Database, lake: str = "lake") -> str:
        """Write a code location over the folder `defs`, and set the environment by `write`."""
        return self.write(database, _OVER_DEFS.format(folder=str(self.defs)), lake)


@pytest.fixture
def locations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_dagster_storage: None
) -> Locations:
    """Write code locations into the test's folder."""
    return Locations(tmp_path, monkeypatch)
