"""`pgcdc spark prepare`, and sessions with an archive of classes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.cli import spark_prepare
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.spark.class_archive import (
    JAVA_OPTIONS,
    archive_path,
    delete_unused_archives,
    with_archive,
)
from pgcdc_assets.spark.jars import CLASS_PATH, PACKAGES, cache_folder
from pgcdc_assets.spark.java import find_java
from pgcdc_assets.spark.settings import embedded_conf, start_conf

CONF = {JAVA_OPTIONS: "-Xmn100m"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def _plant(content: bytes = b"cut off") -> Path:
    archive = archive_path(CONF)
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(content)
    return archive


def test_a_session_maps_the_archive_of_its_class_path(cache: Path) -> None:
    assert with_archive(CONF) == CONF
    archive = _plant()
    assert with_archive(CONF)[JAVA_OPTIONS].startswith(f"-Xmn100m -XX:SharedArchiveFile={archive} ")
    # Another class path, and options of the user, are left alone.
    for conf in ({**CONF, CLASS_PATH: "/a.jar"}, {JAVA_OPTIONS: "-XX:SharedArchiveFile=/mine.jsa"}):
        assert with_archive(conf) == conf


def test_the_archives_that_were_used_last_are_kept(cache: Path) -> None:
    """An installation that others follow would otherwise lose the archive that it uses each day."""
    used = _plant()
    os.utime(used, (1, 1))
    others = [used.with_name(f"other_{number}.jsa") for number in range(4)]
    for number, other in enumerate(others):
        other.touch()
        os.utime(other, (100 + number, 100 + number))
    with_archive(CONF)
    delete_unused_archives()
    assert {path.name for path in used.parent.glob("*.jsa")} == {
        used.name,
        "other_2.jsa",
        "other_3.jsa",
    }


def test_a_path_that_java_options_cannot_contain_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "with space"))
    _plant()
    assert with_archive(CONF) == CONF


def test_an_archive_that_cannot_be_mapped_has_no_effect(cache: Path) -> None:
    _plant()
    java = find_java()
    assert java is not None
    done = subprocess.run(
        [java, *with_archive(CONF)[JAVA_OPTIONS].split(), "-version"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""
    assert "archive" not in done.stderr


def test_a_missing_java_is_named_by_prepare_and_prevents_no_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(cache / "nothing"))
    assert with_archive(CONF) == CONF
    with pytest.raises(ConfigurationError, match="JAVA_HOME is"):
        spark_prepare.prepare_spark()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="XDG_CACHE_HOME"):
        spark_prepare.prepare_spark()


@pytest.mark.spark
def test_the_sessions_of_the_tests_use_what_prepare_wrote(spark: SparkSession) -> None:
    if not (cache_folder() / "java-classes").exists():
        pytest.skip("pgcdc spark prepare has not run for this user, which make test does")
    options = spark.conf.get(JAVA_OPTIONS) or ""
    assert "-XX:SharedArchiveFile=" in options
    assert spark.conf.get(PACKAGES, "") == ""


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.slow
def test_prepare_makes_a_new_process_load_its_classes_from_the_archive(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JDK_JAVA_OPTIONS")
    archive, is_new = spark_prepare.prepare_spark()
    assert (archive.exists(), is_new) == (True, True)
    assert spark_prepare.prepare_spark() == (archive, False)
    assert with_archive(start_conf(embedded_conf()))[JAVA_OPTIONS].count(str(archive)) == 1
    log = cache / "classes.log"
    monkeypatch.setenv("JDK_JAVA_OPTIONS", f"-Xlog:class+load:file={log}")
    session = "from pgcdc_assets.spark.session import spark_session as session"
    code = f"{session}; session('x').range(3).count()"
    subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)
    loaded = log.read_text()
    mapped = re.findall(r"source: shared objects file \(top\)", loaded)
    assert len(mapped) > len(re.findall(r"source: (?:file|jrt):", loaded)) * 4
    # Delta's classes are mapped too, because Delta is on the class path.
    assert re.search(r" io\.delta\.sql\.\S+ source: shared objects file \(top\)", loaded)
