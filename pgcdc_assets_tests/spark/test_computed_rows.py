"""Rows that are computed once, on a cluster that loses an executor with these rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.spark.computed_rows import compute_rows
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.spark.session import release_session
from pgcdc_assets_tests.support.cluster import SparkCluster
from pgcdc_assets_tests.support.waits import wait_until

_ROWS = 1_000
# A job waits for both executors: with one of them, the rows would have no second place.
_BOTH_EXECUTORS = {
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}


@pytest.mark.spark
@pytest.mark.soak
def test_computed_rows_outlive_an_executor_that_has_stored_them(tmp_path: Path) -> None:
    """Spark cannot compute them again, because they have no plan."""
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    with SparkCluster(tmp_path, {}) as cluster:
        conf = {**cluster.conf, **_BOTH_EXECUTORS}
        with SparkServer(tmp_path, conf).running() as server:
            session: Any = ConnectSession.builder.remote(server.remote).create()
            try:
                drawn = session.range(0, _ROWS, 1, 4).selectExpr("id", "rand() AS drawn")
                rows = compute_rows(drawn)
                before = sorted(map(tuple, rows.collect()))
                assert len(before) == _ROWS
                executors = cluster.executors()
                assert len(executors) == 2
                executors[0].kill()
                wait_until(lambda: executors[0] not in cluster.executors(), "the end")
                assert sorted(map(tuple, rows.collect())) == before
            finally:
                release_session(session)
