"""Connections: time limits, fixed settings, and errors of refused connections."""

from __future__ import annotations

import ast
import pickle
import re
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest
from psycopg.conninfo import make_conninfo
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.errors import ConfigurationError, ConnectionLost, TransientError
from pgcdc_assets.postgres import connection
from pgcdc_assets.postgres.connection import (
    ConnectionSettings,
    lift_transaction_timeout,
    query_connection,
)
from pgcdc_assets.postgres.errors import connection_failure
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.syntax import syntax_tree

SECRET = "s3cr3t-p4ss"


@pytest.mark.parametrize(
    "conninfo",
    [
        f"postgresql//user:{SECRET}@host/db",
        f"postgresql://user:{SECRET}@host/db?no_such_parameter=1",
        f"postgresql://bob:{SECRET}/db?host=/run/pg",
        f"postgresql://bob:{SECRET}",
        f"postgresql://bob:{SECRET}/ss?host=h",
        f"postgresql://a:5432,bob:{SECRET}/db",
        f"host=db password='{SECRET}",
        f"{SECRET}",
    ],
)
def test_the_error_does_not_contain_a_malformed_connection_string(conninfo: str) -> None:
    """B18: the string may contain a password."""
    settings = ConnectionSettings(conninfo, "shop")
    with pytest.raises(ConfigurationError, match="is malformed: write it as") as caught:
        settings.conninfo_for("capture")
    assert SECRET not in f"{caught.value!r} {settings!r}"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("conninfo", "description"),
    [
        ("postgresql://bob:pw@db.example.com:5433/shop", "shop on db.example.com:5433 as bob"),
        ("host=db user=bob password=pw", "bob on db:5432 as bob"),
        ("host=a,b,c port=1,,3 dbname=shop user=bob", "shop on a,b,c:1,,3 as bob"),
        ("host=a,b port=1,2 dbname=shop user=bob", "shop on a,b:1,2 as bob"),
    ],
)
def test_the_description_of_a_server_has_no_password(
    monkeypatch: pytest.MonkeyPatch, conninfo: str, description: str
) -> None:
    """B18."""
    for name in ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    assert ConnectionSettings(conninfo).describe() == description


def test_options_of_the_user_are_kept_and_fixed_settings_take_precedence() -> None:
    settings = ConnectionSettings("host=db options='-c work_mem=1MB -c datestyle=German'", "shop")
    conninfo = settings.conninfo_for("capture", replication=True)
    assert conninfo.index("work_mem=1MB") < conninfo.index("datestyle=ISO")
    assert "replication=database" in conninfo
    assert "'pgcdc capture shop'" in conninfo


def test_an_application_name_fits_postgres_even_when_cut_in_a_letter() -> None:
    name = ConnectionSettings("", "ä" * 40).application_name("capture")
    assert name.startswith("pgcdc capture ä")
    assert len(name.encode()) <= 63


@pytest.mark.parametrize(
    ("text", "kind", "remedy"),
    [
        (
            'FATAL:  password authentication failed for user "u"',
            ConfigurationError,
            "Check user and",
        ),
        ("fe_sendauth: no password supplied", ConfigurationError, "in PGPASSWORD or in ~/.pgpass"),
        (
            'FATAL:  no pg_hba.conf entry for host "::1", user "u", database "d", SSL encryption\n'
            'connection to server at "h" (::1), port 5432 failed: FATAL:  no pg_hba.conf entry for '
            'host "::1", user "u", database "d", no encryption',
            ConfigurationError,
            "SSL encryption. Add a line",
        ),
        (
            "server does not support SSL, but SSL was required",
            ConfigurationError,
            "sslmode=prefer",
        ),
        ('FATAL:  role "u" is not permitted to log in', ConfigurationError, 'alter role "u" login'),
        (
            "FATAL:  permission denied to start WAL sender\nDETAIL:  Only roles with the "
            "REPLICATION "
            "attribute may start a WAL sender process.",
            ConfigurationError,
            'alter role "u" replication',
        ),
        (
            "FATAL:  must be superuser or replication role to start walsender",
            ConfigurationError,
            'alter role "u" replication',
        ),
        (
            "FATAL:  number of requested standby connections exceeds max_wal_senders (currently 1)",
            ConfigurationError,
            "raise max_wal_senders",
        ),
        (
            'FATAL:  no pg_hba.conf entry for host "::1"',
            ConfigurationError,
            "pg_hba.conf and reload",
        ),
        ("FATAL:  the database system is starting up", ConnectionLost, "run it again"),
        ("FATAL:  sorry, too many clients already", ConnectionLost, "run it again"),
        ("timeout expired", ConnectionLost, "is the server running there"),
        (
            "FATAL:  la base de données n'accepte plus de connexions",
            ConnectionLost,
            "n'accepte plus",
        ),
    ],
)
def test_each_refusal_has_its_remedy(text: str, kind: type[Exception], remedy: str) -> None:
    full = f'connection to server at "h" (::1), port 5432 failed: {text}\n'
    failure = connection_failure("d on h:5432 as u", full)
    assert type(failure) is kind
    assert remedy in str(failure)
    assert "\n" not in str(failure)


