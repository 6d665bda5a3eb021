"""Tables in a Hive metastore, whose entries outlive the session."""

from __future__ import annotations

import secrets
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.spark.settings import CATALOG, HIVE
from pgcdc_assets_tests.support.database import Database, create_database
from pgcdc_assets_tests.support.maven import download_jar
from pgcdc_assets_tests.support.registering_session import register_in_process
from pgcdc_assets_tests.support.spark import CONF

pytestmark = [pytest.mark.spark, pytest.mark.soak]

_DRIVER = ("org.postgresql", "postgresql", "42.7.14")
_USER = "metastore"
_JDO = "spark.hadoop.javax.jdo.option"
ENTRIES = {"shop__orders__scd1": [0], "shop__orders_b7e8acdd__scd1": [1]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a lake of three tables, whose names differ in case."""
    for number, name in enumerate(("orders", "Orders", "ORDERS")):
        write_deltalake(str(tmp_path / "lake" / name), pa.table({"id": [number]}))
    return tmp_path


@pytest.fixture
def metastore(own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Database:
    """An empty database of a user with a password, which is in the environment."""
    own_server.start()
    database = create_database(own_server)
    password = secrets.token_hex(8)
    database.execute(f"create role {_USER} login password '{password}'")
    database.execute(f"grant create on schema public to {_USER}")
    hba = own_server.data_dir / "pg_hba.conf"
    hba.write_text(f"host all {_USER} 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
    database.execute("select pg_reload_conf()")
    monkeypatch.setenv("METASTORE_USER", _USER)
    monkeypatch.setenv("METASTORE_PASSWORD", password)
    return database


def derby_conf(folder: Path) -> dict[str, str]:
    """Return the settings of a session with a metastore in a folder."""
    url = f"jdbc:derby:;databaseName={folder}/metastore;create=true"
    warehouse = {"spark.sql.warehouse.dir": f"{folder}/warehouse"}
    return {**CONF, **warehouse, f"{_JDO}.ConnectionURL": url}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The jar of the JDBC driver of Postgres."""
    return download_jar(*_DRIVER, tmp_path_factory.mktemp("driver"))


def postgres_conf(folder: Path, database: Database, driver: Path) -> dict[str, str]:
    """Return the settings of a session with a metastore in a database, as the guide has them."""
    url = f"jdbc:postgresql://127.0.0.1:{database.server.port}/{database.name}"
    return {
        **CONF,
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.driver.extraClassPath": str(driver),
        f"{_JDO}.ConnectionURL": url,
        f"{_JDO}.ConnectionDriverName": "org.postgresql.Driver",
        f"{_JDO}.ConnectionUserName": "${env.METASTORE_USER}",
        f"{_JDO}.ConnectionPassword": "${env.METASTORE_PASSWORD}",
        "spark.hadoop.hive.metastore.schema.verification": "false",
        "spark.hadoop.datanucleus.schema.autoCreateAll": "true",
        # Otherwise the first CREATE TABLE creates TBL_PRIVS in a second connection, which waits
        # for the lock of the first one.
        "spark.hadoop.datanucleus.autoStartMechanism": "Classes",
        "spark.hadoop.datanucleus.autoStartClassNames": (
            "org.apache.hadoop.hive.metastore.model.MTablePrivilege"
        ),
    }


def check_entries_outlive_the_session(folder: Path, conf: dict[str, str]) -> None:
    """Register two tables in one session, and the third one in another session."""
    session = {"remote": "local", "spark_config": conf}
    errors, found = register_in_process(folder, session, ["orders", "Orders"])
    assert errors == {"orders": None, "Orders": None}
    assert found == ENTRIES
    write_deltalake(str(folder / "lake" / "orders"), pa.table({"id": [9]}), mode="append")
    errors, found = register_in_process(folder, session, ["ORDERS"])
    assert errors == {"ORDERS": None}
    assert sorted(found.values()) == [[0, 9], [1], [2]]


def test_entries_in_derby_outlive_the_session_and_case_is_no_confusion(folder: Path) -> None:
    check_entries_outlive_the_session(folder, derby_conf(folder))


@pytest.mark.postgres
def test_entries_in_postgres_outlive_the_session_and_the_password_is_in_no_setting(
    folder: Path, metastore: Database, driver: Path
) -> None:
    check_entries_outlive_the_session(folder, postgres_conf(folder, metastore, driver))
    names = metastore.query('select "TBL_NAME" from "TBLS" order by 1')
    assert [name for (name,) in names][:1] == ["shop__orders__scd1"] and len(names) == 3
    owners = metastore.query("select distinct tableowner from pg_tables where tablename = 'TBLS'")
    assert owners == [(_USER,)]


@pytest.mark.postgres
def test_a_table_registered_on_a_server_is_found_by_other_sessions_and_other_processes(
    folder: Path, metastore: Database, driver: Path
) -> None:
    conf = postgres_conf(folder, metastore, driver)
    server = SparkServer(folder / "state", {**conf, CATALOG: HIVE, "spark.driver.memory": "1500m"})
    with server.running() as running:
        session = {"remote": running.remote}
        errors, found = register_in_process(folder, session, ["orders", "Orders"])
        assert errors == {"orders": None, "Orders": None}
        assert found == ENTRIES
        # Another session of the server, and an embedded session beside the server.
        assert register_in_process(folder, session) == ({}, ENTRIES)
        embedded = {"remote": "local", "spark_config": conf}
        errors, _ = register_in_process(folder, embedded, ["ORDERS"])
        assert errors == {"ORDERS": None}
        _, found = register_in_process(folder, session)
        assert sorted(found.values()) == [[0], [1], [2]]
