"""Pre-flight check of server and slot: a finding names the problem and the remedy (B7, B8)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.errors import ConfigurationError, ConnectionLost
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.preflight.run import raise_errors
from pgcdc_assets.postgres.preflight.server import examine_server, read_server
from pgcdc_assets.postgres.slots.status import create_slot, read_slot_status
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.handover import streamed_changes
from pgcdc_assets_tests.support.preflight import findings_of, problems_in, settings_as
from pgcdc_assets_tests.support.server_folder import new_server_folder
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres


@pytest.mark.every_pg
def test_a_correctly_configured_server_has_no_problems(database: Database) -> None:
    database.execute("create table t (id int primary key); create publication pub for table t")
    findings = findings_of(database.settings())
    assert problems_in(findings) == {}
    raise_errors(findings)


@pytest.mark.every_pg
def test_a_least_privileged_role_of_the_documentation_is_enough(
    database: Database, role: str
) -> None:
    database.execute(
        f"""
        create schema shop; create table shop.t (id int primary key);
        create publication pub for table shop.t;
        alter role {role} replication;
        grant usage on schema shop to {role};
        grant select on all tables in schema shop to {role}
        """
    )
    assert problems_in(findings_of(settings_as(database, role))) == {}


@pytest.mark.every_pg
def test_a_role_without_replication_is_an_error_with_the_statement(
    database: Database, role: str
) -> None:
    """B8."""
    database.execute(f"create table t (id int primary key); grant select on t to {role}")
    database.execute("create publication pub for table t")
    problems = problems_in(findings_of(settings_as(database, role)))
    assert problems == {
        ("replication", None): f'error: Role {role} lacks REPLICATION. alter role "{role}" '
        "replication"
    }
    with (
        pytest.raises(ConfigurationError, match="alter role"),
        create_slot(settings_as(database, role), "s"),
    ):
        pass


def test_a_role_without_login_is_an_error_with_the_statement(database: Database, role: str) -> None:
    """B8."""
    database.execute(f"alter role {role} nologin")
    with pytest.raises(ConfigurationError, match=f'alter role "{role}" login'):
        findings_of(settings_as(database, role))


@pytest.mark.sampled
def test_an_unavailable_server_is_not_a_configuration_error(own_server: EmbeddedServer) -> None:
    """Issue 3, bad input: server down."""
    own_server.start()
    conninfo = own_server.conninfo()
    own_server.stop()
    with pytest.raises(ConnectionLost, match=r"refused .is the server running there"):
        findings_of(ConnectionSettings(conninfo, "test"))


@pytest.mark.sampled
def test_a_wrong_password_or_database_is_named(own_server: EmbeddedServer) -> None:
    """Issue 3, bad input: the error does not contain the password."""
    own_server.start()
    server = Database(own_server, "postgres")
    server.execute("create role bob login password 'right'")
    hba = own_server.data_dir / "pg_hba.conf"
    hba.write_text("host all bob 127.0.0.1/32 scram-sha-256\n" + hba.read_text())
    server.execute("select pg_reload_conf()")
    conninfo = server.conninfo.replace("user=postgres", "user=bob")
    with pytest.raises(ConfigurationError, match=r"authentication failed.*Check user") as caught:
        findings_of(ConnectionSettings(f"{conninfo} password=wr0ng-secret", "test"))
    assert "wr0ng-secret" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="no password supplied"):
        findings_of(ConnectionSettings(conninfo, "test"))
    missing = f"{conninfo} password=right".replace("dbname='postgres'", "dbname='nowhere'")
    with pytest.raises(ConfigurationError, match=r'"nowhere" does not exist\. Check the database'):
        findings_of(ConnectionSettings(missing, "test"))


@pytest.mark.parametrize(
    ("administrator", "place"),
    [
        ("rds_superuser", "parameter group"),
        ("azure_pg_admin", "server parameters"),
        ("cloudsqlsuperuser", "flags of the instance"),
    ],
)
def test_a_managed_service_gets_no_statement_that_it_refuses(
    database: Database, administrator: str, place: str
) -> None:
    """The role of the service exists in a transaction that is rolled back."""
    with closing(psycopg2.connect(database.conninfo)) as conn, conn.cursor() as cursor:
        cursor.execute(f"create role {administrator}; set wal_sender_timeout = 0")
        server = replace(
            read_server(conn), wal_level="replica", idle_slot_timeout=60, max_slot_wal_keep_mb=-1
        )
        found = {
            finding.code: finding.remedy
            for finding in examine_server(server)
            if finding.severity != "ok"
        }
    assert not [remedy for remedy in found.values() if "alter system" in remedy]
    assert found["wal_sender_timeout"].startswith("Set wal_sender_timeout to 1min in the ")
    assert place in found["idle_replication_slot_timeout"]
    limit = "Azure does not let you change it" if place == "server parameters" else place
    assert limit in found["max_slot_wal_keep_size"]
    assert found["wal_level"]


@pytest.mark.parametrize(
    ("version", "text", "severity"),
    [(150012, "15.12", "warning"), (150013, "15.13", "ok"), (180000, "18.0", "ok")],
)
def test_a_minor_version_that_loses_changes_is_a_warning(
    database: Database, version: int, text: str, severity: str
) -> None:
    with closing(psycopg2.connect(database.conninfo)) as conn:
        server = replace(read_server(conn), version=version, version_text=text)
    [found] = [each for each in examine_server(server) if each.code == "version"]
    assert (found.severity, text in found.message) == (severity, True)
    assert found.remedy == (
        "Update the server to Postgres 15.13 or newer." if version < 150013 else ""
    )


@pytest.mark.sampled
def test_wrong_wal_level_and_missing_slots_and_walsenders_are_errors() -> None:
    """B8, on a separate server."""
    folder = new_server_folder("own")
    few = {**UNSAFE_BUT_FAST, "max_replication_slots": "1", "max_wal_senders": "1"}
    server = EmbeddedServer(folder / "data", 18, {**few, "wal_level": "replica"})
    try:
        database = Database(server.start(), "postgres")
        database.execute("create table t (id int primary key); create publication pub for table t")
        problems = problems_in(findings_of(database.settings()))
        assert problems.pop(("wal_level", None)) == (
            "error: wal_level is replica, but logical is required. alter system set wal_level = "
            "logical; then restart the server."
        )
        assert set(problems) == {("free_slots", None), ("walsenders", None)}
        with (
            pytest.raises(ConfigurationError, match=r"wal_level .* is not logical"),
            create_slot(database.settings(), "s"),
        ):
            pass
        database.execute("create role rds_superuser")
        with (
            pytest.raises(ConfigurationError, match=r"not logical.* parameter group") as refused,
            create_slot(database.settings(), "s"),
        ):
            pass
        assert "alter system" not in str(refused.value)

        server.stop()
        server = EmbeddedServer(folder / "data", 18, few)
        server.start()
        database = Database(server, "postgres")
        with create_slot(database.settings(), "taken"):
            assert (
                "max_wal_senders"
                in problems_in(findings_of(database.settings()))["replication", None]
            )
        problem = problems_in(findings_of(database.settings()))["slot", None]
        assert "No free replication slot: all 1 of max_replication_slots" in problem
        assert "Inactive slots: taken" in problem
        with (
            pytest.raises(ConfigurationError, match="No free replication slot"),
            create_slot(database.settings(), "s"),
        ):
            pass
        # The slot of the capture exists. A new snapshot and verify need a second slot temporarily.
        problem = problems_in(findings_of(database.settings(), slot="taken"))["slot", None]
        assert problem.startswith("error: No free replication slot: all 1 of")
    finally:
        server.remove()
        folder.rmdir()


@pytest.mark.sampled
def test_enough_slots_and_walsenders_for_the_commands_are_required() -> None:
    """B8: enough for a capture, too few for `pgcdc verify`, then exactly enough."""
    folder = new_server_folder("own")
    few = {**UNSAFE_BUT_FAST, "max_replication_slots": "2", "max_wal_senders": "2"}
    server = EmbeddedServer(folder / "data", 18, few)
    try:
        database = Database(server.start(), "postgres")
        settings = database.settings("shop")
        database.execute("create table t (id int primary key); create publication pub for table t")
        assert problems_in(findings_of(settings, slot="ours")) == {}
        with create_slot(settings, "ours"):
            pass
        assert problems_in(findings_of(settings, slot="ours")) == {}
        assert set(problems_in(findings_of(settings, slot="other"))) == {("free_slots", None)}

        stream = psycopg2.connect(
            settings.conninfo_for("capture", replication=True),
            connection_factory=LogicalReplicationConnection,
        )
        with closing(stream), stream.cursor() as cursor:
            options = {"proto_version": "1", "publication_names": "pub"}
            cursor.start_replication("ours", options=options)
            # The capture already has a walsender. Another capture needs a second walsender.
            problems = problems_in(findings_of(settings, slot="ours"))
            assert ("walsenders", None) not in problems
            problem = problems_in(findings_of(settings, slot="other"))["walsenders", None]
            assert problem.startswith("warning: One walsender of 2 (max_wal_senders) is free")
        with create_slot(settings, "other"):
            pass
        problem = problems_in(findings_of(settings, slot="ours"))["slot", None]
        assert problem.startswith("error: No free replication slot: all 2 of")
    finally:
        server.remove()
        folder.rmdir()


def test_a_slot_of_another_program_is_refused(database: Database) -> None:
    """Issue 3, bad input."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    slot = f"p_{database.name}"
    database.execute("select pg_create_physical_replication_slot(%s)", (slot,))
    try:
        problem = problems_in(findings_of(database.settings(), slot=slot))["slot", None]
        assert f"Replication slot {slot} is a physical slot" in problem
    finally:
        database.execute("select pg_drop_replication_slot(%s)", (slot,))


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_slot_in_use_is_named_with_its_process(database: Database, is_ours: bool) -> None:
    """Issue 3, bad input: a run of the capture keeps its stream; another program is an error."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    slot, settings = f"s_{database.name}", database.settings("shop")
    with create_slot(settings, slot):
        pass
    conninfo = settings.conninfo_for("capture", replication=True)
    if not is_ours:
        conninfo = conninfo.replace("pgcdc capture shop", "other_program")
    stream = psycopg2.connect(conninfo, connection_factory=LogicalReplicationConnection)
    with closing(stream), stream.cursor() as cursor:
        cursor.start_replication(slot, options={"proto_version": "1", "publication_names": "pub"})
        findings = findings_of(settings, slot=slot)
        pid = stream.info.backend_pid
    problem = problems_in(findings).get(("slot", None))
    if is_ours:
        assert problem is None
        [found] = [finding for finding in findings if finding.code == "slot"]
        assert f"Process {pid} (pgcdc capture shop) reads it" in found.message
        return
    assert problem is not None
    assert problem.startswith(f"error: Replication slot {slot} is in use by process {pid} ")
    assert f"pg_terminate_backend({pid})" in problem


def test_a_transaction_that_delays_the_slots_creation_is_a_warning(database: Database) -> None:
    """B7."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    with database.connect(autocommit=False) as conn, conn.cursor() as cursor:
        cursor.execute("insert into t values (1)")
        problem = problems_in(findings_of(database.settings()))["open_transaction", None]
        assert f"process {conn.info.backend_pid}" in problem


