"""ingestr. Its package on PyPI is a launcher that downloads a program.

If the download fails, `INGESTR_BINARY_PATH` can name a program that was built by hand.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psycopg2

from benchmarks.peers.environments import make_venv, run_to_prepare
from benchmarks.peers.peer import Reading, Stream
from benchmarks.processes import run_measured
from benchmarks.workload import TABLES

_LAUNCHER = "1.1.76"
# The names of slot and destination identify the state of ingestr.
_NAME = "peer_ingestr"
_BASE = "peer_ingestr_base"


class Ingestr:
    """The command, with a database of the same server as its destination.

    ingestr copies tables before it follows them. So it first runs on the empty tables, and each
    reading begins with a copy of the database of this run.
    """

    name = "ingestr"
    version = f"ingestr {_LAUNCHER}"
    plugin = "pgoutput"
    slot_source = _BASE
    writes = "tables of another database of the same server, merged by their keys"
    row = (
        "typed columns; the newest row of each key is merged, so it keeps tables and not changes; "
        "deleted rows stay with a mark; in the build that was tried, text[] arrived as NULL"
    )
    _bin: Path

    def prepare(self) -> None:
        """Install the launcher, and let it download the program."""
        self._bin = make_venv(self.name)
        said = run_to_prepare([str(self._bin / "ingestr"), "--version"])
        self.version = f"ingestr {_LAUNCHER}, program: {said.removeprefix('ingestr version ')}"

    def prepare_source(self, stream: Stream) -> None:
        """Create the destination, and copy the empty tables to it."""
        _execute(stream, f"create database {_NAME}")
        run_measured(self._command(stream))
        _execute(
            stream,
            f"alter database {_NAME} rename to {_BASE}",
            f"select pg_copy_logical_replication_slot('{_NAME}', '{_BASE}')",
            f"select pg_drop_replication_slot('{_NAME}')",
        )

    def slot_name(self, number: int) -> str:
        """Return the name of the slot, which is always the same."""
        return _NAME

    def read(self, stream: Stream) -> Reading:
        """Update a copy of the destination; the command ends without a signal."""
        _execute(stream, f"create database {_NAME} template {_BASE}")
        try:
            usage = run_measured(self._command(stream))
            self._check(stream)
        finally:
            _execute(stream, f"drop database {_NAME}")
        return Reading(stream.changes, usage.seconds, usage)

    def _command(self, stream: Stream) -> list[str]:
        source = (
            f"postgres+cdc://{stream.url}?publication={stream.publication}&slot={_NAME}"
            "&sslmode=disable"
        )
        server = stream.url.rpartition("/")[0]
        destination = f"postgresql://{server}/{_NAME}?sslmode=disable"
        return [
            *(str(self._bin / "ingestr"), "ingest", "--yes", "--progress", "log"),
            *("--source-uri", source, "--dest-uri", destination),
        ]

    def _check(self, stream: Stream) -> None:
        """Check that the tables have as many rows as the source."""
        for table in TABLES:
            rows = _count(stream.conninfo, f"select count(*) from {table}")
            kept = f"select count(*) from {table} where not _cdc_deleted"
            found = _count(f"{stream.conninfo} dbname={_NAME}", kept)
            if found != rows:
                raise ValueError(f"{table} has {found} rows and the source has {rows}")


def _execute(stream: Stream, *statements: str) -> None:
    with closing(psycopg2.connect(stream.conninfo)) as conn, conn.cursor() as cursor:
        conn.autocommit = True
        for statement in statements:
            cursor.execute(statement)


def _count(conninfo: str, query: str) -> int:
    with closing(psycopg2.connect(conninfo)) as conn, conn.cursor() as cursor:
        cursor.execute(query)
        row = cursor.fetchone()
    assert row is not None
    return int(row[0])
