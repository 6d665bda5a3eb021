"""A Spark Connect server of our own on this machine, so that a small merge does not start a JVM.

PySpark as pip installs it brings the server; it runs here with the settings of an embedded session,
listens on 127.0.0.1 at a free port, and takes only clients that know its token: whoever may send it
a query can do what its user can. A state file that only this user may read says where it is.

The state file is written as soon as the process is there, and says `ready` once a client's
query worked, so that a start which is killed leaves nothing that nobody knows of.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.local import free_port, locked
from pgcdc_assets.spark.jars import looking_up_alone
from pgcdc_assets.spark.java import check_java
from pgcdc_assets.spark.server_process import RunningServer, launch
from pgcdc_assets.spark.settings import server_conf

_PROBE = "pgcdc_assets.spark.readiness_probe"

# The first start on a machine fetches 87 MB of jars.
_SECONDS_TO_START = 600.0
_SECONDS_BETWEEN_NEWS = 5.0
_POLL_SECONDS = 0.1
_PORTS_TO_TRY = 3

Say = Callable[[str], None]


class SparkServer:
    """The one server of a state folder, running or not.

    All methods may be called by several processes at once: starting and stopping hold a file lock,
    and what is found running is taken as it is.

    Args:
        folder: the state folder; the server's files in it begin with `spark-server`.
        conf: Spark settings over the defaults, for a start.
    """

    def __init__(self, folder: Path, conf: Mapping[str, str] | None = None) -> None:
        self.folder = folder.absolute()
        self.conf = dict(conf or {})
        self.state_file = self.folder / "spark-server.json"
        self.log_file = self.folder / "spark-server.log"
        self.work_folder = self.folder / "spark-server"
        # Kept, so that the process is not left a zombie while this one lives.
        self._child: subprocess.Popen[bytes] | None = None

    def find(self) -> RunningServer | None:
        """Return the running server, ready or not; None if there is none."""
        try:
            state = RunningServer(**json.loads(self.state_file.read_text()))
            return state if state.is_alive() else None
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def usable(self) -> RunningServer | None:
        """Return the server if it is ready and takes connections."""
        found = self.find()
        return found if found is not None and found.ready and found.answers() else None

    def start(self, say: Say = lambda line: None) -> tuple[RunningServer, bool]:
        """Start the server unless it runs, and wait until a client's query works.

        If this fails or is interrupted, what was started is ended again.

        Args:
            say: takes a line every few seconds.

        Returns:
            The server, and whether this call started it.

        Raises:
            ConfigurationError: Spark cannot start here; the log says more.
            TransientError: it took too long.
        """
        with self._lock():
            running = self.usable()
            if running is not None:
                return running, False
            check_java()
            # What is left by a start that was killed, or by a server that was.
            self._tidy_up(self.find())
            say(f"Starting the Spark server; its log is {self.log_file}")
            with looking_up_alone():
                for _ in range(_PORTS_TO_TRY):
                    started = self._start_at(free_port(), say)
                    if started is not None:
                        return started, True
        raise TransientError(reason="No free TCP port was found for the Spark server: try again")

    def stop(self) -> RunningServer | None:
        """End the server and its children, if it runs; return what was ended."""
        with self._lock():
            found = self.find()
            self._tidy_up(found)
            return found

    @contextmanager
    def running(self, say: Say = lambda line: None) -> Iterator[RunningServer]:
        """Run the server for the block; one that runs already is used, and left running."""
        server, is_new = self.start(say)
        try:
            yield server
        finally:
            if is_new:
                self.stop()

    def _start_at(self, port: int, say: Say) -> RunningServer | None:
        """Start on a port; None if somebody else took it meanwhile."""
        self.work_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.log_file.exists():
            self.log_file.replace(self.log_file.with_name(f"{self.log_file.name}.old"))
        conf = {**server_conf(port, str(self.work_folder)), **self.conf}
        token = secrets.token_hex(16)
        self._child = launch(conf, token, self.work_folder, self.log_file)
        server = RunningServer(self._child.pid, port, token, time.time())
        try:
            self._write(server)
            status = self._wait(self._child, server, say)
            if status is None:
                server = replace(server, ready=True)
                self._write(server)
                return server
        except BaseException:
            self._tidy_up(server)
            raise
        self._tidy_up(server)
        if "BindException" in self._log():
            return None
        raise ConfigurationError(
            reason=f"The Spark server ended with status {status} while it started: "
            f"{self._complaint()}. Its log is {self.log_file}"
        )

    def _wait(
        self, process: subprocess.Popen[bytes], server: RunningServer, say: Say
    ) -> int | None:
        """Wait until a client's query works; give the exit status if the server ended instead."""
        began = news = time.monotonic()
        probe = self._probe(server)
        try:
            while probe.poll() is None:
                time.sleep(_POLL_SECONDS)
                now = time.monotonic()
                if process.poll() is not None:
                    return process.returncode
                if now - began > _SECONDS_TO_START:
                    raise TransientError(
                        reason=f"The Spark server was not ready after {_SECONDS_TO_START:g} s: "
                        f"see {self.log_file}, and try again"
                    )
                if now - news > _SECONDS_BETWEEN_NEWS:
                    news = now
                    does = "tries a query" if server.answers() else "starts"
                    say(f"... Spark {does} ({now - began:.0f} s)")
        finally:
            if probe.poll() is None:
                probe.kill()
                probe.wait()
        if probe.returncode != 0:
            raise ConfigurationError(
                reason="The Spark server runs, but no Delta table can be written: "
                f"{self._complaint()}. Its log is {self.log_file}"
            )
        return None

    def _probe(self, server: RunningServer) -> subprocess.Popen[bytes]:
        asked = {"remote": server.remote, "port": server.port, "folder": str(self.work_folder)}
        with tempfile.TemporaryFile("w+") as question, self.log_file.open("ab") as log:
            json.dump(asked, question)
            question.seek(0)
            return subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", _PROBE],
                stdin=question,
                stdout=log,
                stderr=log,
            )

    def _tidy_up(self, server: RunningServer | None) -> None:
        """End a server, and delete what it left."""
        if server is not None:
            server.end()
        self.state_file.unlink(missing_ok=True)
        shutil.rmtree(self.work_folder, ignore_errors=True)

    def _write(self, server: RunningServer) -> None:
        """Replace the state file at once, readable for this user only."""
        draft = self.state_file.with_suffix(".tmp")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(server), file)
        draft.replace(self.state_file)

    def _log(self) -> str:
        try:
            return self.log_file.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _complaint(self) -> str:
        """The first line of the log that names an error, else its last one."""
        lines = self._log().strip().splitlines() or ["it did not say why"]
        named = [each for each in lines if re.search(r"Exception|Error\b|is not set|No such", each)]
        return (named or lines[-1:])[0].strip()[:300]

    def _lock(self) -> AbstractContextManager[None]:
        return locked(self.folder / "spark-server.lock")
