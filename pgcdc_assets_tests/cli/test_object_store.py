"""The commands with a lake in an S3 store, by an embedded session and by a Spark server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.object_store import StoreProxy

# The first start downloads the jars of S3A.
pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow, pytest.mark.soak]

TABLES = [
    {"name": "public.items", "key": ["id"], "scd": [1, 2]},
    {"name": "public.kept", "key": ["id"], "soft_deletes": True},
    {"name": "public.bag"},
]


class Project:
    """A project folder whose commands run as child processes."""

    def __init__(self, database: Database, folder: Path, lake: str) -> None:
        self.folder = folder
        (folder / "defs" / "mine").mkdir(parents=True)
        (folder / "dagster").mkdir()
        attributes = {
            "name": "mine",
            "publication": "pub",
            "slot": f"s_{database.name}",
            "lake": lake,
            "storage": {"access_key_env": "LAKE_KEY", "secret_key_env": "LAKE_SECRET"},
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

    def __call__(self, *arguments: str) -> str:
        """Run a command that must succeed; return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "pgcdc_assets.cli", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        assert self.secret not in output
        return output


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spark", ["embedded", "server"])
def test_a_lake_in_s3_follows_its_source_and_is_rebuilt(
    spark: str, database: Database, tmp_path: Path, store_proxy: StoreProxy
) -> None:
    database.execute("create table items (id int primary key, v numeric, tags text[])")
    database.execute("create table kept (id int primary key, v text)")
    database.execute("create table bag (v text)")
    database.execute("alter table bag replica identity full")
    database.execute("create publication pub for table items, kept, bag")
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
        pgcdc("sync")
        assert "3 tables" in pgcdc("verify")
        pgcdc("rebuild", "mine")
        assert "3 tables" in pgcdc("verify")
        pgcdc("resnapshot", "mine", "public.items")
        pgcdc("sync")
        assert "3 tables" in pgcdc("verify")
        pgcdc("status")
    finally:
        pgcdc("spark", "stop")
    assert not (tmp_path / "s3:").exists()
    assert store_proxy.counts()["PUT"] > 0
