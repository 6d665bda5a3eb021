"""A range of a server's WAL, read as a standby reads it.

A replication connection to a database sends the WAL of the whole cluster as well (53.4 Streaming
Replication Protocol, START_REPLICATION PHYSICAL). It needs what a capture's stream needs: the
attribute REPLICATION, a walsender, and the entry of the database in pg_hba.conf. No status packet
is sent, so that the connection is no candidate for a synchronous standby.
"""

from __future__ import annotations

import contextlib
import select
import struct
import time

import psycopg
from psycopg import pq

from pgcdc_assets.error_text import first_line
from pgcdc_assets.errors import ConfigurationError, ConnectionLost, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.libpq import execute, open_session
from pgcdc_assets.table_name import quoted

_LIMIT_SECONDS = 30.0
_INSUFFICIENT_PRIVILEGE = "42501"

# XLogData: the tag, the LSN of the first byte, the end of WAL, and the clock.
_DATA_HEADER = struct.Struct("!cQQQ")


def read_wal(settings: ConnectionSettings, timeline: int, start: Lsn, end: Lsn) -> bytes:
    """Return the WAL from `start` to `end`, which the server must have.

    Raises:
        ConfigurationError: the server does not send WAL to this role.
        TransientError: the server has removed the WAL, or does not have it yet.
        ConnectionLost: the server is down, or went away.
    """
    if start == end:
        return b""
    server = settings.describe()
    conn = open_session(settings, "wal", replication=True)
    try:
        # Postgres 14 refuses the next command without this one (StartReplication in walsender.c).
        execute(conn, b"IDENTIFY_SYSTEM", _LIMIT_SECONDS)
        command = f"START_REPLICATION PHYSICAL {start} TIMELINE {timeline}"
        begun = execute(conn, command.encode(), _LIMIT_SECONDS)
        if begun.status != pq.ExecStatus.COPY_BOTH:
            raise _refused(settings, start, begun)
        found = _receive(conn, settings, start, end)
        with contextlib.suppress(psycopg.OperationalError):
            conn.put_copy_end()
            conn.flush()
        return found
    except (OSError, psycopg.OperationalError) as error:
        raise ConnectionLost(
            server=server, doing=f"reading WAL from {start}", reason=first_line(error)
        ) from error
    finally:
        conn.finish()


def _receive(conn: pq.abc.PGconn, settings: ConnectionSettings, start: Lsn, end: Lsn) -> bytes:
    found = bytearray()
    deadline = time.monotonic() + _LIMIT_SECONDS
    readable = select.poll()
    readable.register(conn.socket, select.POLLIN)
    problem = f"{settings.describe()} did not send its WAL from {start} to {end}"
    while len(found) < end - start:
        count, data = conn.get_copy_data(1)
        if count > 0:
            # Other messages are keepalives.
            if bytes(data[:1]) == b"w":
                found += data[_DATA_HEADER.size :]
        elif count == 0:
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms < 0 or not readable.poll(left_ms):
                raise TransientError(reason=f"{problem} within {_LIMIT_SECONDS:g} s. Run it again.")
            conn.consume_input()
        else:
            ended = conn.get_result()
            said = "" if ended is None else _sentence(ended.get_error_message())
            raise TransientError(
                reason=f"{problem}: {said or 'its timeline ends before'}. Run it again."
            )
    return bytes(found[: end - start])


def _refused(
    settings: ConnectionSettings, start: Lsn, result: pq.abc.PGresult
) -> ConfigurationError:
    code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    server = settings.describe()
    remedy = "Remove snapshot.dsn_env if the server sends WAL to no client."
    if code == _INSUFFICIENT_PRIVILEGE:
        remedy = f"Grant it with: alter role {quoted(settings.role)} replication"
    return ConfigurationError(
        reason=f"{server} does not send its WAL from {start}: "
        f"{_sentence(result.get_error_message())}. {remedy}"
    )


def _sentence(message: str) -> str:
    """Return the first line of a server's message without its severity."""
    line = message.strip().partition("\n")[0]
    return line.removeprefix("ERROR:").removeprefix("FATAL:").strip().rstrip(".")
