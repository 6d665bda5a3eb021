"""Settings of a session for a block, in an embedded session and by Spark Connect."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.spark.server_process import RunningServer
from pgcdc_assets.spark.session import own_sessions
from pgcdc_assets.spark.session_settings import session_settings

pytestmark = pytest.mark.spark

# Set by the package, not set with a default, not set without a default, and unknown to Spark.
NAMES = (
    "spark.sql.files.maxRecordsPerFile",
    "spark.databricks.delta.optimize.minFileSize",
    "spark.databricks.delta.write.txnAppId",
    "spark.pgcdc.unknown",
)


def test_the_previous_values_are_restored(spark: SparkSession) -> None:
    check_restored(spark)


def test_the_previous_values_are_restored_on_a_server(
    spark: SparkSession, spark_server: RunningServer
) -> None:
    check_restored(spark)


def check_restored(spark: SparkSession) -> None:
    with own_sessions(spark, 1) as (session,):
        before = {name: session.conf.get(name, None) for name in NAMES}
        assert before[NAMES[0]] == "1000000"
        assert before[NAMES[2]] is None and before[NAMES[3]] is None
        with pytest.raises(KeyError), session_settings(session, dict.fromkeys(NAMES, "7")):
            assert {session.conf.get(name, None) for name in NAMES} == {"7"}
            raise KeyError
        assert {name: session.conf.get(name, None) for name in NAMES} == before
