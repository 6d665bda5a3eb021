"""`tables: all`: a new table of the publication is captured without a change of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from pyspark.sql import SparkSession

from pgcdc_assets.cli import main
from pgcdc_assets.orchestration.project.code_location import LoadedCapture, load_location
from pgcdc_assets.orchestration.project.home import DSN_VARIABLE
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.database import Database

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

NAME = "mine"
A = TableName("public", "a")
LATE = TableName("public", "without_identity")
ODD = TableName("public", 'New "lines"/50%*')


@pytest.fixture
def sync(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs `pgcdc sync` in a project folder."""
    folder = tmp_path / "project"
    (folder / "defs" / NAME).mkdir(parents=True)
    (tmp_path / "dagster").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setenv("PGCDC_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv(DSN_VARIABLE, database.conninfo)

    def run(exclude: Sequence[str] = ()) -> int:
        attributes = {
            "name": NAME,
            "publication": "pub",
            "slot": f"s_{database.name}",
            "tables": "all",
            "all_tables": {
                "exclude": list(exclude),
                "named": [{"name": "public.a", "key": ["id"], "scd": [1, 2]}],
            },
        }
        document = {"type": "pgcdc_assets.PostgresCdcComponent", "attributes": attributes}
        (folder / "defs" / NAME / "defs.yaml").write_text(yaml.safe_dump(document))
        return main(["sync"])

    return run


def loaded() -> LoadedCapture:
    (capture,) = load_location().select(NAME)
    return capture


@pytest.mark.sampled
def test_sync_follows_a_publication_for_all_tables(
    sync: Callable[..., int],
    database: Database,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lake = Lake(str(tmp_path / "lake"))

    def rows(table: TableName, scd: int = 1) -> int:
        return spark.read.format("delta").load(table_path(lake, NAME, *table, scd)).count()

    database.execute("create table a (id int primary key, v text)")
    database.execute("insert into a select n, 'row' from generate_series(1, 10) n")
    database.execute("create table without_identity (id int)")
    database.execute("create view looks as select * from a")
    database.execute("create unlogged table fast (id int primary key)")
    database.execute("create publication pub for all tables")
    init = ["init", "--name", NAME, "--publication", "pub", "--all-tables", "--force"]
    assert main(init) == 0
    written = yaml.safe_load((tmp_path / "project" / "defs" / NAME / "defs.yaml").read_text())
    assert written["attributes"] == {"name": NAME, "publication": "pub", "tables": "all"}
    assert sync() == 0
    assert "public.without_identity is refused" in capsys.readouterr().out
    assert [str(table.name) for table in loaded().capture.tables] == ["public.a"]

    database.execute('create table "New ""lines""/50%*" (id int primary key, v text)')
    database.execute('insert into "New ""lines""/50%*" values (1, \'x\'), (2, \'y\')')
    database.execute("create table tmp_b (id int primary key)")
    database.execute("alter table without_identity add primary key (id)")
    database.execute("insert into a values (11, 'new'); insert into without_identity values (1)")
    assert sync(["*.tmp_*"]) == 0
    names = {table.name for table in loaded().capture.tables}
    assert names == {A, ODD, LATE}
    assert (rows(A), rows(A, 2), rows(ODD), rows(LATE)) == (11, 11, 2, 1)

    # The definitions load without the source, with the newest stored list.
    monkeypatch.setenv(DSN_VARIABLE, "host=127.0.0.1 port=1 dbname=none")
    assert {table.name for table in loaded().capture.tables} == names
    monkeypatch.setenv(DSN_VARIABLE, database.conninfo)

    # A dropped table keeps its asset, and does not stop other tables.
    database.execute("drop table without_identity; insert into a values (12, 'newer')")
    capsys.readouterr()
    assert sync(["*.tmp_*"]) == 0
    assert "public.without_identity is left" in capsys.readouterr().out
    assert {table.name for table in loaded().capture.tables} == names
    assert (rows(A), rows(LATE)) == (12, 1)
    assert main(["check"]) == 0
    assert main(["status"]) == 0
    assert "LEFT public.without_identity" in capsys.readouterr().out
    assert main(["verify"]) == 0
    assert "Not compared: public.without_identity" in capsys.readouterr().out
