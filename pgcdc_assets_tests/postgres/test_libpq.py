"""Connections of the package's own reach the server that libpq's blocking connect reaches."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import psycopg2
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgcdc_assets.errors import ConfigurationError, ConnectionLost
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.libpq import establish
from pgcdc_assets.postgres.stream.request import StreamRequest, StreamSettings
from pgcdc_assets.postgres.stream.start import start_stream
from pgcdc_assets.postgres.wal.timelines import server_timeline
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.proxy import TcpProxy


@contextlib.contextmanager
def mute() -> Iterator[int]:
    """Listen, and answer nothing. Return the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextlib.contextmanager
def full() -> Iterator[int]:
    """Listen with a full backlog, so that the system drops the next SYN. Return the port."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(listener.getsockname())
        time.sleep(0.1)
        yield listener.getsockname()[1]


Silent = Callable[[], contextlib.AbstractContextManager[int]]
each_silence = pytest.mark.parametrize("silent", [mute, full])


def behind(database: Database, *ports: int, **options: str | int) -> str:
    """Return a connection string with ports of this machine before the server's."""
    given = conninfo_to_dict(database.conninfo)
    listed = {
        "host": ",".join(["127.0.0.1"] * len(ports) + [str(given["host"])]),
        "port": ",".join(map(str, [*ports, given["port"]])),
    }
    parameters: dict[str, str | int | None] = {"connect_timeout": 2, **listed, **options}
    return make_conninfo(database.conninfo, **parameters)


@each_silence
@pytest.mark.sampled
@pytest.mark.postgres
def test_a_silent_host_is_followed_by_the_next_one(database: Database, silent: Silent) -> None:
    database.execute("create publication pub for all tables")
    database.query("select pg_create_logical_replication_slot('silent', 'pgoutput')")
    with silent() as port:
        settings = ConnectionSettings(behind(database, port), "shop")
        psycopg2.connect(settings.conninfo).close()
        with server_timeline(settings) as found:
            assert found.number == 1
        request = StreamRequest(settings, "silent", "pub", Lsn(0), StreamSettings())
        start_stream(request, lambda _: None).wire.close()


@pytest.mark.postgres
def test_each_kind_of_address_may_follow_a_silent_one(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused one, a Unix socket, a host of a service, and one with name and address."""
    server = database.server
    services = tmp_path / "services"
    with mute() as port, mute() as other:
        services.write_text(
            f"[shop]\nhost=127.0.0.1,127.0.0.1\nport={port},{server.port}\ndbname={database.name}"
        )
        monkeypatch.setenv("PGSERVICEFILE", str(services))
        user = conninfo_to_dict(database.conninfo)["user"]
        folder = f"127.0.0.1,{server.socket_dir}"
        for conninfo in (
            behind(database, other, port, 1),
            behind(database, port, host=folder),
            behind(database, port, host="nowhere.invalid,a", hostaddr="127.0.0.1,127.0.0.1"),
            behind(database, port, load_balance_hosts="random"),
            f"service=shop user={user} connect_timeout=2",
        ):
            conn = establish(conninfo, 0.3)
            assert conn.port == str(server.port).encode()
            conn.finish()


@pytest.mark.postgres
def test_target_session_attributes_apply_after_a_silent_host(database: Database) -> None:
    """With prefer-standby, libpq tries all hosts twice."""
    with mute() as port:
        for wanted in ("read-write", "primary", "prefer-standby"):
            establish(behind(database, port, target_session_attrs=wanted), 0.3).finish()
        conninfo = behind(database, port, target_session_attrs="standby")
        with pytest.raises(psycopg.OperationalError, match=r"timeout expired\n.*standby mode"):
            establish(conninfo, 0.3)


@pytest.mark.postgres
def test_a_refused_login_ends_the_search_as_in_libpq(database: Database) -> None:
    settings = ConnectionSettings(behind(database, database.server.port, user="nobody"))
    with pytest.raises(ConfigurationError, match=r"role .* does not exist"):
        with server_timeline(settings):
            pass
    with mute() as port:
        settings = ConnectionSettings(behind(database, port, user="nobody"))
        with pytest.raises(ConfigurationError, match=r"role .* does not exist"):
            with server_timeline(settings):
                pass


@each_silence
def test_silent_hosts_are_a_lost_connection_after_a_limit_for_each(silent: Silent) -> None:
    with silent() as first, mute() as second:
        settings = ConnectionSettings(
            f"host=127.0.0.1,127.0.0.1 port={first},{second} user=a dbname=b", connect_timeout=1
        )
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"connecting: timeout expired \(is the server"):
            with server_timeline(settings):
                pass
        assert time.monotonic() - began >= 2


@pytest.mark.postgres
def test_the_limit_of_the_connection_string_takes_precedence(
    database: Database, proxy: TcpProxy
) -> None:
    conninfo = f"{proxy.conninfo(database.conninfo)} connect_timeout=60"
    proxy.stall()
    resume = threading.Timer(3, proxy.resume)
    resume.start()
    with server_timeline(ConnectionSettings(conninfo, "shop", connect_timeout=1)) as found:
        assert found.number == 1
    resume.join()


@pytest.mark.postgres
def test_a_pooler_that_drops_the_settings_of_sessions_is_refused(
    database: Database, proxy: TcpProxy
) -> None:
    """The server's defaults are the pinned values but for row-level security."""
    database.execute("create publication pub for all tables")
    database.query("select pg_create_logical_replication_slot('silent', 'pgoutput')")
    proxy.ignore_options = True
    settings = ConnectionSettings(proxy.conninfo(database.conninfo), "shop")
    refused = r"has not received the settings .* ignore_startup_parameters\. Connect directly"
    with pytest.raises(ConfigurationError, match=refused):
        with query_connection(settings, "sensor"):
            pass
    request = StreamRequest(settings, "silent", "pub", Lsn(0), StreamSettings())
    with pytest.raises(ConfigurationError, match=refused):
        start_stream(request, lambda _: None)
    database.execute(f'alter database "{database.name}" set intervalstyle = iso_8601')
    with pytest.raises(ConfigurationError, match=refused):
        with server_timeline(settings):
            pass
    proxy.ignore_options = False
    with query_connection(settings, "sensor"), server_timeline(settings):
        pass


def test_a_limit_that_is_no_number_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"connect_timeout .* is not a number of seconds"):
        ConnectionSettings("host=h connect_timeout=soon").connect_seconds()
    assert ConnectionSettings("host=h connect_timeout=0").connect_seconds() == 0
