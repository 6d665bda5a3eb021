"""The pre-flight: each thing a capture lacks is named, with what mends it (B8 to B10, B13, B14,
D10, C14)."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest
from psycopg2 import sql
from psycopg2.extras import LogicalReplicationConnection

from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.errors import ConfigurationError, ConnectionLost
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.preflight import Finding, raise_errors, run_preflight
from pgcdc_assets.postgres.slots import create_slot
from pgcdc_assets_tests.fixtures.database import Database

pytestmark = pytest.mark.postgres


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """A role that may log in, and nothing else."""
    name = f"role_{database.name}"
    database.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    yield name
    database.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


def _findings(
    settings: ConnectionSettings,
    tables: list[tuple[str, str]] | None = None,
    slot: str = "no_such_slot",
    publication: str = "pub",
    **options: object,
) -> list[Finding]:
    return run_preflight(settings, publication, slot, tables, **options)  # type: ignore[arg-type]


def _problems(findings: list[Finding]) -> dict[tuple[str, str | None], str]:
    """Errors and warnings that a fresh, well set up server does not have, by code and table."""
    return {
        (finding.code, finding.table): f"{finding.severity}: {finding}"
        for finding in findings
        if finding.severity != "ok" and finding.code != "max_slot_wal_keep_size"
    }


def _as(database: Database, role: str) -> ConnectionSettings:
    return ConnectionSettings(database.conninfo.replace("user=postgres", f"user={role}"), "test")


@pytest.mark.every_pg
def test_a_well_set_up_server_has_no_problems(database: Database) -> None:
    database.execute("create table t (id int primary key); create publication pub for table t")
    findings = _findings(database.settings())
    assert _problems(findings) == {}
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
    assert _problems(_findings(_as(database, role))) == {}


@pytest.mark.every_pg
def test_a_role_without_replication_is_told_to_get_it(database: Database, role: str) -> None:
    """B8."""
    database.execute(f"create table t (id int primary key); grant select on t to {role}")
    database.execute("create publication pub for table t")
    problems = _problems(_findings(_as(database, role)))
    assert problems == {
        ("replication", None): f'error: Role {role} lacks REPLICATION. alter role "{role}" '
        "replication"
    }
    with (
        pytest.raises(ConfigurationError, match="alter role"),
        create_slot(_as(database, role), "s"),
    ):
        pass


def test_a_role_without_login_is_told_to_get_it(database: Database, role: str) -> None:
    """B8."""
    database.execute(f"alter role {role} nologin")
    with pytest.raises(ConfigurationError, match=f'alter role "{role}" login'):
        _findings(_as(database, role))


def test_a_server_that_is_down_is_no_matter_of_settings(own_server: EmbeddedServer) -> None:
    """Issue 3, bad input: server down."""
    own_server.start()
    conninfo = own_server.conninfo()
    own_server.stop()
    with pytest.raises(ConnectionLost, match=r"refused .is the server running there"):
        _findings(ConnectionSettings(conninfo, "test"))


def test_a_wrong_password_or_database_is_named(own_server: EmbeddedServer) -> None:
    """Issue 3, bad input: the password itself is not repeated."""
    own_server.start()
    server = Database(own_server, "postgres")
    server.execute("create role bob login password 'right'")
    hba = own_server.data_dir / "pg_hba.conf"
    hba.write_text("host all bob 127.0.0.1/32 scram-sha-256\n" + hba.read_text())
    server.execute("select pg_reload_conf()")
    conninfo = server.conninfo.replace("user=postgres", "user=bob")
    with pytest.raises(ConfigurationError, match=r"authentication failed.*Check user") as caught:
        _findings(ConnectionSettings(f"{conninfo} password=wr0ng-secret", "test"))
    assert "wr0ng-secret" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="no password supplied"):
        _findings(ConnectionSettings(conninfo, "test"))
    missing = f"{conninfo} password=right".replace("dbname='postgres'", "dbname='nowhere'")
    with pytest.raises(ConfigurationError, match=r'"nowhere" does not exist\. Check the database'):
        _findings(ConnectionSettings(missing, "test"))


def test_wal_level_slots_and_walsenders_that_are_missing_are_named() -> None:
    """B8, on a server of its own."""
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-test-own-"))
    few = {**UNSAFE_BUT_FAST, "max_replication_slots": "1", "max_wal_senders": "1"}
    server = EmbeddedServer(folder / "data", 18, {**few, "wal_level": "replica"})
    try:
        database = Database(server.start(), "postgres")
        database.execute("create table t (id int primary key); create publication pub for table t")
        problems = _problems(_findings(database.settings()))
        assert problems == {
            ("wal_level", None): "error: wal_level is replica, and logical is needed. alter "
            "system set "
            "wal_level = logical; then restart the server."
        }
        with (
            pytest.raises(ConfigurationError, match=r"wal_level .* is not logical"),
            create_slot(database.settings(), "s"),
        ):
            pass

        server.stop()
        server = EmbeddedServer(folder / "data", 18, few)
        server.start()
        database = Database(server, "postgres")
        with create_slot(database.settings(), "taken"):
            assert (
                "max_wal_senders" in _problems(_findings(database.settings()))["replication", None]
            )
        problem = _problems(_findings(database.settings()))["slot", None]
        assert "No free replication slot: all 1 of max_replication_slots" in problem
        assert "Nobody reads these now: taken" in problem
        with (
            pytest.raises(ConfigurationError, match="No free replication slot"),
            create_slot(database.settings(), "s"),
        ):
            pass
    finally:
        server.remove()
        folder.rmdir()


@pytest.mark.every_pg
def test_a_missing_publication_is_named_before_the_slot_is_made(database: Database) -> None:
    """B9."""
    problem = _problems(_findings(database.settings()))["publication", None]
    assert f"Publication pub does not exist in database {database.name}" in problem
    assert 'create publication "pub" for table' in problem


def test_an_empty_publication_is_an_error(database: Database) -> None:
    database.execute("create publication pub")
    assert "has no tables" in _problems(_findings(database.settings()))["publication", None]


def test_a_publication_of_inserts_only_is_warned_about(database: Database) -> None:
    """B10."""
    database.execute(
        "create table t (id int primary key);"
        "create publication pub for table t with (publish = 'insert')"
    )
    assert _problems(_findings(database.settings())) == {
        ("publish", None): "warning: Publication pub does not send update and delete and truncate: "
        'such changes never arrive. alter publication "pub" set (publish = \'insert, update, '
        "delete, "
        "truncate')"
    }


def test_row_level_security_is_refused_up_front(database: Database, role: str) -> None:
    """B13."""
    database.execute(
        f"""
        create table t (id int primary key); create publication pub for table t;
        alter table t enable row level security;
        alter role {role} replication; grant select on t to {role}
        """
    )
    problems = _problems(_findings(_as(database, role)))
    assert list(problems) == [("row_security", "public.t")]
    assert f'alter role "{role}" bypassrls' in problems["row_security", "public.t"]
    database.execute(f"alter role {role} bypassrls")
    assert _problems(_findings(_as(database, role))) == {}


def test_a_table_that_may_not_be_read_is_named_alone(database: Database, role: str) -> None:
    """B14."""
    for n in range(3):
        database.execute(f"create table t{n} (id int primary key); grant select on t{n} to {role}")
    database.execute(f"alter role {role} replication; create publication pub for all tables")
    database.execute(f"revoke select on t1 from {role}; grant select (id) on t2 to {role}")
    assert _problems(_findings(_as(database, role))) == {
        ("privilege", "public.t1"): "error: This role may not read table public.t1, so it cannot "
        "be "
        f'copied. grant select on "public"."t1" to "{role}"'
    }


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            "id int",
            "no primary key: .*UPDATE and DELETE on it fail.*add primary key",
        ),
        (
            "id int primary key deferrable",
            'a deferrable primary key.*alter table "public"."t" replica identity full',
        ),
        (
            "id int primary key); alter table t replica identity nothing; select (1",
            "replica identity NOTHING.*replica identity default",
        ),
    ],
)
def test_a_table_without_a_key_is_refused_before_its_updates_fail(
    database: Database, table: str, sentence: str
) -> None:
    """D10."""
    database.execute(f"create table t ({table}); create publication pub for table t")
    problems = _problems(_findings(database.settings()))
    assert list(problems) == [("replica_identity", "public.t")]
    assert re.search(sentence, problems["replica_identity", "public.t"])
    database.execute("insert into t values (1)")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState):
        database.execute("update t set id = 2")


@pytest.mark.every_pg
def test_a_table_without_a_key_that_sends_whole_rows_is_a_bag(database: Database) -> None:
    """D11."""
    database.execute("create table t (id int); alter table t replica identity full")
    database.execute("create publication pub for table t")
    problems = _problems(_findings(database.settings()))
    assert list(problems) == [("key", "public.t")]
    sentence = problems["key", "public.t"]
    assert re.match("warning: .*bag.*add primary key.*without_key: log", sentence)
    assert _problems(_findings(database.settings(), keyed={("public", "t")})) == {}


def test_a_unique_index_as_identity_is_a_key(database: Database) -> None:
    """D9."""
    database.execute(
        "create table t (id int not null); create unique index i on t (id);"
        "alter table t replica identity using index i; create publication pub for table t"
    )
    assert _problems(_findings(database.settings())) == {}
    database.execute("drop index i")
    assert (
        "index that is gone"
        in _problems(_findings(database.settings()))["replica_identity", "public.t"]
    )


def test_a_table_without_a_key_is_fine_when_only_inserts_are_sent(database: Database) -> None:
    """D10: nothing of the application fails then; the merge still needs a key."""
    database.execute(
        "create table t (id int); create publication pub for table t with (publish = 'insert')"
    )
    assert list(_problems(_findings(database.settings()))) == [
        ("publish", None),
        ("key", "public.t"),
    ]


def test_a_column_list_without_the_identity_is_refused(database: Database) -> None:
    database.execute(
        "create table t (id int primary key, a text); create publication pub for table t (a)"
    )
    problem = _problems(_findings(database.settings()))["column_list", "public.t"]
    assert "leaves out id of its replica identity" in problem


@pytest.mark.every_pg
def test_a_row_filter_outside_the_identity_is_refused_before_updates_fail(
    database: Database,
) -> None:
    """D10, D13."""
    database.execute(
        """
        create table t (id int primary key, kind text, "Size" int, v text);
        insert into t values (1, 'a', 1, 'v');
        create publication pub for table t where (kind <> 'x' and id > 0 and "Size" is not null)
        """
    )
    problem = _problems(_findings(database.settings()))["row_filter", "public.t"]
    assert "uses Size, kind, which its replica identity does not have" in problem
    with pytest.raises(psycopg2.Error, match="replica identity"):
        database.execute("update t set v = 'w'")
    database.execute("alter table t replica identity full")
    assert not _problems(_findings(database.settings()))
    database.execute("update t set v = 'w'")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("create view x as select 1", "is a view"),
        ("create materialized view x as select 1", "is a materialized view"),
        ("create unlogged table x (id int primary key)", "is unlogged"),
        ("create sequence x", "is a sequence"),
        ("create table x (id int primary key)", 'add it with: alter publication "pub" add table'),
        ("select 1", "does not exist"),
        (
            "create table x (id int primary key) partition by range (id);"
            "create table x1 partition of x default; alter publication pub add table x",
            "publish_via_partition_root = true",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_reason(
    database: Database, made: str, reason: str
) -> None:
    """C14."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    database.execute(made)
    findings = _findings(database.settings(), [("public", "t"), ("public", "x")])
    problems = _problems(findings)
    assert list(problems) == [("table", "public.x")]
    assert reason in problems["table", "public.x"]


