"""Odd names of the database and of the role work in every command."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from psycopg.conninfo import make_conninfo
from psycopg2 import sql
from pyspark.sql import SparkSession

from pgcdc_assets.cli import main
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.orchestration.location import Locations

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


def _odd(start: str) -> str:
    """Return a name of 63 bytes."""
    text = f"{start} \"q\" 's' %1$s \\ é😀=/?#@:&{{}};--"
    return text + "x" * (63 - len(text.encode()))


class _OddDatabase(Database):
    """A database with an odd name, as an odd role that owns the database."""

    shown = _odd(" Data base")
    role = _odd(" on x as Röle")

    @property
    def conninfo(self) -> str:
        return make_conninfo(self.server.conninfo(), dbname=self.shown, user=self.role)

    @property
    def uri(self) -> str:
        role, name = (quote(text, safe="") for text in (self.role, self.shown))
        return f"postgresql://{role}@127.0.0.1:{self.server.port}/{name}"


@pytest.fixture
def odd(database: Database) -> Iterator[_OddDatabase]:
    found = _OddDatabase(database.server, database.name)
    role, name = sql.Identifier(found.role), sql.Identifier(found.shown)
    database.execute(sql.SQL("create role {} login replication").format(role))
    database.execute(sql.SQL("create database {} owner {}").format(name, role))
    try:
        yield found
    finally:
        database.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots "
            "where database = %s",
            (found.shown,),
        )
        database.execute(sql.SQL("drop database {} with (force)").format(name))
        database.execute(sql.SQL("drop role {}").format(role))


@pytest.mark.sampled
def test_every_command_accepts_an_odd_database_and_role(
    odd: _OddDatabase,
    locations: Locations,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = locations.write_over_defs(odd)
    odd.execute("create schema s; create table s.t (id int primary key, v text)")
    odd.execute("insert into s.t values (1, 'a'); create publication pub for table s.t")
    init = ["init", "--name", "mine", "--publication", "pub", "--defs", str(locations.defs)]
    assert main(init) == 0
    for number, dsn in enumerate((odd.conninfo, odd.uri), start=2):
        monkeypatch.setenv("PGCDC_DSN", dsn)
        assert main(["check", "-m", module]) == 0
        odd.execute(f"insert into s.t values ({number}, 'é')")
        assert main(["sync", "-m", module]) == 0
    assert main(["resnapshot", "mine", "s.t", "-m", module]) == 0
    assert main(["sync", "-m", module]) == 0
    assert main(["verify", "-m", module]) == 0
    capsys.readouterr()
    assert main(["status", "-m", module]) == 0
    assert "s.t" in capsys.readouterr().out
    # The SQL of a remedy names the role.
    odd.execute("revoke all on s.t from current_user")
    assert main(["check", "-m", module]) != 0
    printed = capsys.readouterr()
    with Database(odd.server, odd.name).connect() as conn:
        role = sql.Identifier(odd.role).as_string(conn)
    assert f"to {role}" in printed.out + printed.err
