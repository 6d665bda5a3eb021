"""The process of a Spark Connect server: how it is started, and how it is known again.

A process counts as the server if its pid is alive and its command line names the server's port: a
pid that was given anew to another program is neither used nor ended.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pgcdc_assets.errors import ConfigurationError

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_PORT_SETTING = "spark.connect.grpc.binding.port"

_SECONDS_TO_STOP = 30.0
_POLL_SECONDS = 0.05

# What would make Spark's own scripts take this process for a client of another server.
_NOT_INHERITED = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_API_MODE")


@dataclass(frozen=True)
class RunningServer:
    """A server's process, as the state file describes it.

    Attributes:
        token: what a client has to know.
        started_at: seconds since the epoch.
        ready: whether a client's query has worked.
    """

    pid: int
    port: int
    token: str
    started_at: float
    ready: bool = False

    @property
    def address(self) -> str:
        """Where it listens, to show to people."""
        return f"sc://localhost:{self.port}"

    @property
    def remote(self) -> str:
        """What a client connects to; it holds the token.

        By name: PySpark sends a token without TLS to `localhost` only.
        """
        return f"{self.address}/;token={self.token}"

    @property
    def uptime_seconds(self) -> float:
        """Time since its start."""
        return max(0.0, time.time() - self.started_at)

    @property
    def resident_bytes(self) -> int:
        """Memory of the process and its children."""
        total = 0
        for process in self._family():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total

    def is_alive(self) -> bool:
        """Whether the process is there, and is the server: a zombie or a stranger is not."""
        try:
            command = psutil.Process(self.pid).cmdline()
        except psutil.Error:
            return False
        return _CLASS in command and f"{_PORT_SETTING}={self.port}" in command

    def answers(self) -> bool:
        """Whether its port takes connections."""
        with socket.socket() as client:
            client.settimeout(1)
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        """End the process and its children, by force if they do not go; nothing if it is gone.

        Spark's scripts start helpers of their own on the way to the server, and may do so while
        they are being ended: the process group, which is the server's own, has them all.
        """
        if not self.is_alive():
            return
        family = self._family()
        _send(self.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=_SECONDS_TO_STOP)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=_SECONDS_TO_STOP)
        deadline = time.monotonic() + _SECONDS_TO_STOP
        while _send(self.pid, signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _family(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.Error:
            return []


def launch(conf: Mapping[str, str], token: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a server's process; it works in the folder and adds to the log.

    Raises:
        ConfigurationError: this Python has no PySpark with a server in it.
    """
    home = _spark_home()
    command = [str(home / "bin" / "spark-submit"), "--class", _CLASS, "--name", "pgcdc"]
    for name, value in conf.items():
        command += ["--conf", f"{name}={value}"]
    # What Spark reports of a failed query may quote values: the log is for this user only.
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [*command, "spark-internal"],
            cwd=folder,
            env={
                **{name: v for name, v in os.environ.items() if name not in _NOT_INHERITED},
                "SPARK_HOME": str(home),
                # Not on the command line, which is for everybody to read.
                "SPARK_CONNECT_AUTHENTICATE_TOKEN": token,
                "PYSPARK_PYTHON": sys.executable,
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A Ctrl-C is for the command in the foreground; and `end` goes by the group.
            start_new_session=True,
        )
    finally:
        os.close(output)


def _spark_home() -> Path:
    """The folder of the PySpark that this Python would import."""
    found = importlib.util.find_spec("pyspark")
    home = Path(found.origin).parent if found is not None and found.origin is not None else None
    if home is None or not any(home.glob("jars/spark-connect_*.jar")):
        raise ConfigurationError(
            reason="This Python has no PySpark with a Spark Connect server in it: install the "
            "package pyspark in the version that setup.cfg names"
        )
    return home


def _send(group: int, number: signal.Signals) -> bool:
    """Signal a process group; whether there was anybody in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
