"""A merge whose Spark runs out of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.merge.history import Landing, column, insert, relation

pytestmark = [pytest.mark.spark, pytest.mark.slow]

# A process of its own, because its JVM does not live.
_MERGE = """
import sys
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import TableTarget, merge_tables
from pgcdc_assets.merge.session import spark_session
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone

spark = spark_session("small", conf={"spark.driver.memory": "512m"})
zone = RawZone(Lake(sys.argv[1]), "test")
(report,) = merge_tables(
    spark, zone, [TableTarget("shop", "items")], LsnWindow.parse(sys.argv[2])
)
print(report.error)
"""


def test_a_row_that_is_too_large_for_the_heap_is_named_with_the_remedy(zone: RawZone) -> None:
    """D16: and nothing of it is committed."""
    landing = Landing(zone, [relation(column("id"), column("doc", "text"))])
    landing.begin([])
    landing.land([insert("1", "x" * 100_000_000)])

    done = subprocess.run(
        [sys.executable, "-c", _MERGE, zone.lake.uri, landing.windows[-1].key],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )

    assert done.stdout.startswith("Table shop.items was not merged: Spark ended"), done.stdout
    assert "spark.driver.memory" in done.stdout
    assert "xxx" not in done.stdout
