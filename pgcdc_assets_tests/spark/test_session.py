"""The sessions of a merge are separate, and are released after the merge."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.server_process import RunningServer
from pgcdc_assets.spark.session import activate, check_started_for, own_sessions, spark_session
from pgcdc_assets.spark.tuning import (
    SMALL_BYTES,
    SMALL_CHANGES,
    TINY_BYTES,
    TINY_CHANGES,
    is_tiny,
    tune,
)
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation

pytestmark = pytest.mark.spark

SETTING = "spark.databricks.delta.write.txnAppId"


def test_parallel_sessions_share_neither_settings_nor_views(spark: SparkSession) -> None:
    with own_sessions(spark, 2) as (one, two):
        one.conf.set(SETTING, "mine")
        one.range(1).createOrReplaceTempView("pgcdc_source")
        two.range(2).createOrReplaceTempView("pgcdc_source")
        assert [each.table("pgcdc_source").count() for each in (one, two)] == [1, 2]
        assert one.conf.get(SETTING) == "mine"
        for other in (spark, two):
            assert other.conf.get(SETTING, None) is None
        assert two.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.range(3).count() == 3


def test_after_a_small_merge_a_large_merge_has_the_session_s_initial_settings(
    spark: SparkSession,
) -> None:
    """Spark's default of 200 partitions would slow a large merge down by a fifth."""
    partitions = "spark.sql.shuffle.partitions"
    with own_sessions(spark, 1) as (session,):
        own = session.conf.get(partitions)
        assert own not in ("1", "200")
        seen = []
        for change_count in (SMALL_CHANGES, SMALL_CHANGES + 1, 1, SMALL_CHANGES + 1):
            tune(session, change_count, 0)
            seen.append(session.conf.get(partitions))
        assert seen == ["1", own, "1", own]
        vectors = "spark.databricks.delta.merge.deletionVectors.persistent"
        assert session.conf.get(vectors, None) != "false"


def test_partitions_follow_the_bytes_of_the_changes(spark: SparkSession) -> None:
    """20,000 rows of 1 MB are not a small merge, in which one task processes all rows."""
    partitions = "spark.sql.shuffle.partitions"
    megabyte = 1024 * 1024
    with own_sessions(spark, 1) as (session,):
        own = session.conf.get(partitions)
        seen = []
        for changes, size in ((20_000, 20_000 * megabyte), (20, 33 * megabyte), (20, megabyte)):
            tune(session, changes, 0, size)
            seen.append(session.conf.get(partitions))
        assert seen == ["625", own, "1"]
        assert not is_tiny(20, 0, 33 * megabyte)


class _Databricks:
    """A session whose number of shuffle partitions is `auto`, which Spark itself refuses."""

    def __init__(self, partitions: str) -> None:
        self.values = {"spark.sql.shuffle.partitions": partitions}
        self.conf: Any = self

    def get(self, name: str, default: str | None) -> str | None:
        return self.values.get(name, default)

    def set(self, name: str, value: str) -> None:
        self.values[name] = value

    def unset(self, name: str) -> None:
        del self.values[name]


@pytest.mark.parametrize("partitions", ["auto", "AUTO"])
def test_a_number_of_partitions_that_databricks_chooses_is_left_untouched(partitions: str) -> None:
    session = _Databricks(partitions)
    seen = []
    for changes, size in ((SMALL_CHANGES + 1, 0), (20_000, 20_000 * 1024**2), (20, 0), (20, 2**40)):
        tune(cast(SparkSession, session), changes, 0, size)
        seen.append(session.values["spark.sql.shuffle.partitions"])
    # One task does a small merge, here too.
    assert seen == [partitions, partitions, "1", partitions]


def test_only_a_tiny_merge_is_interpreted(spark: SparkSession) -> None:
    codegen = "spark.sql.codegen.factoryMode"
    with own_sessions(spark, 1) as (session,):
        session.conf.set(codegen, "FALLBACK")
        seen = []
        for changes, table_bytes in (
            (TINY_CHANGES, TINY_BYTES),
            (TINY_CHANGES + 1, TINY_BYTES),
            (TINY_CHANGES, TINY_BYTES + 1),
        ):
            tune(session, changes, table_bytes)
            adaptive = session.conf.get("spark.sql.adaptive.enabled")
            seen.append((session.conf.get(codegen), adaptive))
        assert seen == [("NO_CODEGEN", "false"), ("FALLBACK", "false"), ("FALLBACK", "false")]


def test_a_large_table_is_filtered_by_the_keys_of_the_changes_before_a_shuffle(
    embedded_session: SparkSession, tmp_path: Path
) -> None:
    """The test examines the plan of the MERGE's writing join."""
    with own_sessions(embedded_session, 1) as (session,):
        session.conf.set("spark.sql.autoBroadcastJoinThreshold", "-1")
        session.range(100).write.format("delta").save(str(tmp_path / "table"))
        plans = []
        for target_bytes in (SMALL_BYTES + 1, SMALL_BYTES):
            tune(session, SMALL_CHANGES + 1, target_bytes)
            rows = session.sql("SELECT id AS k0, id AS lsn FROM range(9)").localCheckpoint()
            table = session.read.format("delta").load(str(tmp_path / "table"))
            joined = rows.where("lsn >= 0").join(table, rows.k0 == table.id, "left")
            plans.append(joined._jdf.queryExecution().optimizedPlan().toString())
        assert ["might_contain" in plan for plan in plans] == [True, False]


