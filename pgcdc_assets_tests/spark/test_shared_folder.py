"""A state folder that several machines, containers and releases use for their Spark servers."""

from __future__ import annotations

import fcntl
import json
import tempfile
import time
from pathlib import Path

import pytest

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.processes import ProcessIdentity, ProcessNamespace, this_namespace
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets_tests.support.access import without_access

_HERE = this_namespace()
_OTHER_MACHINE = ProcessNamespace("other", "8a5c6d8e-boot", "4026531836")
_OTHER_CONTAINER = ProcessNamespace("other", _HERE.boot, "1")
_CONTAINER_OF_THIS_NAME = ProcessNamespace(_HERE.host, _HERE.boot, "1")
_BEFORE_A_RESTART = ProcessNamespace(_HERE.host, "8a5c6d8e-boot", _HERE.namespace)
_OTHER_NAME_BEFORE = ProcessNamespace("laptop", _HERE.boot, _HERE.namespace)


def write_server(folder: Path, place: ProcessNamespace) -> SparkServer:
    """Write the files of a ready server whose process id is that of no server here."""
    server = SparkServer(folder)
    fields = {"pid": 1, "port": 15002, "token": "t", "started_at": time.time(), "ready": True}
    process = str(ProcessIdentity(place, 1, "123"))
    server.state_file.write_text(json.dumps({**fields, "process": process}))
    server.work_folder.mkdir()
    (server.work_folder / "block").write_bytes(b"x")
    server.alive_file.touch()
    return server


def files_of(server: SparkServer) -> list[Path]:
    files = [*server.folder.rglob("*")]
    return sorted(file for file in files if file.suffix != ".lock")


@pytest.mark.parametrize(
    "place",
    [_OTHER_MACHINE, _OTHER_CONTAINER, _CONTAINER_OF_THIS_NAME],
    ids=["machine", "container", "same name"],
)
def test_the_server_of_another_machine_or_container_is_neither_used_nor_ended(
    tmp_path: Path, place: ProcessNamespace
) -> None:
    server = write_server(tmp_path, place)
    before = files_of(server)
    with server.alive_file.open("rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        assert server.find() is None
        assert server.usable() is None
        for call in (server.check_own, server.stop, server.start):
            with pytest.raises(ConfigurationError, match=f"container, {place.host}") as raised:
                call()
            assert str(server.state_file) in str(raised.value)
    assert files_of(server) == before


@pytest.mark.parametrize(
    "place",
    [_OTHER_CONTAINER, _CONTAINER_OF_THIS_NAME, _BEFORE_A_RESTART, _OTHER_NAME_BEFORE],
    ids=["container", "same name", "restart", "renamed"],
)
def test_the_files_of_an_ended_server_are_deleted(tmp_path: Path, place: ProcessNamespace) -> None:
    server = write_server(tmp_path, place)
    server.check_own()
    assert server.stop() is None
    assert files_of(server) == []


@pytest.mark.parametrize("name", ["spark-server.json", "spark-server.lock"])
def test_the_server_of_another_user_is_neither_used_nor_ended(name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="pgcdc-test-shared-") as folder:
        Path(folder).chmod(0o755)
        server = SparkServer(Path(folder))
        file = server.folder / name
        file.write_text("")
        with without_access(file):
            assert server.usable() is None
            for call in (server.stop, server.start):
                with pytest.raises(ConfigurationError, match="belongs to another user") as raised:
                    call()
                assert str(file) in str(raised.value)
        assert file.exists()