def test_a_slot_of_somebody_else_is_refused(database: Database) -> None:
    """Issue 3, bad input."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    slot = f"p_{database.name}"
    database.execute("select pg_create_physical_replication_slot(%s)", (slot,))
    try:
        problem = _problems(_findings(database.settings(), slot=slot))["slot", None]
        assert f"Replication slot {slot} is a physical slot" in problem
    finally:
        database.execute("select pg_drop_replication_slot(%s)", (slot,))


@pytest.mark.parametrize(("purpose", "severity"), [("receiver", "error"), ("capture", "warning")])
def test_a_slot_in_use_is_named_with_its_process(
    database: Database, purpose: str, severity: str
) -> None:
    """Issue 3, bad input: a capture of ours ends by itself, a stranger does not."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    slot, settings = f"s_{database.name}", database.settings("shop")
    with create_slot(settings, slot):
        pass
    conninfo = settings.conninfo_for(purpose, replication=True)
    if severity == "error":
        conninfo = conninfo.replace("pgcdc receiver shop", "somebody")
    stream = psycopg2.connect(conninfo, connection_factory=LogicalReplicationConnection)
    with closing(stream), stream.cursor() as cursor:
        cursor.start_replication(slot, options={"proto_version": "1", "publication_names": "pub"})
        problem = _problems(_findings(settings, slot=slot))["slot", None]
        pid = stream.info.backend_pid
    assert problem.startswith(f"{severity}: Replication slot {slot} is in use by process {pid} ")
    assert f"pg_terminate_backend({pid})" in problem


def test_a_transaction_that_slot_creation_will_wait_for_is_warned_about(database: Database) -> None:
    """B7."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    with database.connect(autocommit=False) as conn, conn.cursor() as cursor:
        cursor.execute("insert into t values (1)")
        problem = _problems(_findings(database.settings()))["open_transaction", None]
        assert f"process {conn.info.backend_pid}" in problem