@pytest.mark.postgres
@pytest.mark.every_pg
def test_defaults_of_the_database_do_not_affect_sessions(database: Database) -> None:
    """B15, on SQL and on replication connections."""
    hostile = {
        "datestyle": ("German", "ISO, MDY"),
        "intervalstyle": ("iso_8601", "postgres"),
        "timezone": ("'Asia/Kathmandu'", "UTC"),
        "extra_float_digits": ("-5", "3"),
        "bytea_output": ("escape", "hex"),
        "lc_monetary": ("'POSIX'", "C"),
        "search_path": ("public", "pg_catalog"),
        "quote_all_identifiers": ("on", "off"),
        "tcp_keepalives_idle": ("7200", "30"),
        "row_security": ("on", "off"),
        "client_min_messages": ("error", "warning"),
        "client_encoding": ("latin1", "UTF8"),
        "statement_timeout": ("'1h'", None),
        "idle_session_timeout": ("'1h'", "0"),
        "idle_in_transaction_session_timeout": ("'1h'", "0"),
        "default_transaction_isolation": ("'serializable'", "read committed"),
        "default_transaction_deferrable": ("on", "off"),
    }
    if database.server.version >= 17:
        hostile["transaction_timeout"] = ("'1h'", "0")
    for name, (value, _) in hostile.items():
        database.execute(f'alter database "{database.name}" set {name} = {value}')
    settings = database.settings(statement_timeout_ms=30_000)

    def shown(conn: psycopg2.extensions.connection) -> dict[str, str]:
        values = {}
        with conn.cursor() as cursor:
            for name in hostile:
                cursor.execute(f"show {name}")
                row = cursor.fetchone()
                assert row is not None
                values[name] = row[0]
        return values

    expected = {name: ours for name, (_, ours) in hostile.items()}
    with query_connection(settings, "test") as conn:
        assert shown(conn) == expected | {"statement_timeout": "30s"}
    replication = psycopg2.connect(
        settings.conninfo_for("capture", replication=True),
        connection_factory=LogicalReplicationConnection,
    )
    with closing(replication):
        lift_transaction_timeout(replication)
        assert shown(replication) == expected | {"statement_timeout": "0"}


@pytest.mark.postgres
def test_connections_have_application_names(database: Database) -> None:
    """B18."""
    with query_connection(database.settings("shop"), "sensor"):
        names = database.query("select application_name from pg_stat_activity")
    assert ("pgcdc sensor shop",) in names


def test_each_connection_of_the_package_gets_its_application_name() -> None:
    """B18. `conninfo_for` writes the name; the demo's shop is a program of its own."""
    package = Path(connection.__file__).parents[1]
    unnamed, count = [], 0
    for path in package.rglob("*.py"):
        for function in ast.walk(syntax_tree(path)):
            if not isinstance(function, ast.FunctionDef) or "demo" in path.parts:
                continue
            text = ast.unparse(function)
            if path.name == "libpq.py" and function.name == "establish":
                continue
            if re.search(r"psycopg2?\.connect\(|PGconn\.connect|\bestablish\(", text):
                count += 1
                if ".conninfo_for(" not in text:
                    unnamed.append(f"{path}: {function.name}")
    assert unnamed == []
    assert count >= 5


@pytest.mark.postgres
def test_a_slow_statement_ends_at_the_limit_as_a_transient_error(database: Database) -> None:
    settings = database.settings(statement_timeout_ms=50)
    with (
        pytest.raises(TransientError, match="statement timeout"),
        query_connection(settings, "sensor") as conn,
        conn.cursor() as cursor,
    ):
        cursor.execute("select pg_sleep(10)")


@pytest.mark.postgres
def test_an_object_that_is_dropped_during_a_query_is_a_transient_error(database: Database) -> None:
    """Functions of the server read the newest catalog, and a query an earlier one."""
    with (
        pytest.raises(TransientError, match=r"cache lookup failed.*the catalog changed"),
        query_connection(database.settings(), "sensor") as conn,
        conn.cursor() as cursor,
    ):
        cursor.execute("select array_in('{1}', 999999::oid, -1)")


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("code", "remedy"),
    [("53100", "has the resource"), ("53200", "higher max_locks_per_transaction")],
)
def test_a_lack_of_resources_is_a_transient_error(
    database: Database, code: str, remedy: str
) -> None:
    """The server reports so many locks that it has no memory left for as 53200."""
    with (
        pytest.raises(TransientError, match=f"short of something while .*{remedy}"),
        query_connection(database.settings(), "sensor") as conn,
        conn.cursor() as cursor,
    ):
        cursor.execute(
            "do $$ begin raise exception using errcode = "
            f"'{code}', message = 'short of something'; end $$"
        )


@pytest.mark.postgres
def test_a_silent_server_is_a_lost_connection_after_the_connect_timeout(
    database: Database, proxy: TcpProxy
) -> None:
    proxy.stall()
    settings = ConnectionSettings(proxy.conninfo(database.conninfo), "shop", connect_timeout=2)
    with (
        pytest.raises(ConnectionLost, match="timeout expired"),
        query_connection(settings, "sensor"),
    ):
        pass


@pytest.mark.postgres
def test_a_terminated_session_is_a_transient_error_that_can_be_pickled(
    database: Database, proxy: TcpProxy
) -> None:
    settings = ConnectionSettings(proxy.conninfo(database.conninfo), "shop")
    with (
        pytest.raises(ConnectionLost, match="session 'pgcdc sensor shop'") as caught,
        query_connection(settings, "sensor") as conn,
        conn.cursor() as cursor,
    ):
        proxy.cut()
        cursor.execute("select 1")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_sql_of_a_remedy_quotes_odd_names_of_role_and_database() -> None:
    database, role = "a on h:1 b", 'x as "y" on z'
    settings = ConnectionSettings(conninfo=make_conninfo("host=h", dbname=database, user=role))
    for text, remedy in (
        ("FATAL:  role is not permitted to log in", 'alter role "x as ""y"" on z" login'),
        (
            "FATAL:  permission denied for database",
            'grant connect on database "a on h:1 b" to "x as ""y"" on z"',
        ),
    ):
        assert str(connection_failure(settings.describe(), text)).endswith(remedy)
