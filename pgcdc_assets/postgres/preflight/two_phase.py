"""Pre-flight check of prepared transactions: what `stream.two_phase` needs, and forgotten ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.postgres.prepared_transactions import (
    check_two_phase,
    read_prepared_transactions,
)
from pgcdc_assets.postgres.slots.status import read_slot_status

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_FIRST_VERSION = 150000


def examine_prepared_transactions(
    conn: Connection, slot: str, version: int, *, two_phase: bool, is_known: bool
) -> Iterator[Finding]:
    """Yield findings about `stream.two_phase`, and about forgotten prepared transactions.

    Args:
        conn: a connection to the source database.
        slot: the slot's name.
        version: `server_version_num`.
        two_phase: the setting.
        is_known: the lake was filled from the slot.
    """
    if two_phase and version < _FIRST_VERSION:
        yield Finding(
            "two_phase",
            "error",
            f"`stream.two_phase: true` requires Postgres 15, and the server has version "
            f"{version // 10000}.",
            "Set it to false.",
        )
    status = read_slot_status(conn, slot)
    if status is not None and not is_known:
        try:
            check_two_phase(status, is_wanted=two_phase)
        except ConfigurationError as error:
            yield Finding("slot", "error", str(error))
    for each in read_prepared_transactions(conn):
        if each.is_forgotten:
            yield Finding(
                "prepared_transaction",
                "warning",
                f"{each} The slot keeps the WAL from its start, and VACUUM removes no later row.",
                each.remedy,
            )