@pytest.mark.every_pg
def test_a_slot_above_the_limit_of_kept_wal_is_a_warning_before_it_is_lost(
    database: Database,
) -> None:
    """B12: the server may still write less and less WAL, and the slot still has its changes."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    slot, settings = f"s_{database.name}", database.settings()
    with create_slot(settings, slot):
        pass
    database.execute("insert into t values (1)")
    left, problems = [], []
    database.execute("alter system set max_slot_wal_keep_size = '16MB'")
    try:
        database.value("select pg_reload_conf()")
        wait_until(
            lambda: database.value("show max_slot_wal_keep_size") == "16MB", "the limit of kept WAL"
        )
        for _ in range(4):
            problems.append(problems_in(findings_of(settings, slot=slot)))
            with query_connection(settings, "test") as conn:
                status = read_slot_status(conn, slot)
            assert status is not None and status.safe_wal_size is not None
            left.append(status.safe_wal_size)
            database.execute("insert into t values (2); delete from t where id = 2")
            database.value("select pg_switch_wal()")
    finally:
        database.execute("alter system reset max_slot_wal_keep_size")
        database.value("select pg_reload_conf()")
    assert left == sorted(left, reverse=True) and left[0] > 0 >= left[-1]
    assert problems[0] == {}
    problem = problems[-1]["slot", None]
    assert problem.startswith(f"warning: Replication slot {slot} is unreserved")
    assert "Run the capture now, or raise max_slot_wal_keep_size" in problem
    assert [change.op for change in streamed_changes(database, slot)] == ["I", *"ID" * 4]
