"""The commands with a lake in an S3 store, by an embedded session and by a Spark server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.object_store_proxy import Fault

# The first start downloads the jars of S3A.
pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow, pytest.mark.soak]

TABLES = [
    {"name": "public.items", "key": ["id"], "scd": [1, 2]},
    {"name": "public.kept", "key": ["id"], "soft_deletes": True},
    {"name": "public.bag"},
]


# The entries of the server's own catalog are there until the server ends.
QUERY_BY_NAME = """
import sys

from pgcdc_assets.orchestration.resources import SparkResource
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.settings.storage import Storage

lake = Lake(sys.argv[1], storage=Storage(access_key_env="LAKE_KEY", secret_key_env="LAKE_SECRET"))
spark = SparkResource().session(lake)
described = spark.sql("describe detail cdc.public__items__scd1").collect()[0]
print(described.location, spark.table("cdc.public__items__scd1").count())
"""


class Project:
    """A project folder whose commands run as child processes."""

    def __init__(self, database: Database, folder: Path, lake: str) -> None:
        self.folder, self.lake = folder, Lake(lake)
        (folder / "defs" / "mine").mkdir(parents=True)
        (folder / "dagster").mkdir()
        attributes = {
            "name": "mine",
            "publication": "pub",
            "slot": f"s_{database.name}",
            "lake": lake,
            "storage": {"access_key_env": "LAKE_KEY", "secret_key_env": "LAKE_SECRET"},
            "catalog": {"schema": "cdc"},
            "messages": {"prefixes": ["outbox"]},
            "stream": {"two_phase": True},
            "tables": TABLES,
        }
        document = {"type": "pgcdc_assets.PostgresCdcComponent", "attributes": attributes}
        (folder / "defs" / "mine" / "defs.yaml").write_text(yaml.safe_dump(document))
        names = {"AWS_ACCESS_KEY_ID": "LAKE_KEY", "AWS_SECRET_ACCESS_KEY": "LAKE_SECRET"}
        self.secret = os.environ["AWS_SECRET_ACCESS_KEY"]
        self.environment = {
            **{names.get(name, name): value for name, value in os.environ.items()},
            "PGCDC_DSN": database.conninfo,
            "PGCDC_STATE": str(folder / "state"),
            "DAGSTER_HOME": str(folder / "dagster"),
            "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
        }
        self.environment.pop("PGCDC_SPARK_REMOTE", None)

    def __call__(self, *arguments: str, status: int = 0) -> str:
        """Run a command, which must end with the exit status; return its output."""
        return self.run("-m", "pgcdc_assets.cli", *arguments, status=status)

    def table(self, *parts: str) -> DeltaTable:
        """Open a Delta table of the capture."""
        path = self.lake.path("mine", *parts)
        return DeltaTable(path, storage_options=self.lake.delta_options)

    def item_ids(self) -> list[int]:
        """Return the keys of the current image, by a reader that knows deletion vectors."""
        query = QueryBuilder().register("items", self.table("scd1", "public", "items"))
        ids: list[int] = pa.table(query.execute("select id from items")).column("id").to_pylist()
        return ids

    def run(self, *arguments: str, status: int = 0) -> str:
        """Run Python in the project's environment; return the output."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        output = done.stdout + done.stderr
        assert done.returncode == status, output
        assert self.secret not in output
        return output


def check_moves(proxy: StoreProxy) -> None:
    """Check that the store copied the files of a rebuild, and that no client read them before."""
    requests = [each for each in proxy.requests if each.key.endswith(".parquet")]
    moved = {
        each.key.rpartition("/")[2]: place for place, each in enumerate(requests) if each.is_copy
    }
    built = {
        each.key.rpartition("/")[2]: each.key
        for each in requests
        if each.kind == "PUT" and "/rebuild/" in each.key
    }
    assert moved and moved.keys() <= built.keys(), "the store copies each file that Spark wrote"
    for name, place in moved.items():
        folder = built[name].rpartition("/")[0]
        first = min(at for each, at in moved.items() if built[each].rpartition("/")[0] == folder)
        read = [each for each in requests[first : place + 1] if each.kind == "GET"]
        assert not [each for each in read if "/rebuild/" in each.key], folder


