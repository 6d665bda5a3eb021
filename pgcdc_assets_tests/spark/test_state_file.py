"""State files of a Spark server that were edited, truncated or written by another program."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.processes import ProcessIdentity
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets_tests.support.full_disk import full_disk

_FIELDS: dict[str, Any] = {
    "pid": 1,
    "port": 15002,
    "token": "t",
    "started_at": time.time(),
    "ready": True,
    "process": str(ProcessIdentity.of()),
}
_WHOLE = json.dumps(_FIELDS)


def _with(**values: Any) -> bytes:
    return json.dumps({**_FIELDS, **values}).encode()


MALFORMED = {
    "empty": b"",
    "truncated": _WHOLE[:40].encode(),
    "not UTF-8": b"\xff\xfe{}",
    "a list": b"[1, 2]",
    "a number": b"3",
    "no field": b"{}",
    "pid of text": _with(pid="one"),
    "no pid": _with(pid=None),
    "negative pid": _with(pid=-3),
    "port of text": _with(port="x"),
    "port out of range": _with(port=70000),
    "time of text": _with(started_at="yesterday"),
    "no time": _with(started_at=float("nan")),
    "process of a number": _with(process=7),
    "stores of a number": _with(stores=7),
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_of_an_ended_server_is_ignored_and_deleted(
    tmp_path: Path, name: str
) -> None:
    server = SparkServer(tmp_path)
    server.state_file.write_bytes(MALFORMED[name])
    server.alive_file.touch()
    assert server.usable() is None
    server.check_own()
    assert server.stop() is None
    assert not server.state_file.exists()


@pytest.mark.parametrize("name", ["truncated", "pid of text"])
def test_a_malformed_file_of_a_running_server_is_named_with_the_remedy(
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server would otherwise run without a client, and a second one beside it."""
    server = SparkServer(tmp_path)
    server.state_file.write_bytes(MALFORMED[name])
    server.alive_file.touch()
    with server.alive_file.open("rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        assert server.usable() is None
        for call in (server.check_own, server.stop, server.start):
            with pytest.raises(ConfigurationError, match=r"spark-server\.json is malformed"):
                call()
        monkeypatch.setenv("PGCDC_STATE", str(tmp_path))
        for command in ("start", "status", "stop"):
            assert main(["spark", command]) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1, error
            assert "then delete the file" in error
    assert server.state_file.exists()


def test_a_start_on_a_full_disk_names_the_folder_and_leaves_no_server(tmp_path: Path) -> None:
    """It was an unexpected error."""
    server = SparkServer(tmp_path)
    with full_disk(), pytest.raises(TransientError, match="Free space on its disk") as raised:
        server.start()
    assert str(tmp_path) in str(raised.value)
    assert server.find() is None
    assert not server.state_file.exists()
