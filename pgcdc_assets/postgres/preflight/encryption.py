"""Pre-flight check of the connection's encryption."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.preflight.finding import Finding

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# With these values of sslmode libpq continues without encryption, and without an error (32.19 SSL
# Support, Table 32.1).
_OPTIONAL = frozenset({"allow", "prefer"})

_PEER = """
select inet_server_addr()::text,
       exists (select from pg_stat_gssapi where pid = pg_backend_pid() and encrypted)
"""


def examine_encryption(conn: Connection, settings: ConnectionSettings) -> Iterator[Finding]:
    """Yield a warning if the connection is not encrypted although sslmode asks for encryption.

    The default `prefer` asks for none over a Unix socket or a loopback address.

    Args:
        conn: a connection to the source database.
        settings: the settings of the connection.
    """
    mode = conn.info.dsn_parameters.get("sslmode", "")
    if conn.info.ssl_in_use or mode not in _OPTIONAL:
        return
    with conn.cursor() as cursor:
        cursor.execute(_PEER)
        row = cursor.fetchone()
    assert row is not None
    address, is_gss_encrypted = row
    if address is None or is_gss_encrypted:
        return
    is_chosen = "sslmode" in settings.parameters() or "PGSSLMODE" in os.environ
    if not is_chosen and ipaddress.ip_interface(address).is_loopback:
        return
    yield Finding(
        "encryption",
        "warning",
        f"The connection is not encrypted: with sslmode={mode} it continues without TLS.",
        f"Set sslmode=verify-full and sslrootcert in the connection string ({settings.variable}), "
        "or sslmode=disable if the network is trusted.",
    )
