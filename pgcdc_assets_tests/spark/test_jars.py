"""Starts of Spark: one resolution of jars at a time, and no resolution of known jars."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pgcdc_assets.spark.jars import (
    CLASS_PATH,
    MASTER,
    PACKAGES,
    cache_folder,
    looking_up_alone,
    remember_jars,
    spark_jars,
    with_known_jars,
)
from pgcdc_assets.spark.settings import DELTA_PACKAGE, embedded_conf, with_user_conf

CONF = {MASTER: "local[2]", PACKAGES: "io.delta:delta-spark:4"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def jars(tmp_path: Path) -> list[Path]:
    """Two resolved jars in a folder with an odd name, which Spark's own jars do not include."""
    folder = tmp_path / "odd, name ü"
    folder.mkdir()
    found = [
        folder / f"io.delta_{name}-4.0.0.jar" for name in ("delta-spark_2.13", "delta-storage")
    ]
    for jar in found:
        jar.write_bytes(b"jar")
    return found


def _resolved(*jars: Path) -> str:
    """Return the jars as Spark does in `spark.jars`."""
    return ",".join(jar.as_uri() for jar in jars)


def test_a_second_start_waits_for_the_first() -> None:
    is_second_in = threading.Event()

    def second() -> None:
        with looking_up_alone():
            is_second_in.set()

    with looking_up_alone():
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not is_second_in.wait(0.3)
    assert is_second_in.wait(60)
    waiting.join()


def test_packages_of_the_user_are_added_to_delta() -> None:
    conf = embedded_conf()
    driver = "org.postgresql:postgresql:42.7.14"
    assert with_user_conf(conf, {PACKAGES: driver})[PACKAGES] == f"{DELTA_PACKAGE},{driver}"
    # Another Delta, jars of the user's own, and a server, which has its jars.
    for packages in (f"{driver},io.delta:delta-spark_4.1_2.13:4.3.0", ""):
        assert with_user_conf(conf, {PACKAGES: packages})[PACKAGES] == packages
    assert with_user_conf({}, {PACKAGES: driver}) == {PACKAGES: driver}
    assert with_user_conf(conf, {MASTER: "local[3]"}) == {**conf, MASTER: "local[3]"}


def test_known_jars_are_on_the_class_path_without_a_resolution(jars: list[Path]) -> None:
    assert with_known_jars(CONF) == CONF
    remember_jars(CONF, _resolved(*jars))
    paths = os.pathsep.join(map(str, jars))
    assert with_known_jars(CONF) == {**CONF, PACKAGES: "", CLASS_PATH: paths}
    given = with_known_jars({**CONF, CLASS_PATH: "/mine.jar"})
    assert given[CLASS_PATH] == f"{paths}{os.pathsep}/mine.jar"
    # Other packages have other jars, and both stay known.
    other = {**CONF, PACKAGES: "io.delta:delta-spark:5"}
    assert with_known_jars(other) == other
    remember_jars(other, _resolved(jars[0]))
    assert with_known_jars(other)[CLASS_PATH] == str(jars[0])
    assert with_known_jars(CONF)[CLASS_PATH] == paths


@pytest.mark.parametrize(
    "setting",
    [
        (MASTER, "spark://host:7077"),
        (MASTER, "yarn"),
        ("spark.jars", "/mine.jar"),
        ("spark.jars.excludes", "a:b"),
        ("spark.jars.repositories", "https://mirror.example"),
    ],
)
def test_jars_of_clusters_and_of_the_users_choice_are_resolved(
    jars: list[Path], setting: tuple[str, str]
) -> None:
    remember_jars(CONF, _resolved(*jars))
    conf = {**CONF, setting[0]: setting[1]}
    assert with_known_jars(conf) == conf


def test_a_session_with_jars_of_the_user_is_not_remembered(jars: list[Path]) -> None:
    remember_jars({**CONF, "spark.jars": "/mine.jar"}, _resolved(*jars))
    remember_jars({MASTER: "local[2]"}, _resolved(*jars))
    remember_jars(CONF, "")
    remember_jars(CONF, "https://host.example/a_b-1.jar")
    assert with_known_jars(CONF) == CONF


def test_a_missing_or_changed_jar_is_resolved_again(jars: list[Path]) -> None:
    remember_jars(CONF, _resolved(*jars))
    jars[1].write_bytes(b"cut")
    assert CLASS_PATH in with_known_jars(CONF)
    jars[1].write_bytes(b"of another size")
    assert with_known_jars(CONF) == CONF
    remember_jars(CONF, _resolved(*jars))
    assert CLASS_PATH in with_known_jars(CONF)
    jars[1].unlink()
    assert with_known_jars(CONF) == CONF


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', "null"])
def test_a_damaged_file_is_replaced(jars: list[Path], content: str) -> None:
    remember_jars(CONF, _resolved(*jars))
    (cache_folder() / "spark-jars.json").write_text(content)
    assert with_known_jars(CONF) == CONF
    remember_jars(CONF, _resolved(*jars))
    assert CLASS_PATH in with_known_jars(CONF)


def test_a_jar_that_spark_has_in_any_version_is_left_out(jars: list[Path]) -> None:
    """The class path precedes Spark's jars, so another version would replace Spark's."""
    own = next(jar for jar in spark_jars() if jar.name.startswith("jackson-databind-"))
    older = jars[0].with_name("com.fasterxml.jackson.core_jackson-databind-2.0.0.jar")
    facade = jars[0].with_name("commons-logging_commons-logging-1.3.0.jar")
    for jar in (older, facade):
        jar.write_bytes(b"jar")
    assert own.name != "jackson-databind-2.0.0.jar"
    remember_jars(CONF, _resolved(older, jars[0], facade))
    assert with_known_jars(CONF)[CLASS_PATH] == str(jars[0])


def test_spark_starts_without_a_writable_cache(
    jars: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with looking_up_alone():
        remember_jars(CONF, _resolved(*jars))
        assert with_known_jars(CONF) == CONF
