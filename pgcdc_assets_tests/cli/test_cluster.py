"""A project file with a lake in an S3 store, run on a Spark cluster by its settings alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pgcdc_assets.merge.batch import scope
from pgcdc_assets_tests.cli.test_object_store import Project, create_tables
from pgcdc_assets_tests.support.cluster import SparkCluster
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.spark import ON_CLUSTER

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow, pytest.mark.soak]

ROWS = 5_000
# An address of this machine that is not the default of `pgcdc spark start`.
OTHER_ADDRESS = "127.0.0.2"


def set_spark_config(project: Project, conf: dict[str, str]) -> None:
    """Set `spark_config` in the project file, and nothing else."""
    file = project.folder / "defs" / "mine" / "defs.yaml"
    document = yaml.safe_load(file.read_text())
    document["attributes"]["spark_config"] = conf
    file.write_text(yaml.safe_dump(document))


def commits_of_spark(project: Project) -> dict[tuple[str, str], int]:
    """Count the commits of Spark in the log of each table."""
    tables = [("scd1", "items"), ("scd2", "items"), ("scd1", "kept"), ("scd1", "bag")]
    return {
        (kind, name): sum(
            commit["engineInfo"].startswith("Apache-Spark")
            for commit in project.table(kind, "public", name).history()
        )
        for kind, name in tables
    }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ON_CLUSTER)
def test_the_project_file_of_one_machine_runs_on_a_cluster_by_settings(
    kind: str, database: Database, tmp_path: Path, store_proxy: StoreProxy
) -> None:
    """The driver is in the runs, by `spark_config`, or in the server of `pgcdc spark start`."""
    create_tables(database)
    rows = f"generate_series(1, {ROWS}) n"
    database.execute(f"insert into items select n, n / 7.0, '{{a,b}}' from {rows}")
    database.execute(f"insert into kept select n, 'row' from {rows}")
    database.execute(f"insert into bag select 'twice' || n / 2 from {rows}")
    pgcdc = Project(database, tmp_path, f"s3://lake/cluster-{kind}-{database.name}")
    # The process of a run would merge small tables without the cluster.
    pgcdc.environment[scope.SMALL_TABLES] = scope.APART
    with SparkCluster(tmp_path, pgcdc.environment) as cluster:
        if kind == "cluster":
            set_spark_config(pgcdc, cluster.conf)
        else:
            conf = {**cluster.conf, "spark.driver.host": OTHER_ADDRESS}
            options = [f"--conf={name}={value}" for name, value in conf.items()]
            pgcdc("spark", "start", "--lake", "s3://lake", *options)
        try:
            pgcdc("sync")
            assert "3 tables" in pgcdc("verify")
            created = commits_of_spark(pgcdc)
            database.execute("update items set v = v + 1 where id % 3 <> 0")
            database.execute("delete from items where id % 9 = 0")
            database.execute("delete from kept where id % 2 = 0")
            database.execute("delete from bag where ctid = (select min(ctid) from bag)")
            pgcdc("sync")
            assert all(count > created[table] for table, count in commits_of_spark(pgcdc).items())
            assert "3 tables" in pgcdc("verify")
        finally:
            pgcdc("spark", "stop")
        # Each command is an application with executors of its own, or all use those of the server.
        assert len(cluster.applications()) == {"cluster": 4, "cluster_connect": 1}[kind]
    assert store_proxy.log_entries()
