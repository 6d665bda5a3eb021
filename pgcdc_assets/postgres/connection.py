"""Connections to the source database: identification, time limits and output settings.

Values are text in the whole pipeline, and server settings such as `datestyle` determine this text.
Every session, SQL and replication, therefore pins the settings that shape output in its start-up
packet. A row's copy and the row's change in the stream then have the same text, whatever defaults
an administrator sets with `alter database ... set`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import psycopg2
import psycopg2.extensions
from psycopg import ProgrammingError as InvalidConninfo
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgcdc_assets.errors import UNKNOWN_CAPTURE, ConfigurationError, renewal_command
from pgcdc_assets.postgres.errors import connection_failure, statement_failure

# The type of an ordinary SQL connection, for rooms that do not know the driver.
Connection: TypeAlias = psycopg2.extensions.connection

_MAX_NAME_BYTES = 63

# If a client disappears without closing the connection, the server keeps the session, and a lease
# of the session, until TCP keepalive fails: after two hours by default.
_KEEPALIVES = {
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}

# search_path: types such as regclass print a schema only outside the search path. row_security:
# with `off`, a query that a policy would filter fails. client_min_messages: since Postgres 18 a
# missing publication is a warning only (src/backend/replication/pgoutput/pgoutput.c).
# default_transaction_isolation: a standby refuses `serializable`. A backslash escapes a space.
_PINNED = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "search_path": "pg_catalog",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "row_security": "off",
    "client_min_messages": "warning",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "default_transaction_isolation": "read\\ committed",
    "default_transaction_deferrable": "off",
}

# The pinned settings that a server reports at the start of each session, and one whose default is
# another value.
_REPORTED = {"DateStyle": "ISO", "IntervalStyle": "postgres", "TimeZone": "UTC"}
PINNED_SQL = "pg_catalog.current_setting('row_security') = 'off'"

# The encoding of a database that stores any bytes without conversion.
SQL_ASCII = "SQL_ASCII"


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Connection parameters and time limits of a source database.

    Attributes:
        conninfo: a libpq URI or `key=value` string; not in `repr`, because the string may contain
            a password.
        name: the capture's name, shown in `application_name`.
        connect_timeout: seconds to wait for the server to accept a connection.
        statement_timeout_ms: limit of one SQL statement on `query_connection`; 0: no limit.
        lock_timeout_ms: limit of one wait for a lock, slot creation included; 0: no limit.
        tcp_user_timeout_ms: time without a TCP acknowledgement of sent bytes after which the
            connection counts as lost.
        variable: the environment variable of the connection string, for errors.
        primary: the primary of a source database on a standby, which helps the creation of slots;
            None: not known.
    """

    conninfo: str = field(repr=False)
    name: str = ""
    connect_timeout: int = 10
    statement_timeout_ms: int = 30_000
    lock_timeout_ms: int = 10_000
    tcp_user_timeout_ms: int = 60_000
    variable: str = "PGCDC_DSN"
    primary: ConnectionSettings | None = None

    def parameters(self) -> dict[str, str]:
        """Return the parameters in the connection string.

        Raises:
            ConfigurationError: libpq cannot parse the string, or its port is not a number. The
                error does not contain the string, because the string may contain a password.
        """
        try:
            parsed = conninfo_to_dict(self.conninfo)
        except InvalidConninfo:
            parsed = None
        # libpq ends a password at its first `@` or `/`, and takes the rest for host and database,
        # which errors and logs name. A password without an `@` behind it is the port.
        if (
            parsed is None
            or _has_rest_of_password(self.conninfo, parsed)
            or not all(map(_is_port, str(parsed.get("port") or "").split(",")))
        ):
            raise ConfigurationError(
                reason=f"The connection string ({self.variable}) is malformed: write it as "
                "postgresql://USER:PASSWORD@HOST:PORT/DATABASE with special characters "
                "percent-encoded, or as host=HOST port=PORT dbname=DATABASE user=USER "
                "password=PASSWORD."
            )
        return {key: str(value) for key, value in parsed.items() if value is not None}

    @property
    def role(self) -> str:
        """The role that connects; `?` if it is not known."""
        return self._known_parameters().get("user", "?")

    def describe(self) -> str:
        """Return database, server and user, such as `shop on db.example.com:5432 as bob`."""
        known, user = self._known_parameters(), self.role
        host = known.get("host") or known.get("hostaddr") or "the local socket"
        return f"{known.get('dbname') or user} on {host}:{known.get('port', '5432')} as {user}"

    @property
    def renewal(self) -> str:
        """The command that begins a new epoch of the capture."""
        return renewal_command(self.name or UNKNOWN_CAPTURE)

    def _known_parameters(self) -> dict[str, str]:
        """Return libpq's defaults and the parameters in the connection string."""
        defaults = {
            option.keyword.decode(): option.val.decode()
            for option in pq.Conninfo.get_defaults()
            if option.val is not None
        }
        return defaults | self.parameters()

    def connect_seconds(self) -> int:
        """Return the time limit of one address; 0 or less: no limit, as in libpq.

        Raises:
            ConfigurationError: the limit in the connection string is not a number.
        """
        given = self.parameters().get("connect_timeout")
        try:
            return int(given or self.connect_timeout)
        except ValueError:
            raise ConfigurationError(
                reason=f"The connect_timeout of the connection string ({self.variable}) is not a "
                "number of seconds."
            ) from None

    def application_name(self, purpose: str) -> str:
        """Return the `application_name` of a connection, for pg_stat_activity."""
        name = f"pgcdc {purpose} {self.name}".rstrip()
        return name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")

    def conninfo_for(
        self,
        purpose: str,
        replication: bool = False,
        *,
        statement_timeout_ms: int = 0,
        lock_timeout_ms: int = 0,
    ) -> str:
        """Return a connection string with application name, keepalives, limits and pinned settings.

        Options of the user's string (such as Neon's `options=endpoint=...`) come before the
        package's options.
        """
        given = self.parameters()
        limits = {"statement_timeout": statement_timeout_ms, "lock_timeout": lock_timeout_ms}
        pinned = _PINNED | _KEEPALIVES | {key: str(value) for key, value in limits.items()}
        options = " ".join(f"-c {key}={value}" for key, value in pinned.items())
        parameters = {
            "connect_timeout": str(self.connect_timeout),
            "keepalives": "1",
            "keepalives_idle": "30",
            "keepalives_interval": "10",
            "keepalives_count": "3",
            "tcp_user_timeout": str(self.tcp_user_timeout_ms),
            **given,
            "application_name": self.application_name(purpose),
            "client_encoding": "UTF8",
            "options": f"{given.get('options', '')} {options}".strip(),
        }
        parameters.pop("replication", None)
        if replication:
            parameters["replication"] = "database"
        return make_conninfo("", **parameters)