def create_tables(database: Database) -> None:
    """Create a publication of tables with and without a key."""
    database.execute("create table items (id int primary key, v numeric, tags text[])")
    database.execute("create table kept (id int primary key, v text)")
    database.execute("create table bag (v text)")
    database.execute("alter table bag replica identity full")
    database.execute("create publication pub for table items, kept, bag")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spark", ["embedded", "server"])
def test_a_lake_in_s3_follows_its_source_and_is_rebuilt(
    spark: str, database: Database, tmp_path: Path, store_proxy: StoreProxy
) -> None:
    create_tables(database)
    database.execute("insert into items select n, n / 7.0, '{a,b}' from generate_series(1, 50) n")
    database.execute("insert into kept select n, 'row' from generate_series(1, 20) n")
    database.execute("insert into bag select 'twice' from generate_series(1, 4) n")
    pgcdc = Project(database, tmp_path, f"s3://lake/commands-{spark}-{database.name}")
    if spark == "server":
        pgcdc("spark", "start", "--lake", "s3://lake")
    try:
        pgcdc("sync")
        assert "3 tables" in pgcdc("verify")
        database.execute("update items set v = v + 1 where id % 3 = 0")
        database.execute("delete from items where id > 45")
        database.execute("delete from kept where id > 10")
        database.execute("delete from bag where ctid = (select min(ctid) from bag)")
        database.execute("alter table items add column note text default 'new'")
        database.execute("insert into items values (100, 1.5, null, 'x')")
        # Spark writes the history.
        with store_proxy.making(Fault("ExpiredToken", "PUT", contains="/scd2/")):
            assert "(ExpiredToken). Check the credentials in the" in pgcdc("sync", status=2)
        assert store_proxy.log_entries()
        store_proxy.forget()
        busy = [Fault("SlowDown", contains=part, times=4) for part in ("/raw/", "/scd")]
        with store_proxy.making(*busy):
            pgcdc("sync")
        assert store_proxy.faults() == {"SlowDown": 8}
        assert "3 tables" in pgcdc("verify")
        assert store_proxy.log_entries()
        store_proxy.forget()
        pgcdc("rebuild", "mine")
        check_moves(store_proxy)
        assert "3 tables" in pgcdc("verify")
        pgcdc("resnapshot", "mine", "public.items")
        pgcdc("sync")
        database.execute("update items set note = 'again' where id = 1")
        pgcdc("resnapshot", "mine", "public.items", "--where", "id = 1")
        assert "3 tables" in pgcdc("verify")

        database.execute("select pg_logical_emit_message(true, 'outbox', 'hello')")
        database.execute("select pg_logical_emit_message(true, 'other', 'hidden')")
        database.prepare("waits", "insert into items values (200, 2, null, 'prepared')")
        pgcdc("sync")
        assert pgcdc.table("raw", "prepared").to_pyarrow_table().num_rows > 0
        assert 200 not in pgcdc.item_ids()
        database.end_prepared("waits")
        pgcdc("sync")
        assert "3 tables" in pgcdc("verify")
        assert 200 in pgcdc.item_ids()

        database.execute("select pg_drop_replication_slot(%s)", (f"s_{database.name}",))
        pgcdc("renew", "--name", "mine")
        database.execute("delete from items where id = 200")
        database.execute("select pg_logical_emit_message(true, 'outbox', 'after')")
        pgcdc("sync")
        assert "3 tables" in pgcdc("verify")
        messages = pgcdc.table("messages").to_pyarrow_table().sort_by("epoch")
        assert messages.column("text").to_pylist() == ["hello", "after"]
        pgcdc("status")
        if spark == "server":
            location, count = pgcdc.run("-c", QUERY_BY_NAME, pgcdc.lake.uri).split()[-2:]
            assert location == pgcdc.lake.path("mine", "scd1", "public", "items")
            assert int(count) == database.value("select count(*) from items")
    finally:
        pgcdc("spark", "stop")
    assert not (tmp_path / "s3:").exists()
    assert store_proxy.log_entries()
