"""Conversion of server errors to the package's errors: fix a setting, or retry.

libpq reports no SQLSTATE for a refused connection, only text. Patterns over Postgres's English
messages (src/backend/libpq/auth.c, src/backend/utils/init/postinit.c) therefore classify refused
connections. A message in another language matches no pattern and becomes a ConnectionLost with the
server's sentence.
"""

from __future__ import annotations

import re

import psycopg2

from pgcdc_assets.errors import ConfigurationError, ConnectionLost, PgcdcError, TransientError
from pgcdc_assets.postgres.encodings import UNCONVERTIBLE
from pgcdc_assets.table_name import quoted

_CONFIGURATION = [
    (
        r"password authentication failed|no password supplied",
        "Check user and password in the connection string ({variable}), in PGPASSWORD or in "
        "~/.pgpass.",
    ),
    (
        r"(?:PAM|LDAP|RADIUS|GSSAPI|certificate|Peer|Ident) authentication failed",
        "Check the server's pg_hba.conf and the user in the connection string ({variable}).",
    ),
    (r"role .* does not exist", "Check the user in the connection string ({variable})."),
    (r"database .* does not exist", "Check the database in the connection string ({variable})."),
    (r"not permitted to log in", "Allow the login with: alter role {user} login"),
    (
        r"start WAL sender|start walsender|role has no REPLICATION",
        "Grant it with: alter role {user} replication (on Amazon RDS: grant rds_replication to "
        "{user})",
    ),
    (
        r"permission denied for database",
        "Grant it with: grant connect on database {database} to {user}",
    ),
    (
        r"(?:no pg_hba\.conf entry|pg_hba\.conf rejects) .*, no encryption",
        "This connection is not encrypted: set sslmode=require in the connection string "
        "({variable}). If that fails too, add a line for this user, database and address to the "
        "server's pg_hba.conf and reload it.",
    ),
    (
        r"no pg_hba\.conf entry|pg_hba\.conf rejects",
        "Add a line for this user, database and address to the server's pg_hba.conf and reload it.",
    ),
    (
        r"standby connections exceeds|max_wal_senders",
        "All walsenders are in use: end one, or raise max_wal_senders and restart the server.",
    ),
    (
        r"could not translate host name .*(?:not known|No address)",
        "Check the host in the connection string ({variable}).",
    ),
    (
        r"server does not support SSL",
        "Set sslmode=prefer or disable in the connection string ({variable}), or turn ssl on in "
        "the server's settings.",
    ),
    (
        r"root certificate file .* does not exist",
        "Name the file of the server's certificate authority with sslrootcert in the connection "
        "string ({variable}); sslrootcert=system uses the operating system's authorities.",
    ),
    (
        r"SSL was required|certificate verify failed|certificate .* does not exist"
        r"|server certificate for",
        "Check host, sslmode and sslrootcert in the connection string ({variable}).",
    ),
    (
        r"unrecognized configuration parameter|unsupported startup parameter",
        "Use Postgres 14 or newer, and connect directly, without a connection pooler.",
    ),
    (
        r"invalid .*(?:value|option)|invalid connection option",
        "Check the connection string ({variable}).",
    ),
]

# The sessions of a standby end with 57P04 if the primary drops their database.
_GONE = {"57P01", "57P02", "57P03", "57P04", "57P05"}

# What a function of the server reports of an object that was dropped during the query. The server
# does not translate internal errors.
_DROPPED = re.compile(
    r"cache lookup failed for |could not open relation with OID |"
    r"tuple concurrently (?:updated|deleted)"
)


def _database_and_role(server: str) -> tuple[str, str]:
    """Return the names of database and role in `ConnectionSettings.describe()`.

    Both may contain any characters, also " on " and " as ".
    """
    found = re.fullmatch(r"(.*) on (?:the local socket|\S+):\S* as (.*)", server, re.DOTALL)
    return ("?", "?") if found is None else (found[1], found[2])


