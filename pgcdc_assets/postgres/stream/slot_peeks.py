"""Peeks at the changes of a slot, which confirm nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psycopg
import psycopg2
from psycopg import pq
from psycopg2 import sql

from pgcdc_assets.error_text import first_line
from pgcdc_assets.errors import ConnectionLost
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.libpq import execute, open_session
from pgcdc_assets.postgres.slots.status import SlotStatus
from pgcdc_assets.postgres.stream.errors import stream_failure
from pgcdc_assets.postgres.stream.libpq_transport import check_libpq_notice, result_error
from pgcdc_assets.postgres.stream.transport import ServerError
from pgcdc_assets.postgres.wal.positions import PREFIX
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_OBJECT_IN_USE = "55006"
_UNDEFINED_OBJECT = "42704"
_QUERY_CANCELED = "57014"

# What the server may need for an answer beyond the time limit of a statement.
_ANSWER_SECONDS = 30.0


def has_publication_gap(
    conn: Connection,
    settings: ConnectionSettings,
    status: SlotStatus,
    publication: str,
    limit_ms: int = 600_000,
) -> bool:
    """Return whether a slot holds changes from a time when its publication did not exist.

    Such changes are an error or a warning when the server decodes them. The function peeks at all
    changes of the slot, which confirms nothing. No peek is necessary if the publication is older
    than the slot's `catalog_xmin`.

    Args:
        conn: a connection to the source database in autocommit mode.
        settings: the source database, for the connection of the peek.
        status: the slot.
        publication: the publication's name.
        limit_ms: time limit of the peek. After the limit, no gap was found.

    Raises:
        DefiniteError: the server cannot decode a change of the slot, for another reason.
        ConnectionLost: the server is down, or went away.
    """
    with conn.cursor() as cursor:
        cursor.execute("select age(xmin) from pg_publication where pubname = %s", (publication,))
        row = cursor.fetchone()
    if row is None or row[0] > (status.catalog_xmin_age or 0):
        return False
    peek = sql.SQL(
        "prepare peek as select count(*) from pg_logical_slot_peek_binary_changes({}, {}, null, "
        "'proto_version', '1', 'publication_names', {})"
    ).format(*map(sql.Literal, (status.slot, str(status.current_lsn), quoted(publication))))
    statements = [
        *(["set transaction_timeout = 0"] if conn.server_version >= 170000 else []),
        peek.as_string(conn),
        # The server then converts no row, and needs no row to be convertible.
        f"set client_encoding = '{conn.get_parameter_status('server_encoding')}'",
        "execute peek",
    ]
    try:
        _execute(settings, statements, limit_ms)
    except ServerError as error:
        if error.sqlstate == _UNDEFINED_OBJECT:
            return True
        if error.sqlstate in (_OBJECT_IN_USE, _QUERY_CANCELED):
            return False
        raise stream_failure(
            settings.describe(), status.slot, publication, error, settings.renewal
        ) from None
    return False


def _execute(settings: ConnectionSettings, statements: Sequence[str], limit_ms: int) -> None:
    """Execute statements over a connection of libpq, which shows the SQLSTATEs of warnings.

    The texts of errors and warnings are translated. Postgres 18 and newer only warn of a missing
    publication, and skip the changes.

    Raises:
        ServerError: a statement failed, or the server warned of a missing publication.
        ConnectionLost: the server is down, or went away.
    """
    server, warnings = settings.describe(), list[ServerError]()

    def take_notice(result: pq.abc.PGresult) -> None:
        # libpq ignores an exception of a notice handler.
        try:
            check_libpq_notice(result)
        except ServerError as error:
            warnings.append(error)

    conn = open_session(settings, "renew", statement_timeout_ms=limit_ms)
    try:
        conn.notice_handler = take_notice
        for statement in statements:
            result = execute(conn, statement.encode(), limit_ms / 1000 + _ANSWER_SECONDS)
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise result_error(result)
    except (OSError, psycopg.OperationalError) as error:
        raise ConnectionLost(
            server=server, doing="reading the slot", reason=first_line(error)
        ) from error
    finally:
        conn.finish()
    if warnings:
        raise warnings[0]


def claim_slot(conn: Connection, slot: str, publication: str) -> None:
    """Make the server count one decoded transaction of a slot, so that other lakes see a reader.

    The first capture has the same effect, but a second lake may start before this capture. The
    call confirms nothing. A failure is ignored, because the first capture follows.
    """
    with contextlib.suppress(psycopg2.Error), conn.cursor() as cursor:
        cursor.execute(
            "begin; set local statement_timeout = '5s'; set local synchronous_commit = on;"
            "select pg_logical_emit_message(true, %s, ''); commit",
            (PREFIX,),
        )
        cursor.execute(
            "begin; set local statement_timeout = '5s'; select count(*) from "
            "pg_logical_slot_peek_binary_changes(%s, null, 1, 'proto_version', '1', "
            "'publication_names', %s, 'messages', 'true'); commit",
            (slot, quoted(publication)),
        )
        return
    with contextlib.suppress(psycopg2.Error), conn.cursor() as cursor:
        cursor.execute("rollback")
