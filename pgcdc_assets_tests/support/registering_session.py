"""Register tables in a Hive metastore and query all entries: REQUEST, a JSON object.

The request has the fields of `SparkResource` in `session`, the folder of the Delta tables in
`lake`, and the tables to register in `names`. A metastore in Derby belongs to one process at a
time, and a process has one embedded session, so each session of a test is a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def register_in_process(
    folder: Path, session: Mapping[str, Any], names: Iterable[str] = ()
) -> tuple[dict[str, str | None], dict[str, list[int]]]:
    """Run this program in a folder, whose folder `lake` has the tables.

    Returns:
        The error or None of each table, and the sorted ids in the table of each entry.
    """
    request = {"session": dict(session), "lake": str(folder / "lake"), "names": list(names)}
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(request)],
        # Derby writes its log to the working directory.
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors, found = json.loads(done.stdout.splitlines()[-1])
    return errors, found


if __name__ == "__main__":
    from pgcdc_assets.orchestration.resources import SparkResource
    from pgcdc_assets.raw.lake import Lake
    from pgcdc_assets.settings.catalog import CatalogPolicy
    from pgcdc_assets.spark.catalog import CatalogTable, check_catalog, register_tables
    from pgcdc_assets.table_name import TableName

    asked = json.loads(sys.argv[1])
    spark = SparkResource(hive=True, **asked["session"]).session(Lake(asked["lake"]))
    policy = CatalogPolicy("cdc", "hive")
    check_catalog(spark, policy)
    tables = [
        CatalogTable(TableName("shop", name), 1, f"{asked['lake']}/{name}")
        for name in asked["names"]
    ]
    registered = {
        table.table.table: error and str(error)
        for table, error in register_tables(spark, policy, tables)
    }
    entries = {
        row.tableName: sorted(each.id for each in spark.table(f"cdc.{row.tableName}").collect())
        for row in spark.sql("SHOW TABLES IN cdc").collect()
    }
    print(json.dumps([registered, entries]))
