"""Concurrent starts of Spark: one process at a time fills the cache of jars."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pgcdc_assets.spark.jars import looking_up_alone


def test_a_second_start_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    is_second_in = threading.Event()

    def second() -> None:
        with looking_up_alone():
            is_second_in.set()

    with looking_up_alone():
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not is_second_in.wait(0.3)
    assert is_second_in.wait(10)
    waiting.join()


def test_spark_starts_without_a_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with looking_up_alone():
        pass
