"""Tables in a Hive metastore, whose entries outlive the session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

pytestmark = [pytest.mark.spark, pytest.mark.soak]

# A metastore in Derby belongs to one process at a time, so each step is a process.
PROGRAM = """
import sys
from pgcdc_assets.orchestration.resources import SparkResource
from pgcdc_assets.catalog_policy import CatalogPolicy
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.catalog import CatalogTable, check_catalog, register_tables
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.spark import CONF

folder, names = sys.argv[1], sys.argv[2:]
derby = f"jdbc:derby:;databaseName={folder}/metastore;create=true"
conf = {**CONF, "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.hadoop.javax.jdo.option.ConnectionURL": derby}
spark = SparkResource(remote="local", spark_config=conf, hive=True).session(Lake(folder))
policy = CatalogPolicy("cdc", "hive")
check_catalog(spark, policy)
tables = [CatalogTable(TableName("shop", name), 1, f"{folder}/lake/{name}") for name in names]
for table, error in register_tables(spark, policy, tables):
    print("registered", table.table.table, error)
for row in spark.sql("SHOW TABLES IN cdc").collect():
    ids = sorted(each.id for each in spark.table(f"cdc.{row.tableName}").collect())
    print("found", row.tableName, ids)
"""


def run_session(folder: Path, *names: str) -> list[str]:
    """Register tables in the metastore of a folder; return what the process prints."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *names],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.split(" ")[0] in _MARKS]


_MARKS = ("registered", "found")


@pytest.mark.timeout(900)
def test_entries_in_a_metastore_outlive_the_session_and_case_is_no_confusion(
    tmp_path: Path,
) -> None:
    for number, name in enumerate(("orders", "Orders", "ORDERS")):
        write_deltalake(str(tmp_path / "lake" / name), pa.table({"id": [number]}))
    first = run_session(tmp_path, "orders", "Orders")
    assert first[:2] == ["registered orders None", "registered Orders None"]
    write_deltalake(str(tmp_path / "lake" / "orders"), pa.table({"id": [9]}), mode="append")
    second = run_session(tmp_path, "ORDERS")
    assert sorted(line.split(" ", 2)[2] for line in second if line.startswith("found")) == [
        "[0, 9]",
        "[1]",
        "[2]",
    ]