def test_the_sessions_of_a_server_share_generated_code(connect_session: SparkSession) -> None:
    """Each run merges in sessions of its own, which would compile all code of a merge again."""
    compiler = "org.apache.spark.sql.catalyst.expressions.codegen.CodeGenerator"

    def compile_seconds(session: SparkSession) -> str:
        ((taken,),) = session.sql(f"SELECT java_method('{compiler}', 'compileTime')").collect()
        return str(taken)

    def query(session: SparkSession) -> None:
        rows = session.range(1000, numPartitions=3).selectExpr("id % 77 AS k", "id")
        rows.groupBy("k").agg({"id": "sum"}).sort("k").localCheckpoint().collect()

    taken = []
    with own_sessions(connect_session, 1) as (watching,):
        for _ in range(3):
            with own_sessions(connect_session, 1) as (session,):
                activate(session)
                query(session)
            activate(watching)
            compile_seconds(watching)
            taken.append(compile_seconds(watching))
    assert taken[1] == taken[2]
    assert int(taken[0]) > 0


def test_a_released_session_is_removed_from_the_server(
    connect_session: SparkSession, spark_server: RunningServer
) -> None:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    with own_sessions(connect_session, 2) as opened:
        released = [session.client._session_id for session in opened]
    for name in released:
        again = ConnectSession.builder.remote(f"{spark_server.remote};session_id={name}").create()
        with pytest.raises(PySparkException, match="SESSION_CLOSED"):
            again.range(1).collect()
        again.client.close()


@pytest.mark.sampled
def test_merges_leave_no_session_on_the_server(
    connect_session: SparkSession,
    spark_server: RunningServer,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shutil.which("jcmd") is None:
        pytest.skip("jcmd of a JDK is necessary to count the objects of a JVM")
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    tables = ("items", "other")
    landing = Landing(
        zone,
        [relation(column("id"), table=t, relation_id=1000 + i) for i, t in enumerate(tables)],
    )
    landing.begin()
    counts = []
    for number in range(4):
        window = landing.land([insert(str(number)), insert(str(number), relation_id=1001)])
        targets = [CdcTable("shop", table) for table in tables]
        for report in merge_tables(connect_session, zone, targets, window):
            assert isinstance(report, MergeReport), report
        counts.append(sessions_on(spark_server))
    assert counts[0] == counts[-1], counts


def sessions_on(server: RunningServer) -> int:
    """Return the number of sessions in the server's heap after a garbage collection."""
    histogram = subprocess.run(
        ["jcmd", str(server.pid), "GC.class_histogram"], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(
        r"^\s*\d+:\s+(\d+)\s+\d+\s+org\.apache\.spark\.sql\.connect\.service\.SessionHolder$",
        histogram,
        re.MULTILINE,
    )
    return int(found[1]) if found else 0


def test_a_process_with_an_embedded_session_cannot_use_a_server(
    embedded_session: SparkSession,
) -> None:
    with pytest.raises(ConfigurationError, match=r"sc://localhost:1\b") as caught:
        spark_session("test", remote="sc://localhost:1/;token=sesame")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "lake",
    ["s3://bucket/lake", "abfss://container@account.dfs.core.windows.net/lake", "gs://bucket/lake"],
)
def test_an_embedded_session_of_a_local_lake_is_not_used_for_an_object_store(
    embedded_session: SparkSession, tmp_path: Path, lake: str
) -> None:
    check_started_for(str(tmp_path))
    with pytest.raises(ConfigurationError, match="without the jars") as caught:
        check_started_for(lake)
    assert lake in str(caught.value)


_SESSION_FOR_STORES = """
import sys
from pgcdc_assets.spark.object_store import start_options
from pgcdc_assets.spark.session import check_started_for, spark_session
spark_session("test", conf=start_options(sys.argv[1:], {}))
for lake in sys.argv[1:]:
    check_started_for(lake)
"""


@pytest.mark.soak
def test_an_embedded_session_is_used_for_the_stores_that_it_was_started_for() -> None:
    lakes = ("s3://bucket/lake", "abfss://container@account/lake", "gs://bucket/lake")
    done = subprocess.run(
        [sys.executable, "-c", _SESSION_FOR_STORES, *lakes],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


_SECOND_SESSION = """
import sys
from pgcdc_assets.errors import TransientError
from pgcdc_assets.spark.session import release_session, spark_session
remote = sys.argv[1]
first = spark_session("test", remote=remote)
assert first.range(2).count() == 2
assert spark_session("test", remote=remote) is first
first.client.release_session()
second = spark_session("test", remote=remote)
assert second is not first and second.range(3).count() == 3
try:
    spark_session("test", remote="sc://localhost:1/;token=sesame")
except TransientError as error:
    assert "sc://localhost:1 " in str(error) and "sesame" not in str(error), error
else:
    raise AssertionError("no server listens on port 1")
third = spark_session("test", remote=remote)
assert third.range(4).count() == 4
"""


@pytest.mark.sampled
def test_an_ended_session_is_replaced_and_the_error_names_a_silent_server(
    spark_server: RunningServer,
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _SECOND_SESSION, spark_server.remote],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
