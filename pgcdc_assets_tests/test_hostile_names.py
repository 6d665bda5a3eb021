"""Every name that Postgres allows works in the whole pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from psycopg2 import sql
from pyspark.sql import SparkSession

from pgcdc_assets.cli import main
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.orchestration.location import Locations

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

ODD = TableName("a.b", 'Order "Lines"\t100% a=b/c\\d[e]*?#~;{}\'`$&<>| straße😀')
KEYLESS = TableName("with space", " ")
SOFT = TableName("public", "a-b")
FEW = [ODD, SOFT]
ALL = [
    *FEW,
    KEYLESS,
    TableName("public", "a_b"),
    TableName("a", "b.c"),
    TableName("a.b", "c"),
    TableName("public", "A_B"),
    TableName("public", "a...b"),
    TableName("public", "a_b_invariants"),
    TableName("public", "select"),
    TableName("public", ".hidden"),
    TableName("public", "_hidden"),
    TableName("public", "key=value"),
    TableName("public", '"' * 63),
    TableName("public", "."),
]
KEY = ["a b", 'q"uote', "back`tick", "dot.ted"]
COLUMNS = [*KEY, "a,b;c{d}(e)", "line\nend\t", "é😀", "select", "%/\\[]*?#'", "x=1", "_", "$", "~"]
COLUMNS += [".", "Ünïcode", "'; drop table x; --", " ", '"', "`", "`a`", "count(*)", "_metadata"]
# Spark replaces references to variables in SQL, unless this is switched off.
COLUMNS += ["${env:HOME}", "${spark.app.name}", "\x01\x7f\u200b", "Straße", "STRASSE"]
ENUM = TableName("a.b", "Mood %s 'x'.\"y\"")
TYPED = "of a type in a.b"


def statement(text: str, table: TableName, *columns: str) -> sql.Composed:
    """Return SQL with a table and columns in place of `{}`."""
    names = [sql.Identifier(table.schema, table.table), *map(sql.Identifier, columns)]
    return sql.SQL(text).format(*names)


def create(database: Database, table: TableName) -> None:
    if table == ODD:
        columns = ", ".join("{} text default 'x'" for _ in COLUMNS)
        key = ", ".join("{}" for _ in KEY)
        text = f"create table {{}} ({columns}, primary key ({key}))"
        database.execute(statement(text, table, *COLUMNS, *KEY))
        database.execute(statement("create type {} as enum ('${{env:HOME}}', 'a,b')", ENUM))
        added = sql.SQL("alter table {} add column {} {} default '${{env:HOME}}'").format(
            sql.Identifier(*table), sql.Identifier(TYPED), sql.Identifier(*ENUM)
        )
        database.execute(added)
        return
    key = "" if table == KEYLESS else "primary key"
    database.execute(statement(f"create table {{}} (id int {key}, v text)", table))
    if table == KEYLESS:
        database.execute(statement("alter table {} replica identity full", table))


def change(database: Database, table: TableName, number: int) -> None:
    """Insert two rows, then update one and delete the other."""
    if table == ODD:
        text = "insert into {0} ({1}) values ('{n}'), ('{n} too')".replace("{n}", str(number))
        database.execute(statement(text, table, KEY[0]))
        database.execute(statement("update {} set {} = 'new', {} = null", table, "é😀", "."))
        database.execute(statement("delete from {} where {} like '% too'", table, KEY[0]))
        return
    text = f"insert into {{}} values ({number}, 'x'), ({number + 1}, 'y')"
    database.execute(statement(text, table))
    database.execute(statement("update {} set v = v || '!'", table))
    database.execute(statement(f"delete from {{}} where id = {number + 1}", table))


def declare(database: Database, defs: Path, tables: list[TableName]) -> None:
    """Publish the tables, declare them by `pgcdc init`, and set their SCD types."""
    filtered = sql.SQL("{} where ({} <> 'never')").format(
        sql.Identifier(*ODD), sql.Identifier(KEY[0])
    )
    others = [sql.Identifier(*table) for table in tables if table != ODD]
    members = sql.SQL(", ").join([filtered, *others])
    database.execute(sql.SQL('create publication "Pub %1" for table {}').format(members))
    assert main(["init", "--name", "mine", "--publication", "Pub %1", "--defs", str(defs)]) == 0
    file = defs / "mine" / "defs.yaml"
    written = yaml.safe_load(file.read_text())
    attributes = written["attributes"]
    attributes["slot"] = f"s_{database.name}"
    assert {TableName.parse(entry["name"]) for entry in attributes["tables"]} == set(tables)
    for entry in attributes["tables"]:
        name = TableName.parse(entry["name"])
        entry["scd"] = [1, 2] if name == ODD else [1]
        entry["soft_deletes"] = name == SOFT
        if name == ODD:
            entry["tracked"] = ["é😀", "${env:HOME}", TYPED, "."]
    file.write_text(yaml.safe_dump(written))


@pytest.mark.sampled
@pytest.mark.parametrize("tables", [FEW, pytest.param(ALL, marks=pytest.mark.soak)], ids=len)
def test_every_command_accepts_a_legal_name(
    tables: list[TableName],
    locations: Locations,
    database: Database,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = locations.write_over_defs(database, lake="a lake")
    for schema in {table.schema for table in tables} - {"public"}:
        database.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
    for table in tables:
        create(database, table)
        change(database, table, 1)
    declare(database, locations.defs, tables)
    assert main(["check", "-m", module]) == 0
    assert main(["sync", "-m", module]) == 0
    database.execute(statement("alter table {} add column {} text", SOFT, "new one"))
    for table in tables:
        change(database, table, 3)
    assert main(["sync", "-m", module]) == 0
    compared = [] if tables is ALL else [str(ODD)]
    assert main(["rebuild", "mine", str(ODD), "-m", module]) == 0
    if tables is ALL:
        again = [str(table) for table in (ODD, KEYLESS, TableName("public", "a...b"))]
        assert main(["resnapshot", "mine", *again, "-m", module]) == 0
    assert main(["verify", "-m", module, *compared]) == 0
    capsys.readouterr()
    assert main(["status", "-m", module]) == 0
    shown = capsys.readouterr().out
    assert all(str(table) in shown for table in tables)
