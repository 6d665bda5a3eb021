"""The transactions of a database that are prepared and not finished.

Such a transaction keeps its locks, and delays VACUUM in the whole cluster. A slot keeps the WAL
from the transaction's start, with and without two_phase.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.blocking_transactions import ending_sql
from pgcdc_assets.postgres.slots.status import SlotStatus

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# A transaction manager ends its transactions within seconds, and after a crash within minutes.
_FORGOTTEN = dt.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class OpenPreparedTransaction:
    """A row of pg_prepared_xacts.

    Attributes:
        xid: the transaction's id.
        gid: the global identifier of PREPARE TRANSACTION.
        age: time since PREPARE TRANSACTION, by the server's clock.
    """

    xid: int
    gid: str
    age: dt.timedelta

    @property
    def is_forgotten(self) -> bool:
        """Whether the transaction is so old that its transaction manager may have forgotten it."""
        return self.age >= _FORGOTTEN

    @property
    def remedy(self) -> str:
        """The statements that end the transaction."""
        return f"End it by: {ending_sql(self.gid)}."

    def __str__(self) -> str:
        seconds = int(self.age.total_seconds())
        return f"Transaction {self.gid!r} (xid {self.xid}) was prepared {seconds} s ago."


def read_prepared_transactions(conn: Connection) -> list[OpenPreparedTransaction]:
    """Return the prepared transactions of the connection's database, oldest first.

    A standby shows none.
    """
    with conn.cursor() as cursor:
        cursor.execute(
            "select transaction::text::bigint, gid, clock_timestamp() - prepared "
            "from pg_prepared_xacts where database = current_database() order by prepared, gid"
        )
        return [OpenPreparedTransaction(*row) for row in cursor.fetchall()]


def check_two_phase(status: SlotStatus, *, is_wanted: bool) -> None:
    """Raise ConfigurationError for a slot to adopt that has two_phase, if the settings do not.

    Args:
        status: the slot.
        is_wanted: `stream.two_phase`.
    """
    if status.two_phase and not is_wanted:
        raise ConfigurationError(
            reason=f"Replication slot {status.slot} was created with two_phase: the server sends "
            "prepared transactions before their commit. Set `stream.two_phase: true`, or choose "
            "another slot name. If no other program uses this slot, you may drop it: "
            f"select pg_drop_replication_slot('{status.slot}')"
        )
