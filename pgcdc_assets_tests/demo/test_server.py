"""The embedded server: its start, restart, kill, settings and socket."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import psycopg2
import pytest

from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


@pytest.mark.every_pg
def test_a_database_decodes_logically_and_has_slots(database: Database) -> None:
    assert database.value("show wal_level") == "logical"
    database.query("select pg_create_logical_replication_slot('left_over', 'pgoutput')")


def test_start_is_idempotent_and_a_restart_keeps_the_port(own_server: EmbeddedServer) -> None:
    port = own_server.start().port
    assert own_server.start().port == port
    own_server.restart()
    assert own_server.port == port


def test_a_second_object_on_the_same_folder_finds_the_running_server(
    own_server: EmbeddedServer,
) -> None:
    own_server.start()
    other = EmbeddedServer(own_server.data_dir, own_server.version)
    assert other.is_running
    assert other.conninfo() == own_server.conninfo()


def test_two_processes_that_start_at_once_share_one_server(own_server: EmbeddedServer) -> None:
    program = (
        "import sys; from pathlib import Path; "
        "from pgcdc_assets.demo.server import EmbeddedServer; "
        "print(EmbeddedServer(Path(sys.argv[1]), int(sys.argv[2])).start().port)"
    )
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(own_server.data_dir), str(own_server.version)],
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    ports = {starter.communicate(timeout=120)[0] for starter in starters}
    assert ports == {f"{own_server.port}\n".encode()}


def test_processes_that_create_the_servers_user_at_once_create_one_user() -> None:
    """Several test processes start servers on a new machine at the same time."""
    if os.geteuid() != 0:
        pytest.skip("only root runs servers as another user")
    name = f"pgcdc-test-{os.getpid()}"
    program = (
        "import sys, time; from pgcdc_assets.demo import programs; "
        "programs.SYSTEM_USER = sys.argv[1]; "
        "time.sleep(max(0, float(sys.argv[2]) - time.time())); "
        "print(programs._system_user().pw_uid)"
    )
    arguments = [sys.executable, "-c", program, name, str(time.time() + 2)]
    try:
        makers = [subprocess.Popen(arguments, stdout=subprocess.PIPE) for _ in range(4)]
        made = {maker.communicate(timeout=60)[0] for maker in makers}
        assert made == {f"{pwd.getpwnam(name).pw_uid}\n".encode()}
    finally:
        subprocess.run(["userdel", name], check=False)


def test_committed_rows_survive_a_kill(own_server: EmbeddedServer) -> None:
    database = Database(own_server.start(), "postgres")
    database.execute("create table kept as select 1 as id")
    database.execute("checkpoint")
    own_server.kill()
    assert not own_server.is_running
    own_server.start()
    assert database.query("select id from kept") == [(1,)]


def test_a_removed_server_leaves_no_shared_memory(own_server: EmbeddedServer) -> None:
    """A machine has 4,096 segments for all servers, and a container 64 MB in /dev/shm."""
    database = Database(own_server.start(), "postgres")
    assert database.value("show dynamic_shared_memory_type") == "mmap"
    lines = (own_server.data_dir / "postmaster.pid").read_text().splitlines()
    segment = lines[6].split()[1]
    assert segment in _segments()
    own_server.remove()
    assert segment not in _segments()


def _segments() -> set[str]:
    """Return the ids of the segments of System V shared memory."""
    rows = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {row.split()[1] for row in rows}


def test_settings_are_taken_at_the_next_start(own_server: EmbeddedServer) -> None:
    own_server.settings["wal_level"] = "replica"
    own_server.settings["cluster_name"] = "it's ours"
    database = Database(own_server.start(), "postgres")
    assert database.value("show wal_level") == "replica"
    assert database.value("show cluster_name") == "it's ours"


def test_the_socket_moves_to_a_short_folder_when_the_path_is_long(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / ("long" * 25))
    assert server.socket_dir != server.data_dir
    assert len(str(server.socket_dir)) < 60


def test_the_server_accepts_connections_on_its_unix_socket(own_server: EmbeddedServer) -> None:
    own_server.start()
    psycopg2.connect(own_server.conninfo(unix_socket=True)).close()


def test_the_address_of_a_stopped_server_is_an_error_with_the_remedy(
    own_server: EmbeddedServer,
) -> None:
    with pytest.raises(ConfigurationError, match=r"python -m pgcdc_assets.demo dev"):
        own_server.conninfo()


@pytest.mark.parametrize("content", [b"", b"12", b"soon\n", b"-3\n", b"\xff\xfe\n", b"1\n\n\nx\n"])
def test_a_malformed_pid_file_is_named(own_server: EmbeddedServer, content: bytes) -> None:
    own_server.start()
    port = own_server.port
    own_server.stop()
    pid_file = own_server.data_dir / "postmaster.pid"
    pid_file.write_bytes(content)
    assert not own_server.is_running
    with pytest.raises(ConfigurationError, match="does not run"):
        _ = own_server.port
    try:
        own_server.start()
        assert own_server.port == port
    except ConfigurationError as error:
        assert "postmaster.pid" in str(error)
    finally:
        if not own_server.is_running:
            pid_file.unlink()


def test_a_malformed_file_of_settings_is_written_again(own_server: EmbeddedServer) -> None:
    own_server.start().stop()
    (own_server.data_dir / "pgcdc.conf").write_bytes(b"port = 'x\n\xff")
    assert own_server.start().port


def test_the_error_names_a_version_that_is_not_installed() -> None:
    assert binaries(9) is None
    with pytest.raises(ConfigurationError, match="postgresql-9"):
        EmbeddedServer(Path("nowhere"), 9)


def test_the_proxy_forwards_stalls_and_cuts_connections(
    database: Database, proxy: TcpProxy
) -> None:
    connection = psycopg2.connect(proxy.conninfo(database.conninfo))
    connection.autocommit = True
    cursor = connection.cursor()
    cursor.execute("select 1")
    proxy.cut()
    with pytest.raises(psycopg2.OperationalError):
        cursor.execute("select 1")
    connection.close()

    proxy.stall()
    with pytest.raises(psycopg2.OperationalError, match="timeout"):
        psycopg2.connect(proxy.conninfo(database.conninfo), connect_timeout=2)
    proxy.resume()
    wait_until(
        lambda: (
            not database.query(
                "select from pg_stat_activity where datname = current_database() "
                "and pid <> pg_backend_pid()"
            )
        ),
        "the cut connections to end",
    )
