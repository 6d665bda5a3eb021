"""Merge a table of `races.RACES`-like rows in an S3 lake, and run the daily job: URI KEY...

A process of its own, because the Spark session of the other tests has no jars of S3. It prints one
line of JSON: the rows after each step, and the partition keys after the job.
"""

from __future__ import annotations

import json
import sys
from typing import Any

NAME = "test"


def run(uri: str, keys: list[str]) -> dict[str, Any]:
    """Merge through the newest window in two steps, and run the job with a retention of no time."""
    import dagster as dg

    from pgcdc_assets.lsn import LsnWindow
    from pgcdc_assets.merge import MergeFailure, merge_tables, rebuild_table
    from pgcdc_assets.orchestration.build import build_cdc_definitions
    from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
    from pgcdc_assets.raw.lake import Lake
    from pgcdc_assets.raw.zone import RawZone
    from pgcdc_assets.settings import CdcCapture, CdcTable
    from pgcdc_assets.settings.policies import RetentionPolicy
    from pgcdc_assets.tables.state import table_path
    from pgcdc_assets_tests.support.spark import CONF

    lake = Lake(uri)
    zone, table = RawZone(lake, NAME), CdcTable("shop", "items", (1, 2))
    capture = CdcCapture(NAME, "pub", (table,), retention=RetentionPolicy(raw_days=0))
    spark = SparkResource(remote="local", spark_config=CONF)
    session = spark.session(lake)

    def rows() -> dict[str, list[Any]]:
        found = {}
        for scd in table.scd:
            path = table_path(lake, NAME, table.schema, table.table, scd)
            frame = session.read.format("delta").load(path).select("id", "v")
            found[f"scd{scd}"] = sorted([row.id, row.v] for row in frame.collect())
        return found

    # The second merge leaves files to compact.
    for key in (keys[len(keys) // 2], keys[-1]):
        for outcome in merge_tables(session, zone, [table], LsnWindow.parse(key)):
            if isinstance(outcome, MergeFailure):
                raise outcome.error
    merged = rows()
    definitions = build_cdc_definitions(
        capture,
        postgres=PostgresResource(capture=NAME, conninfo="host=127.0.0.1 port=1"),
        lake=LakeResource(uri=uri),
        spark=spark,
    )
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(capture.windows_name, keys)
        job = definitions.resolve_job_def(f"{NAME}_upkeep")
        assert job.execute_in_process(instance=instance).success
        kept = list(instance.get_dynamic_partitions(capture.windows_name))
    maintained = rows()
    try:
        rebuild_table(session, zone, table, 2, None)
        rebuilt = "rebuilt"
    except Exception as error:
        rebuilt = type(error).__name__
    return {"merged": merged, "maintained": maintained, "keys": kept, "rebuilt": rebuilt}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2:])))
