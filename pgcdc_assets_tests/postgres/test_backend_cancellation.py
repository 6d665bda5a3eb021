"""A statement of another thread is cancelled in seconds, whether or not the server answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import psycopg2.extensions
import pytest
from psycopg2.errors import QueryCanceled

from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.errors import ConnectionLost
from pgcdc_assets.local import free_port
from pgcdc_assets.postgres.backend_cancellation import cancel_statement, end_session
from pgcdc_assets.postgres.catalog.relations import published_tables
from pgcdc_assets.postgres.connection import Connection, ConnectionSettings, connect
from pgcdc_assets.postgres.copy import transport as copy_transport
from pgcdc_assets.postgres.copy.reader import SnapshotReader
from pgcdc_assets.postgres.copy.transport import copy_chunks
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.tls_server import VERSION, TlsServer
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

SESSIONS = """
  from pg_stat_activity
 where application_name = 'pgcdc copy test' and datname = current_database()
"""
SLEEPING = f"select count(*) {SESSIONS} and wait_event = 'PgSleep'"
ROWS = "copy (select repeat('x', 1000) from generate_series(1, 300000)) to stdout"

# Two time limits of a request, and what a busy machine needs.
SOON = 8.0


class Aside:
    """A call in a thread."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        """Wait for the end, and return the error."""
        self._thread.join(SOON)
        assert not self._thread.is_alive()
        return self.error


@contextlib.contextmanager
def sleeping(
    database: Database, settings: ConnectionSettings
) -> Iterator[tuple[Connection, Aside]]:
    """A session that another thread lets sleep."""
    with contextlib.closing(connect(settings, "copy", statement_timeout_ms=0)) as conn:
        aside = Aside(lambda: conn.cursor().execute("select pg_sleep(300)"))
        wait_until(lambda: database.value(SLEEPING), "the session to sleep")
        try:
            yield conn, aside
        finally:
            # After a failure: closing the connection would wait for the statement.
            database.query(f"select pg_terminate_backend(pid) {SESSIONS}")


@contextlib.contextmanager
def threads_running() -> Iterator[None]:
    """Check that no call inside the block stops the other threads."""
    gaps, is_over = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not is_over.wait(0.01):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    aside = Aside(tick)
    began = time.monotonic()
    yield
    is_over.set()
    assert aside.end() is None
    assert time.monotonic() - began < SOON
    assert max(gaps) < 1.0


def _gone(database: Database) -> None:
    wait_until(
        lambda: not database.value(f"select count(*) {SESSIONS}"), "the server to end the session"
    )


@pytest.mark.every_pg
def test_a_cancelled_statement_leaves_its_session(database: Database) -> None:
    with sleeping(database, database.settings()) as (conn, aside):
        assert cancel_statement(database.settings(), conn)
        assert isinstance(aside.end(), QueryCanceled)
        with conn.cursor() as cursor:
            cursor.execute("select 1")


@pytest.mark.parametrize("hosts", ["second", "socket"])
def test_the_request_reaches_the_server_of_the_session(database: Database, hosts: str) -> None:
    """The first of two hosts does not answer any more, or did not when the session began."""
    server = database.server
    if hosts == "socket":
        conninfo = server.conninfo(database.name, unix_socket=True)
    else:
        conninfo = (
            f"host=127.0.0.1,127.0.0.1 hostaddr=127.0.0.1,127.0.0.1 port={free_port()},"
            f"{server.port} dbname={database.name} user=postgres target_session_attrs=read-write"
        )
    settings = ConnectionSettings(conninfo, "test")
    with sleeping(database, settings) as (conn, aside):
        assert cancel_statement(settings, conn)
        assert isinstance(aside.end(), QueryCanceled)


def test_the_statement_of_another_client_is_not_cancelled(database: Database) -> None:
    """A pooler gives its clients process numbers that are not those of the server."""

    class Pooled(psycopg2.extensions.connection):
        def get_backend_pid(self) -> int:
            return foreign

    with database.connect() as other, contextlib.ExitStack() as stack:
        foreign = other.get_backend_pid()
        conninfo = database.settings().conninfo_for("copy")
        pooled = stack.enter_context(
            contextlib.closing(psycopg2.connect(conninfo, connection_factory=Pooled))
        )
        aside = Aside(lambda: other.cursor().execute("select pg_sleep(1)"))
        wait_until(
            lambda: database.query(
                "select from pg_stat_activity where pid = %s and wait_event = 'PgSleep'", (foreign,)
            ),
            "the session to sleep",
        )
        assert not cancel_statement(database.settings(), pooled)
        assert aside.end() is None


def test_a_closed_connection_has_no_statement(database: Database) -> None:
    conn = connect(database.settings(), "copy")
    conn.close()
    end_session(database.settings(), conn)
    assert not cancel_statement(database.settings(), conn)


def test_a_session_ends_although_it_writes_nothing(database: Database) -> None:
    with sleeping(database, database.settings()) as (conn, aside):
        end_session(database.settings(), conn)
        assert isinstance(aside.end(), psycopg2.OperationalError)
        _gone(database)


@pytest.mark.parametrize("is_stalled", [True, False])
def test_a_session_ends_although_the_server_does_not_answer(
    database: Database, proxy: TcpProxy, is_stalled: bool
) -> None:
    """A request of psycopg2 would stop all threads of the process for the time of the silence."""
    settings = ConnectionSettings(proxy.conninfo(database.conninfo), "test")
    with sleeping(database, settings) as (conn, aside):
        if is_stalled:
            proxy.stall()
        else:
            proxy.refuse()
        with threads_running():
            end_session(settings, conn)
            assert isinstance(aside.end(), psycopg2.OperationalError)
    proxy.resume()


@pytest.mark.parametrize("is_stalled", [True, False])
@pytest.mark.parametrize("by_driver", [True, False])
def test_a_copy_that_is_left_early_ends(
    database: Database,
    proxy: TcpProxy,
    monkeypatch: pytest.MonkeyPatch,
    by_driver: bool,
    is_stalled: bool,
) -> None:
    monkeypatch.setattr(copy_transport, "_is_encrypted", lambda _: by_driver)
    settings = ConnectionSettings(proxy.conninfo(database.conninfo), "test")
    threads = threading.active_count()
    with contextlib.closing(connect(settings, "copy", statement_timeout_ms=0)) as conn:
        chunks = copy_chunks(settings, conn, ROWS, 100_000)
        next(chunks)
        if is_stalled:
            proxy.stall()
        with threads_running():
            chunks.close()
    proxy.resume()
    _gone(database)
    wait_until(lambda: threading.active_count() <= threads + 2, "the thread of the copy to end")


@pytest.mark.skipif(binaries(VERSION) is None, reason="the embedded servers are built without SSL")
def test_an_encrypted_copy_that_is_left_early_ends(
    tls_server: TlsServer, tls_database: Database
) -> None:
    root = tls_server.certificates.path("root.crt")
    options = f"sslmode=verify-full sslrootcert={root}"
    settings = ConnectionSettings(tls_server.conninfo(tls_database, options), "test")
    # Repeated: whether the receive buffer is full at the end is a matter of chance.
    for _ in range(10):
        with contextlib.closing(connect(settings, "copy", statement_timeout_ms=0)) as conn:
            assert conn.info.ssl_in_use
            chunks = copy_chunks(settings, conn, ROWS, 100_000)
            next(chunks)
            with threads_running():
                chunks.close()
        _gone(tls_database)


@pytest.mark.parametrize("is_stalled", [True, False])
def test_the_read_of_another_thread_ends(
    database: Database, proxy: TcpProxy, is_stalled: bool
) -> None:
    database.execute(
        "create table t (id int primary key); insert into t values (1);"
        "create publication pub for table t"
    )
    with create_slot(database.settings(), f"s_{database.name}", temporary=True) as snapshot:
        with contextlib.closing(connect(database.settings(), "catalog")) as conn:
            [table] = published_tables(conn, "pub")
        settings = ConnectionSettings(proxy.conninfo(database.conninfo), "test")
        with SnapshotReader(settings, snapshot.snapshot_name) as reader:
            rows = reader.read(table, condition="(select true from pg_sleep(300))")
            aside = Aside(lambda: list(rows))
            wait_until(lambda: database.value(SLEEPING), "the copy to sleep")
            if is_stalled:
                proxy.stall()
            with threads_running():
                reader.cancel()
                assert isinstance(aside.end(), ConnectionLost)
            if not is_stalled:
                _gone(database)
    proxy.resume()
