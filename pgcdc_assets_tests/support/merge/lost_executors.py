"""Merge tables on a cluster while executors are killed: URI CONF FIRST SECOND, a JSON and two keys.

`PGCDC_SPARK_REMOTE` is the server with the driver, or `local`: the driver is in this process.

Spark merges the tables, although they are small.

The process merges the first window and prints `begin`. It merges the second window until it
succeeds, and prints as JSON: the classes of the errors, the time of the success, how many commits
of the second window are Spark's, and what the tables contain.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from pgcdc_assets.merge.batch import scope
from pgcdc_assets.spark.tuning import SMALL_CHANGES

# Several tasks do a merge of more changes than this.
ROWS = SMALL_CHANGES + 1_000
ATTEMPTS = 10


def run(uri: str, conf: dict[str, str], keys: list[str]) -> dict[str, Any]:
    """Merge both windows."""
    from pgcdc_assets.lsn import LsnWindow
    from pgcdc_assets.merge import MergeFailure, merge_tables
    from pgcdc_assets.orchestration.resources import SparkResource
    from pgcdc_assets.raw.lake import Lake
    from pgcdc_assets.raw.zone import RawZone
    from pgcdc_assets.settings import CdcTable
    from pgcdc_assets.tables.state import open_table, table_path

    lake = Lake(uri)
    zone, table = RawZone(lake, "test"), CdcTable("shop", "items", (1, 2))
    spark = SparkResource(spark_config=conf).session(lake)
    first, second = map(LsnWindow.parse, keys)
    paths = {scd: table_path(lake, "test", table.schema, table.table, scd) for scd in table.scd}

    def commits_of_spark(path: str) -> int:
        opened = open_table(lake, path)
        assert opened is not None
        return sum(e["engineInfo"].startswith("Apache-Spark") for e in opened.history())

    def merge(window: LsnWindow) -> list[str]:
        found = merge_tables(spark, zone, [table], window)
        failed = [each for each in found if isinstance(each, MergeFailure)]
        for each in failed:
            print(repr(each.error.__cause__)[:500], file=sys.stderr)
        return [type(each.error).__name__ for each in failed]

    assert merge(first) == []
    before = {scd: commits_of_spark(path) for scd, path in paths.items()}
    print("begin", flush=True)
    errors = []
    for _ in range(ATTEMPTS):
        failed = merge(second)
        errors += failed
        if not failed:
            break
    merged_at = time.time()
    by_spark = {f"scd{scd}": commits_of_spark(path) - before[scd] for scd, path in paths.items()}
    contents = {}
    for scd, path in paths.items():
        frame = spark.read.format("delta").load(path)
        current = "true" if scd == 1 else "_is_current"
        row = frame.selectExpr(
            "count(*) AS n",
            f"count_if({current}) AS held",
            f"sum(IF({current}, id, 0)) AS ids",
            f"count_if({current} AND v = 'new') AS renewed",
        ).collect()[0]
        contents[f"scd{scd}"] = [row.n, row.held, row.ids, row.renewed]
    return {
        "errors": errors,
        "merged_at": merged_at,
        "by_spark": by_spark,
        "contents": contents,
    }


if __name__ == "__main__":
    os.environ[scope.SMALL_TABLES] = scope.APART
    print(json.dumps(run(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])), flush=True)
