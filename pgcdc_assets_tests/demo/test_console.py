"""Sizes, tables and progress that the demonstration prints, and its start and end."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from pgcdc_assets.cli.tables import duration, size
from pgcdc_assets.demo.__main__ import main
from pgcdc_assets.demo.console import print_progress, table
from pgcdc_assets.demo.dev import run_dev
from pgcdc_assets.demo.stage import FOLDER, stage
from pgcdc_assets.errors import ConfigurationError


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [(0, "0 B"), (999, "999 B"), (4_800, "4.8 kB"), (1_200_000, "1.2 MB"), (3e12, "3000.0 GB")],
)
def test_sizes_are_printed_with_units(byte_count: float, text: str) -> None:
    assert size(byte_count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (273_700, "3 d 4 h")],
)
def test_durations_are_printed_with_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_table_aligns_names_left_and_figures_right() -> None:
    assert table(("table", "rows"), [("orders", 12_345), ("x", 1)]).splitlines() == [
        "table     rows",
        "------  ------",
        "orders  12,345",
        "x            1",
    ]


def test_progress_continues_after_an_error_of_its_description(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = threading.Semaphore(0)

    def describe() -> str:
        asked.release()
        raise OSError("gone")

    with print_progress(describe, every_seconds=0.01):
        for _ in range(3):
            assert asked.acquire(timeout=120)
    assert "no news (OSError)" in capsys.readouterr().out


def test_a_second_demonstration_in_one_clone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    monkeypatch.setattr("pgcdc_assets.demo.stage.state_folder", lambda: tmp_path)
    with (tmp_path / "demo.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with (
            pytest.raises(ConfigurationError, match="stop it first"),
            stage(FOLDER, fresh=False, scale=0.01),
        ):
            pass
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        assert main(["demo"]) == 2
    assert "stop it first" in capsys.readouterr().err
    # A caller's process gets its handlers back.
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_used_port_is_an_error_before_the_start() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} .* --port"):
            run_dev(connections=1, rate=1, scale=0.01, port=port)
