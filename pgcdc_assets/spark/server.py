"""A local Spark Connect server, which saves small merges the start of a JVM.

The server is part of the PySpark package. The server runs with the settings of an embedded session
and listens on a free port of 127.0.0.1. A client needs the server's token, because a client can
execute anything that the server's user can. The state file, which only this user can read, contains
port and token.

The process waits until the state file is written, and `ready` is set after a client's query
succeeds. A killed start therefore leaves no process, or one that the next start finds and ends.

Machines and containers may share a state folder, but a process is visible in its own container
only. A server of another one is not used, and its files are not deleted (`check_own`).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from pgcdc_assets.errors import ConfigurationError, TransientError, local_write_error
from pgcdc_assets.local import free_port, is_locked, locked
from pgcdc_assets.processes import ProcessIdentity, this_namespace
from pgcdc_assets.spark.jars import MASTER, looking_up_alone
from pgcdc_assets.spark.java import check_java
from pgcdc_assets.spark.object_store import start_options, store_of
from pgcdc_assets.spark.properties_file import check_values, properties_file
from pgcdc_assets.spark.server_process import RunningServer, launch, release
from pgcdc_assets.spark.settings import CATALOG, HIVE, server_conf, start_conf, with_user_conf

_PROBE = "pgcdc_assets.spark.readiness_probe"

# The first start on a machine downloads 87 MB of jars.
_SECONDS_TO_START = 600.0
_SECONDS_BETWEEN_NEWS = 5.0
_POLL_SECONDS = 0.1
_PORTS_TO_TRY = 3

# The next line of the log has the reason.
_NO_JVM = "Error occurred during initialization of VM"

Say = Callable[[str], None]


class SparkServer:
    """The Spark Connect server of a state folder, running or not.

    Several processes may call all methods at the same time: start and stop hold a file lock. A
    running server is used with the settings of its start.

    Args:
        folder: the state folder; the names of the server's files begin with `spark-server`.
        conf: Spark settings that override the defaults at a start.
        lakes: URIs of lakes in object stores, whose jars a started server has.
    """

    def __init__(
        self, folder: Path, conf: Mapping[str, str] | None = None, lakes: Sequence[str] = ()
    ) -> None:
        self.folder = folder.absolute()
        self.conf = dict(conf or {})
        self.lakes = tuple(lakes)
        self.state_file = self.folder / "spark-server.json"
        self.log_file = self.folder / "spark-server.log"
        self.work_folder = self.folder / "spark-server"
        # The server holds the lock of this file.
        self.alive_file = self.folder / "spark-server.alive"
        # Referenced, so that Python reaps the child process.
        self._child: subprocess.Popen[bytes] | None = None

    def find(self) -> RunningServer | None:
        """Return the running server, ready or not; None without a running server.

        A server of another machine, container or user is not running here.
        """
        try:
            state = self._read()
        except PermissionError:
            return None
        return state if state is not None and state.is_alive() else None

    def check_own(self) -> None:
        """Check that no other machine, container or user has its server in the folder.

        Raises:
            ConfigurationError: the folder has such a server, which has not certainly ended. Or a
                server runs whose state file is malformed.
        """
        try:
            state = self._read()
        except PermissionError as error:
            raise self._of_other_user(self.state_file) from error
        if state is None and self._has_lost_server():
            raise ConfigurationError(
                reason=f"{self.state_file} is malformed, but its Spark server runs. End the "
                f"server, which is the process that has {self.alive_file} open (`lsof` shows its "
                "id), then delete the file"
            )
        identity = None if state is None else state.identity
        if identity is None:
            return
        here, there = this_namespace(), identity.place
        if not (here.is_known and there.is_known):
            is_elsewhere = here.host != there.host
        elif here.boot != there.boot:
            # The server has ended if this machine has started again.
            is_elsewhere = here.host != there.host
        else:
            # Containers of one machine see each other's locks.
            is_elsewhere = here.namespace != there.namespace and is_locked(self.alive_file)
        if is_elsewhere:
            raise ConfigurationError(
                reason=f"The folder {self.folder} has the Spark server of another machine or "
                f"container, {there.host}. Stop the server there by `pgcdc spark stop`, or set "
                "PGCDC_STATE to a folder of this one. If the server has certainly ended, delete "
                f"{self.state_file}"
            )

    def usable(self) -> RunningServer | None:
        """Return the server if the server is ready and accepts connections; else None."""
        found = self.find()
        return found if found is not None and found.ready and found.answers() else None

    def start(self, say: Say = lambda line: None) -> tuple[RunningServer, bool]:
        """Start the server if it is not running, and wait until a client's query succeeds.

        If the start fails or is interrupted, the started process is ended.

        Args:
            say: function that receives a progress line every few seconds.

        Returns:
            The server, and whether this call started the server.

        Raises:
            ConfigurationError: Spark cannot start on this machine; the log has the details. Or the
                folder has the server of another machine, container or user.
            TransientError: the start took too long, no port is free, or the disk is full.
        """
        with self._lock():
            running = self.usable()
            if running is not None:
                return running, False
            check_java()
            # A killed start leaves a process and files, a killed server leaves files.
            self._clean_up(self.find())
            say(f"Starting the Spark server; its log is {self.log_file}")
            with looking_up_alone():
                for _ in range(_PORTS_TO_TRY):
                    try:
                        started = self._start_at(free_port(), say)
                    except OSError as error:
                        remedy = "set PGCDC_STATE to a folder that this user can write"
                        raise local_write_error(
                            f"The folder {self.folder}", error, remedy
                        ) from error
                    if started is not None:
                        return started, True
        raise TransientError(reason="No free TCP port was found for the Spark server. Run it again")

    def stop(self) -> RunningServer | None:
        """End the running server and its children. Return the ended server, or None.

        Raises:
            ConfigurationError: the folder has the server of another machine, container or user.
        """
        with self._lock():
            found = self.find()
            self._clean_up(found)
            return found

    @contextmanager
    def running(self, say: Say = lambda line: None) -> Iterator[RunningServer]:
        """Run the server for the block. A server that is already running keeps running."""
        server, is_new = self.start(say)
        try:
            yield server
        finally:
            if is_new:
                self.stop()

    def _start_at(self, port: int, say: Say) -> RunningServer | None:
        """Start the server on a port; return None if another process has taken the port."""
        own = server_conf(port, str(self.work_folder), self.conf.get(MASTER))
        conf = start_options(self.lakes, with_user_conf(own, self.conf))
        used = start_conf(conf)
        check_values(used)
        self.work_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.log_file.exists():
            self.log_file.replace(self.log_file.with_name(f"{self.log_file.name}.old"))
        with properties_file(used, self.work_folder) as properties:
            server = self._launch(port, properties, has_hive=conf[CATALOG] == HIVE)
            try:
                self._write(server)
                assert self._child is not None
                release(self._child)
                status = self._wait(self._child, server, conf, say)
                if status is None:
                    server = replace(server, ready=True)
                    self._write(server)
                    return server
            except BaseException:
                self._clean_up(server)
                raise
        self._clean_up(server)
        if "BindException" in self._log():
            return None
        raise ConfigurationError(
            reason=f"The Spark server ended with status {status} during its start: "
            f"{self._error_line()}. Its log is {self.log_file}"
        )

    def _launch(self, port: int, properties: Path, *, has_hive: bool) -> RunningServer:
        token = secrets.token_hex(16)
        with self.alive_file.open("wb") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX)
            files = self.work_folder, self.log_file
            self._child = launch(port, properties, token, *files, alive.fileno())
        return RunningServer(
            self._child.pid,
            port,
            token,
            time.time(),
            stores=sorted({store for store in map(store_of, self.lakes) if store}),
            has_hive=has_hive,
            process=str(ProcessIdentity.of(self._child.pid)),
        )

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        server: RunningServer,
        conf: Mapping[str, str],
        say: Say,
    ) -> int | None:
        """Wait until a client's query succeeds. Return the exit status of an ended server."""
        began = news = time.monotonic()
        probe = self._probe(server, conf)
        try:
            while probe.poll() is None:
                time.sleep(_POLL_SECONDS)
                now = time.monotonic()
                if process.poll() is not None:
                    return process.returncode
                if now - began > _SECONDS_TO_START:
                    raise TransientError(
                        reason=f"The Spark server was not ready after {_SECONDS_TO_START:g} s. "
                        f"Read {self.log_file}, and run it again"
                    )
                if now - news > _SECONDS_BETWEEN_NEWS:
                    news = now
                    state = "runs a test query" if server.answers() else "starts"
                    say(f"... Spark {state} ({now - began:.0f} s)")
        finally:
            if probe.poll() is None:
                probe.kill()
                probe.wait()
        if probe.returncode != 0:
            raise ConfigurationError(
                reason=f"The Spark server runs, but its test query failed: {self._error_line()}. "
                f"Its log is {self.log_file}"
            )
        return None

    def _probe(self, server: RunningServer, conf: Mapping[str, str]) -> subprocess.Popen[bytes]:
        request = {
            "remote": server.remote,
            "port": server.port,
            "folder": str(self.work_folder),
            "conf": dict(conf),
        }
        with (
            tempfile.TemporaryFile("w+", dir=self.work_folder) as stdin,
            self.log_file.open("ab") as log,
        ):
            json.dump(request, stdin)
            stdin.seek(0)
            return subprocess.Popen(
                [sys.executable, "-m", _PROBE],
                stdin=stdin,
                stdout=log,
                stderr=log,
            )

    def _clean_up(self, server: RunningServer | None) -> None:
        """End a server, and delete its state file and work folder."""
        if server is not None:
            server.end()
        if self._child is not None:
            # Its status is collected, so that Popen does not take it for running.
            self._child.poll()
        for file in (self.state_file, self.alive_file):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.work_folder, ignore_errors=True)

    def _read(self) -> RunningServer | None:
        """Read the state file; None if it is missing or malformed."""
        try:
            return RunningServer.parse(self.state_file.read_text(errors="replace"))
        except FileNotFoundError:
            return None

    def _has_lost_server(self) -> bool:
        """Return whether a server runs while its state file is there and malformed."""
        if not self.alive_file.exists() or not is_locked(self.alive_file):
            return False
        # Another process may have started the server now.
        return self.state_file.exists() and self._read() is None

    def _write(self, server: RunningServer) -> None:
        """Replace the state file atomically, readable for this user only."""
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

    def _error_line(self) -> str:
        """Return the first line of the log with an error, or else the last line."""
        lines = self._log().strip().splitlines() or ["the log is empty"]
        errors = [
            line
            for line in lines
            if re.search(r"Exception|Error\b|is not set|No such", line) and line != _NO_JVM
        ]
        return (errors or lines[-1:])[0].strip()[:300]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of the folder, which has no server of another machine, container or user.

        Raises:
            ConfigurationError: the folder has such a server, or another user's files.
        """
        self.check_own()
        file = self.folder / "spark-server.lock"
        with ExitStack() as held:
            try:
                held.enter_context(locked(file))
            except PermissionError as error:
                raise self._of_other_user(file) from error
            self.check_own()
            yield

    def _of_other_user(self, file: Path) -> ConfigurationError:
        return ConfigurationError(
            reason=f"The Spark server of {self.folder} belongs to another user, because {file} is "
            "not accessible. Stop the server as that user, or set PGCDC_STATE to a folder of this "
            "user"
        )
