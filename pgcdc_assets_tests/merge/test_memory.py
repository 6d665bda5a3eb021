"""A merge whose Spark runs out of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
from deltalake import DeltaTable

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation

pytestmark = [pytest.mark.spark, pytest.mark.slow]

# Run in a separate process, because the JVM ends.
_MERGE = """
import sys
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.merge import merge_tables
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone

spark = spark_session("small", conf={"spark.driver.memory": "512m"})
zone = RawZone(Lake(sys.argv[1]), "test")
(report,) = merge_tables(
    spark, zone, [CdcTable("shop", "items")], LsnWindow.parse(sys.argv[2])
)
print(f"{type(report.error).__name__}: {report.error}")
"""


@pytest.mark.sampled
def test_the_error_of_a_row_that_exceeds_the_heap_has_the_remedy(zone: RawZone) -> None:
    """D16: nothing is committed."""
    landing = Landing(zone, [relation(column("id"), column("doc", "text"))])
    landing.begin([])
    landing.land([insert("1", "x" * 100_000_000)])

    done = subprocess.run(
        [sys.executable, "-c", _MERGE, zone.lake.uri, landing.windows[-1].key],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    kind, _, sentence = done.stdout.partition(": ")
    assert kind == "ConfigurationError", sentence + done.stderr[-3000:]
    assert sentence.startswith("Table shop.items was not merged, because Spark's memory was used")
    assert "spark.driver.memory" in sentence
    assert "xxx" not in sentence
    assert not DeltaTable.is_deltatable(table_path(zone.lake, "test", "shop", "items", 1))
