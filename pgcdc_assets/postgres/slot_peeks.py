"""Peeks at the changes of a slot, which confirm nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psycopg2
from psycopg2.errors import ObjectInUse, QueryCanceled, UndefinedObject

from pgcdc_assets.postgres.slots import SlotStatus
from pgcdc_assets.postgres.wal import PREFIX
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


def has_publication_gap(
    conn: Connection, status: SlotStatus, publication: str, limit: str = "10min"
) -> bool:
    """Return whether a slot holds changes from a time when its publication did not exist.

    Such changes are an error or a warning when the server decodes them. The function peeks at all
    changes of the slot, which confirms nothing. No peek is necessary if the publication is older
    than the slot's `catalog_xmin`.
    """
    with conn.cursor() as cursor:
        cursor.execute("select age(xmin) from pg_publication where pubname = %s", (publication,))
        row = cursor.fetchone()
        if row is None or row[0] > (status.catalog_xmin_age or 0):
            return False
        conn.notices.clear()
        # The limit ends with the transaction, so that later statements have that of the connection.
        cursor.execute("begin; select set_config('statement_timeout', %s, true)", (limit,))
        try:
            cursor.execute(
                "select count(*) from pg_logical_slot_peek_binary_changes(%s, %s, null, "
                "'proto_version', '1', 'publication_names', %s)",
                (status.slot, str(status.current_lsn), quoted(publication)),
            )
        except UndefinedObject:
            return True
        except (ObjectInUse, QueryCanceled):
            return False
        finally:
            cursor.execute("rollback")
    # Postgres 18 and newer warn only, and skip the changes.
    return any(f'"{publication}"' in notice for notice in conn.notices)


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
