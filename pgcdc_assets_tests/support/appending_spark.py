"""Append rows to a Delta table by an embedded Spark session: URI COUNT FIRST, one commit a row.

The process waits for a line of the standard input after its session has started.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from pgcdc_assets.orchestration.resources import SparkResource
    from pgcdc_assets.raw.lake import Lake
    from pgcdc_assets_tests.support.spark import CONF

    uri, count, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    spark = SparkResource(remote="local", spark_config=CONF).session(Lake(uri))
    spark.read.format("delta").load(uri).count()
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(first, first + count):
        rows = spark.range(number, number + 1).coalesce(1)
        rows.write.format("delta").mode("append").save(uri)
