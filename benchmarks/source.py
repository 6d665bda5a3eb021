"""The Postgres server of the benchmarks, and two readers of its slots."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extensions

from benchmarks import workload
from benchmarks.processes import Usage, run_measured
from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.slots.status import read_server_identity
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw.epochs import first_epoch

DATABASE = "bench"
SLOT = "source"

# Large values, so that the WAL stays in the page cache and no checkpoint occurs.
_SETTINGS = {**UNSAFE_BUT_FAST, "shared_buffers": "512MB", "max_wal_size": "16GB"}


@dataclass(frozen=True)
class CaptureUsage(Usage):
    """The usage of a reader of the stream as a whole process.

    Attributes:
        seconds_without_start: time from the first connection to the confirmed slot, if the process
            reports it.
        waiting_seconds: of these, the time in which our capture waited for the server.
    """

    seconds_without_start: float
    waiting_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, CPU {self.cpu_seconds:.1f} s, {self.peak_mb:.0f} MB"


@dataclass(frozen=True)
class Source:
    """A database with a workload: the slot `source` before it, and the LSN at its end.

    Attributes:
        tls: every connection over TCP is encrypted.
    """

    server: EmbeddedServer
    folder: Path
    start: Lsn
    end: Lsn
    changes: int
    tls: bool = False

    def conninfo(self, *, unix_socket: bool = False, is_encrypted: bool = True) -> str:
        """Return the connection string over loopback TCP, or over the Unix socket.

        Args:
            unix_socket: use the Unix socket.
            is_encrypted: request encryption, if the server offers TLS.
        """
        conninfo = self.server.conninfo(DATABASE, unix_socket=unix_socket)
        if not self.tls or unix_socket:
            return conninfo
        return f"{conninfo} sslmode={'require' if is_encrypted else 'disable'}"

    @contextmanager
    def slot(self, name: str | None = None, copied_from: str | None = None) -> Iterator[str]:
        """Copy a slot inside the block, so that every reader gets the same stream.

        Args:
            name: name of the copy.
            copied_from: the slot to copy; None: `source`.
        """
        name = name or f"copy_{time.monotonic_ns()}"
        with closing(psycopg2.connect(self.conninfo())) as conn, conn.cursor() as cursor:
            conn.autocommit = True
            cursor.execute(
                "select pg_copy_logical_replication_slot(%s, %s)", (copied_from or SLOT, name)
            )
            try:
                yield name
            finally:
                cursor.execute(
                    "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots "
                    "where slot_name = %s",
                    (name,),
                )
                cursor.execute("select pg_drop_replication_slot(%s)", (name,))

    def pg_recvlogical(self, *, unix_socket: bool = False) -> CaptureUsage:
        """Write the stream to a file."""
        with self.slot() as slot, tempfile.NamedTemporaryFile(dir=self.folder) as file:
            command = [
                str(self.server.bin_dir / "pg_recvlogical"),
                f"--dbname={self.conninfo(unix_socket=unix_socket)}",
                f"--slot={slot}",
                "--start",
                "--no-loop",
                f"--endpos={self.end}",
                f"--file={file.name}",
                "--option=proto_version=1",
                f"--option=publication_names={workload.PUBLICATION}",
            ]
            usage = run_measured(command)
        return CaptureUsage(**vars(usage), seconds_without_start=usage.seconds)

    def capture(
        self, *, unix_socket: bool = False, is_encrypted: bool = True, streaming: str = "off"
    ) -> CaptureUsage:
        """Land the stream as one window.

        Args:
            unix_socket: use the Unix socket.
            is_encrypted: request encryption, if the server offers TLS.
            streaming: whether the server sends transactions before their commit: `on` or `off`.
        """
        conninfo = self.conninfo(unix_socket=unix_socket, is_encrypted=is_encrypted)
        with self.slot() as slot, tempfile.TemporaryDirectory(dir=self.folder) as lake:
            window = LsnWindow.of(1, self.start, self.end)
            self.record_epoch(RawZone(Lake(lake), DATABASE), slot)
            usage = run_measured(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.capture_process",
                    *(conninfo, lake, slot, workload.PUBLICATION, window.key, streaming),
                ]
            )
        said: dict[str, float] = json.loads(usage.output)
        if said["row_count"] != self.changes:
            raise SystemExit(f"{said['row_count']} of {self.changes} changes were landed")
        return CaptureUsage(
            **vars(usage),
            seconds_without_start=said["seconds"],
            waiting_seconds=said["waiting_seconds"],
        )

    def record_epoch(self, zone: RawZone, slot: str) -> None:
        """Record in a raw zone that its first epoch is captured from this slot."""
        settings = ConnectionSettings(conninfo=self.conninfo(), name="bench")
        with query_connection(settings, "bench") as conn:
            identity = read_server_identity(conn)
        zone.epochs.append(first_epoch(identity, slot, workload.PUBLICATION, self.start))


@contextmanager
def source(
    work: Callable[[psycopg2.extensions.connection], int],
    *,
    version: int = 18,
    tls: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Source]:
    """Start a server, create tables and slot, run the workload, and delete everything at the end.

    Args:
        work: function that writes the workload and returns the number of its row changes.
        version: major version of Postgres.
        tls: encrypt connections over TCP; embedded servers are built without SSL.
        settings: further settings of the server.
    """
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-bench-"))
    server = EmbeddedServer(folder / "postgres", version, {**_SETTINGS, **(settings or {})})
    try:
        server.start()
        if tls:
            server.stop()
            make_certificate(server.data_dir)
            server.settings["ssl"] = "on"
            server.start()
        with closing(psycopg2.connect(server.conninfo())) as conn, conn.cursor() as cursor:
            conn.autocommit = True
            cursor.execute(f"create database {DATABASE}")
        with closing(psycopg2.connect(server.conninfo(DATABASE))) as conn, conn.cursor() as cursor:
            conn.autocommit = True
            workload.create_tables(conn)
            start = _value(
                cursor,
                "select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput')",
                SLOT,
            )
            began = time.monotonic()
            changes = work(conn)
            # Flush the asynchronous commits by a synchronous commit.
            cursor.execute("set synchronous_commit = on; create table flushed ()")
            end = _value(cursor, "select pg_current_wal_flush_lsn()::text")
            cursor.execute("checkpoint")
            seconds = time.monotonic() - began
            log(f"{changes} changes made in {seconds:.1f} s, WAL from {start} to {end}")
        yield Source(server, folder, Lsn.parse(start), Lsn.parse(end), changes, tls)
    finally:
        server.remove()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def make_certificate(folder: Path) -> None:
    """Create a self-signed certificate for the user that owns the folder."""
    subprocess.run(
        [
            *("openssl", "req", "-new", "-x509", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-out", str(folder / "server.crt"), "-keyout", str(folder / "server.key")),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "server.key").chmod(0o600)
    owner = folder.stat()
    for name in ("server.crt", "server.key"):
        shutil.chown(folder / name, owner.st_uid, owner.st_gid)


def log(line: str) -> None:
    """Print a progress line."""
    print(f"  {line}", file=sys.stderr, flush=True)


def _value(cursor: psycopg2.extensions.cursor, statement: str, *parameters: Any) -> str:
    cursor.execute(statement, parameters)
    row = cursor.fetchone()
    assert row is not None
    return str(row[0])