def _has_rest_of_password(conninfo: str, parsed: Mapping[str, object]) -> bool:
    """Return whether a URI has an `@` in the host, or an unencoded one in the database's name.

    The check of the name reads the raw text, because the parsed name has no percent-encoding.
    """
    if not conninfo.startswith(("postgresql://", "postgres://")):
        return False
    raw_name = conninfo.partition("://")[2].partition("/")[2].partition("?")[0]
    return "@" in raw_name or "@" in str(parsed.get("host") or "")


def _is_port(text: str) -> bool:
    """Return whether libpq takes one of the ports for a number, or for the default."""
    return not text.strip() or text.strip().isdecimal()


@contextlib.contextmanager
def query_connection(
    settings: ConnectionSettings, purpose: str, *, statement_timeout_ms: int | None = None
) -> Iterator[Connection]:
    """Open an SQL connection in autocommit mode, with time limits, and close it at the end.

    The context manager converts server errors inside the block: a lost connection or a timeout
    becomes a TransientError, a missing privilege a ConfigurationError. Other errors stay unchanged.

    Raises:
        ConfigurationError: the settings do not lead to a usable connection.
        ConnectionLost: the server is down, or went away.
    """
    with contextlib.closing(
        connect(settings, purpose, statement_timeout_ms=statement_timeout_ms)
    ) as connection:
        with sorted_failures(settings, purpose):
            yield connection


def connect(
    settings: ConnectionSettings, purpose: str, *, statement_timeout_ms: int | None = None
) -> Connection:
    """Open an SQL connection in autocommit mode, with time limits; the caller closes it.

    Raises:
        ConfigurationError: the settings do not lead to a usable connection.
        ConnectionLost: the server is down, or went away.
    """
    limit = settings.statement_timeout_ms if statement_timeout_ms is None else statement_timeout_ms
    conninfo = settings.conninfo_for(
        purpose, statement_timeout_ms=limit, lock_timeout_ms=settings.lock_timeout_ms
    )
    try:
        with contextlib.ExitStack() as at_failure:
            connection = at_failure.enter_context(contextlib.closing(psycopg2.connect(conninfo)))
            connection.autocommit = True
            with connection.cursor() as cursor:
                # One round trip for both.
                cursor.execute(f"{_lift_sql(connection)} select {PINNED_SQL}")
                check_pinned(
                    settings, connection.get_parameter_status, cursor.fetchone() == (True,)
                )
            at_failure.pop_all()
    except psycopg2.Error as error:
        raise connection_failure(settings.describe(), str(error), settings.variable) from error
    return connection


def check_pinned(
    settings: ConnectionSettings, reported: Callable[[str], str | None], is_pinned: bool = True
) -> None:
    """Check that a session has the pinned settings.

    Args:
        settings: the source database.
        reported: function that returns a setting that the server has reported.
        is_pinned: the value of `PINNED_SQL`.

    Raises:
        ConfigurationError: the settings were dropped on the way to the server.
    """
    if is_pinned and all(
        (reported(name) or value).startswith(value) for name, value in _REPORTED.items()
    ):
        return
    raise ConfigurationError(
        reason=f"{settings.describe()} has not received the settings of the session, which "
        "determine the texts of values. A connection pooler drops them, such as PgBouncer with "
        "`options` in ignore_startup_parameters. Connect directly, without a connection pooler "
        f"({settings.variable})."
    )


def lift_transaction_timeout(connection: Connection) -> None:
    """Remove the limit of a transaction's duration, which an administrator may have set (PG 17).

    The setting is not among the pinned ones: PG 16 refuses an unknown setting at the start.
    """
    if statement := _lift_sql(connection):
        with connection.cursor() as cursor:
            cursor.execute(statement)


def _lift_sql(connection: Connection) -> str:
    """Write the statement that removes the limit; empty for a server without this setting."""
    return "set transaction_timeout = 0;" if connection.server_version >= 170000 else ""


@contextlib.contextmanager
def sorted_failures(settings: ConnectionSettings, purpose: str) -> Iterator[None]:
    """Convert server errors inside the block as `query_connection` does."""
    try:
        yield
    except psycopg2.Error as error:
        doing = f"in session '{settings.application_name(purpose)}'"
        failure = statement_failure(settings.describe(), doing, error)
        if failure is None:
            raise
        raise failure from error
