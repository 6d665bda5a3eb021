"""Without a suitable Java, the error names the Java that was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.spark.java import check_java


def write_java(home: Path, version: str, status_of_others: int = 0) -> None:
    """Write a program that prints this version of Java."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        '#!/bin/sh\n[ "$1" = -version ] || exit '
        f"{status_of_others}\necho 'openjdk version \"{version}\"' >&2\n"
    )
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("version", "shown"), [("1.8.0_392", "8"), ("11.0.2", "11"), ("16-ea", "16")]
)
def test_the_error_names_the_version_of_an_old_java(
    version: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"bin/java is Java {shown}. Install Java 17"):
        check_java()


@pytest.mark.parametrize("version", ["17", "17.0.9", "21.0.1", "25.0.1"])
def test_a_suitable_java_is_accepted(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_java(tmp_path, version)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    check_java()


def test_the_error_names_a_java_home_without_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"JAVA_HOME is {tmp_path}.*or unset JAVA_HOME"):
        check_java()


def test_a_missing_java_is_an_error_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"no java is on the PATH\. Install Java 17 or 21"):
        check_java()


def test_the_error_names_a_program_that_is_not_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("not a program")
    (tmp_path / "bin" / "java").chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="prints no version"):
        check_java()