def connection_failure(server: str, text: str, variable: str = "PGCDC_DSN") -> PgcdcError:
    """Return a ConfigurationError or a ConnectionLost for a refused connection.

    Args:
        server: `ConnectionSettings.describe()`: `database on host:port as user`.
        text: libpq's message, one or more lines.
        variable: the environment variable of the connection string.
    """
    message = _informative_attempt(text)
    reason = re.sub(r"^FATAL:\s+", "", message).rstrip(".") or "no reason given"
    for pattern, remedy in _CONFIGURATION:
        if re.search(pattern, message):
            database, user = map(quoted, _database_and_role(server))
            advice = remedy.format(user=user, database=database, variable=variable)
            return ConfigurationError(reason=f"Cannot connect to {server}: {reason}. {advice}")
    if re.search(r"refused|No such file|timeout expired|No route|unreachable", message):
        reason += " (is the server running there, and are host and port right?)"
    if variable != "PGCDC_DSN":
        reason += f". The connection string is in {variable}"
    return ConnectionLost(server=server, doing="connecting", reason=reason)


def _informative_attempt(text: str) -> str:
    """Return the first line of the most informative connection attempt.

    libpq makes one attempt per address of a host; the last attempt is the most informative. With
    sslmode=prefer, libpq repeats a failed TLS attempt without encryption. The failure of the
    repetition often says "no encryption" only, so attempts with TLS are preferred.
    """
    attempts: list[str] = []
    for line in (line.strip() for line in text.strip().splitlines()):
        reason = re.sub(r"^connection to server (?:at|on) .*? failed: ", "", line)
        if not attempts or reason != line or line.startswith("could not translate"):
            attempts.append(reason)
    with_tls = [attempt for attempt in attempts if not attempt.endswith(", no encryption")]
    return (with_tls or attempts or [""])[-1]


def statement_failure(server: str, doing: str, error: psycopg2.Error) -> PgcdcError | None:
    """Return the package's error for an error of a running session.

    Return None if the error is neither a configuration error nor transient. SQLSTATE codes:
    Postgres documentation, Appendix A. PostgreSQL Error Codes.
    """
    code = error.pgcode or ""
    primary = error.diag.message_primary if error.diag is not None else None
    reason = primary or str(error).strip().partition("\n")[0] or "connection closed"
    # psycopg2 raises a bare DatabaseError for a connection that is lost in the middle of COPY.
    if not code and (
        type(error) is psycopg2.DatabaseError
        or isinstance(error, psycopg2.OperationalError | psycopg2.InterfaceError)
    ):
        return ConnectionLost(server=server, doing=doing, reason=reason.rstrip("."))
    if code == "XX000" and _DROPPED.match(reason):
        return TransientError(
            reason=f"{server}: {reason} while {doing}: the catalog changed during the query. Run "
            "it again."
        )
    return reported_failure(server, doing, code, reason)


def reported_failure(server: str, doing: str, code: str, message: str) -> PgcdcError | None:
    """Return the package's error for an error that the server reported.

    Return None if the error is neither a configuration error nor transient.

    Args:
        server: `ConnectionSettings.describe()`.
        doing: what the session did, for the sentence.
        code: the SQLSTATE.
        message: the primary message.
    """
    reason = message.rstrip(".")
    if code.startswith("08") or code in _GONE:
        return ConnectionLost(server=server, doing=doing, reason=reason)
    if code in {"57014", "55P03", "40001", "40P01", "53300"}:
        return TransientError(
            reason=f"{server}: {reason} while {doing}. Run it again; if it happens "
            "often, raise the time limits of the connection settings."
        )
    if code.startswith("53"):
        # Insufficient resources. A query locks each partition of a table.
        locks = " A table with many partitions may need a higher max_locks_per_transaction."
        return TransientError(
            reason=f"{server}: {reason} while {doing}. Run it again when the server has the "
            f"resource.{locks if code == '53200' else ''}"
        )
    if code in UNCONVERTIBLE:
        # The server's sentence contains bytes: leave it out.
        return ConfigurationError(
            reason=f"{server}: a name of a schema, table, column or type is not UTF-8, and the "
            "server cannot convert it. Rename it, or take its table out of the publication. psql "
            "shows such names after: select set_config('client_encoding', "
            "current_setting('server_encoding'), false)"
        )
    if code == "42501":
        return ConfigurationError(
            reason=f"{server}: {reason}. `pgcdc check` prints the SQL that grants what is missing."
        )
    return None
