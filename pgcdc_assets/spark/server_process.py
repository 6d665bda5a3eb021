"""The process of a Spark Connect server: start, identification and end.

A process is the server if its pid is alive since the recorded time, and its command line contains
the server's port. If the pid was reused by another program, this program is neither used nor ended.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.processes import ProcessIdentity

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_PORT_SETTING = "spark.connect.grpc.binding.port"

_SECONDS_TO_STOP = 30.0
_POLL_SECONDS = 0.05

# A shell that becomes the following command after a line of its standard input. At the end of the
# input, such as by the end of the process that writes it, the shell ends.
_AFTER_A_LINE = ("/bin/sh", "-c", 'read -r line && exec "$@" </dev/null', "sh")

# Variables that make Spark's scripts start a client of another server.
_NOT_INHERITED = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_API_MODE")


@dataclass(frozen=True)
class RunningServer:
    """A server's process, with the fields of the state file.

    Attributes:
        pid: pid of the process, which leads its process group.
        port: TCP port on 127.0.0.1.
        token: the secret of the server's clients.
        started_at: seconds since 1970.
        ready: a client's query has succeeded.
        stores: the object stores whose connectors the server has (`store_of`).
        has_hive: the catalog of the server's sessions is a Hive metastore.
        process: the text of the process's `ProcessIdentity`; empty in a file of an early release.
    """

    pid: int
    port: int
    token: str
    started_at: float
    ready: bool = False
    stores: Sequence[str] = ()
    has_hive: bool = False
    process: str = ""

    @classmethod
    def parse(cls, text: str) -> RunningServer | None:
        """Parse the text of a state file; None for text of another form."""
        try:
            fields = json.loads(text)
            # Another release may have started the server.
            server = cls(**{name: fields[name] for name in cls.__annotations__ if name in fields})
        except (ValueError, TypeError, RecursionError):
            return None
        return server if server._has_valid_fields() else None

    def _has_valid_fields(self) -> bool:
        if not isinstance(self.stores, list | tuple):
            return False
        texts = [self.token, self.process, *self.stores]
        return (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(number, int) for number in (self.pid, self.port))
            and isinstance(self.started_at, int | float)
            and self.pid > 0
            and 0 < self.port < 65536
            and math.isfinite(self.started_at)
        )

    @property
    def address(self) -> str:
        """The server's address without the token, for display."""
        return f"sc://localhost:{self.port}"

    @property
    def remote(self) -> str:
        """The server's address with the token, for `SparkSession.builder.remote`.

        The host is a name: PySpark sends a token without TLS to `localhost` only.
        """
        return f"{self.address}/;token={self.token}"

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the start of the server."""
        return max(0.0, time.time() - self.started_at)

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process and its children, in bytes."""
        total = 0
        for process in self._family():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total

    @property
    def identity(self) -> ProcessIdentity | None:
        """The identity of the process; None if an early release started the server."""
        return ProcessIdentity.parse(self.process)

    def is_alive(self) -> bool:
        """Return whether the process is alive and is the server. A zombie is not alive."""
        if self.identity is not None and self.identity.has_ended:
            return False
        try:
            command = psutil.Process(self.pid).cmdline()
        except psutil.Error:
            return False
        return _CLASS in command and f"{_PORT_SETTING}={self.port}" in command

    def answers(self) -> bool:
        """Return whether the server's port accepts connections."""
        with socket.socket() as client:
            client.settimeout(1)
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self) -> None:
        """End the process and its children by SIGTERM, and after a time limit by SIGKILL.

        Spark's scripts start helper processes before the server, possibly during this call. All
        these processes belong to the server's process group.
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


def launch(
    port: int, properties: Path, token: str, folder: Path, log: Path, held: int
) -> subprocess.Popen[bytes]:
    """Start a server's process, which waits for `release`.

    If this process ends before `release`, the started process ends too. No unknown server remains.

    Args:
        port: TCP port on 127.0.0.1.
        properties: file with all other Spark settings.
        token: the secret of the server's clients.
        folder: the process's working directory.
        log: file that the process appends its output to.
        held: file descriptor that the process keeps open.

    Raises:
        ConfigurationError: this Python has no PySpark with a Spark Connect server.
    """
    home = _spark_home()
    command = [
        str(home / "bin" / "spark-submit"),
        *("--class", _CLASS, "--name", "pgcdc"),
        # `is_alive` looks for the port.
        *("--conf", f"{_PORT_SETTING}={port}"),
        *("--properties-file", str(properties), "--load-spark-defaults"),
        "spark-internal",
    ]
    # Spark's report of a failed query may contain values: only this user can read the log.
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [*_AFTER_A_LINE, *command],
            cwd=folder,
            env={
                **{name: v for name, v in os.environ.items() if name not in _NOT_INHERITED},
                "SPARK_HOME": str(home),
                # Not on the command line, which other users can read.
                "SPARK_CONNECT_AUTHENTICATE_TOKEN": token,
                "PYSPARK_PYTHON": sys.executable,
            },
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(held,),
            # Ctrl-C must not end the server, and `end` signals the server's process group.
            start_new_session=True,
        )
    finally:
        os.close(output)


def release(process: subprocess.Popen[bytes]) -> None:
    """Let a process of `launch` start the server."""
    assert process.stdin is not None
    # The process may have ended.
    with suppress(BrokenPipeError), process.stdin as line:
        line.write(b"\n")


def _spark_home() -> Path:
    """Return the folder of the PySpark that this Python imports."""
    found = importlib.util.find_spec("pyspark")
    home = Path(found.origin).parent if found is not None and found.origin is not None else None
    if home is None or not any(home.glob("jars/spark-connect_*.jar")):
        raise ConfigurationError(
            reason="This Python has no PySpark with a Spark Connect server. Install the package "
            "pyspark in the version that setup.cfg requires"
        )
    return home


def _send(group: int, number: signal.Signals) -> bool:
    """Signal a process group. Return whether the group has a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
