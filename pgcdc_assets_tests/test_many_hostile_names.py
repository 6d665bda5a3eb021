"""A hundred odd names of tables and schemas in one publication: none disturbs another."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from psycopg2 import sql
from pyspark.sql import SparkSession

from pgcdc_assets.cli import main
from pgcdc_assets.orchestration.project.code_location import load_location
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.orchestration.location import Locations

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

# Names that differ little, or that a file system, a URL, a shell, YAML, Dagster, Hadoop or Delta
# may take for something else.
_TEXTS = [
    '"',
    "''",
    "`",
    "“q”",
    "..",
    "...",
    "/",
    "a/b",
    "/etc/passwd",
    "\\",
    "a\\b",
    " a",
    "a ",
    "  ",
]
_TEXTS += [
    "%",
    "%20",
    "%s",
    "%(x)s",
    "=",
    "x=1",
    ":",
    "a:b",
    "*",
    "?",
    "[a]",
    "[!a]",
    "a\nb",
    "a\tb",
]
_TEXTS += [
    "😀",
    "e\u0301",
    "é",
    "\u202eabc",
    "\u200b",
    "Orders",
    "orders",
    "ORDERS",
    "con",
    "aux.txt",
]
_TEXTS += [
    "_delta_log",
    "_spark_metadata",
    "_temporary",
    "._COPYING_",
    "a.crc",
    "a.parquet",
    "~",
    "~/x",
]
_TEXTS += [
    "~20~",
    "a~2e~b",
    "a.b.c",
    "#",
    "#1",
    "+",
    "&",
    "&amp;",
    "{}",
    "{a,b}",
    "$",
    "${x}",
]
_TEXTS += [
    "$(x)",
    "!",
    "@",
    "^",
    ",",
    "a,b",
    "(",
    "|",
    "<>",
    ";",
    "--",
    "/*",
    "\x01",
    "\x7f",
    "null",
]
_TEXTS += [
    "__HIVE_DEFAULT_PARTITION__",
    "true",
    "1",
    "-1",
    "1e3",
    "-",
    "_",
    "__",
    "a__b",
    "a___b",
    "aX5fXb",
    "- a",
    "? a",
    "& a",
]
_TEXTS += ["x" * 62 + "a", "x" * 62 + "b", "é" * 31 + "a", "é" * 31 + "b", "😀" * 15 + "ab"]
TABLES = [TableName("public", text) for text in _TEXTS]
TABLES += [TableName(text, "t") for text in _TEXTS[:60:3]]


def _execute(database: Database, text: str, table: TableName, number: int) -> None:
    name, row = sql.Identifier(*table), sql.Literal(number)
    database.execute(sql.SQL(text).format(table=name, number=row))


@pytest.mark.soak
def test_many_odd_names_share_one_publication(
    locations: Locations,
    database: Database,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The row of each table has the table's number, so a comparison finds two that are mixed up."""
    module = locations.write_over_defs(database)
    for schema in {table.schema for table in TABLES} - {"public"}:
        database.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
    for number, table in enumerate(TABLES):
        _execute(database, "create table {table} (id int primary key, v int)", table, number)
        _execute(database, "insert into {table} values ({number}, 0)", table, number)
    members = sql.SQL(", ").join(sql.Identifier(*table) for table in TABLES)
    publication = "Pub \"x\", 'é😀' %s"
    database.execute(
        sql.SQL("create publication {} for table {}").format(sql.Identifier(publication), members)
    )
    init = ["init", "--name", "mine", "--publication", publication, "--defs", str(locations.defs)]
    assert main(init) == 0
    file = locations.defs / "mine" / "defs.yaml"
    written = yaml.safe_load(file.read_text())
    assert len(written["attributes"]["tables"]) == len(TABLES)
    for entry in written["attributes"]["tables"][::7]:
        entry["scd"] = [1, 2]
    written["attributes"]["slot"] = f"s_{database.name}"
    file.write_text(yaml.safe_dump(written))
    assert main(["check", "-m", module]) == 0
    for value in (1, 2):
        assert main(["sync", "-m", module]) == 0
        for number, table in enumerate(TABLES):
            _execute(
                database, f"update {{table}} set v = {value} where id = {{number}}", table, number
            )
            if value == 1:
                _execute(database, "insert into {table} values (1000 + {number})", table, number)
    assert main(["sync", "-m", module]) == 0
    assert main(["verify", "-m", module]) == 0
    assert main(["rebuild", "mine", "-m", module]) == 0
    assert main(["verify", "-m", module]) == 0
    capsys.readouterr()
    assert main(["status", "-m", module]) == 0
    shown = capsys.readouterr().out
    assert [table for table in TABLES if str(table) not in shown] == []
    assert not {"STOPPED", "BROKEN"} & set(shown.split())
    folders = {log.parent for log in Path(locations.folder, "lake/mine/scd1").rglob("_delta_log")}
    assert len(folders) == len(TABLES)
    graph = load_location(module).repository.asset_graph
    keys = {key for key in graph.get_all_asset_keys() if key.path[1] == "scd1"}
    assert len(keys) == len(TABLES)
