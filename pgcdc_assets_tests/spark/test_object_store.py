"""Spark and delta-rs on one S3 store."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark import logstore
from pgcdc_assets.spark.jars import find_jars, spark_jars
from pgcdc_assets.spark.object_store import HADOOP, check_reachable, start_options
from pgcdc_assets_tests.support.object_store import StoreProxy

PROVIDERS = "spark.hadoop.fs.s3a.aws.credentials.provider"
# Commits of each driver.
_COMMITS = 100


@pytest.mark.spark
@pytest.mark.soak
# The first start downloads the jars of S3A.
@pytest.mark.timeout(1800)
def test_two_drivers_and_delta_rs_lose_no_commit(s3_lake: Lake, store_proxy: StoreProxy) -> None:
    """Hundreds of commits with many conflicts."""
    uri = s3_lake.path("t")

    def append(number: int) -> None:
        rows = pa.table({"id": pa.array([number], pa.int64())})
        write_deltalake(uri, rows, mode="append", storage_options=s3_lake.delta_options)

    append(0)
    with ExitStack() as running:
        drivers = [running.enter_context(_append_by_spark(uri, first)) for first in (1000, 2000)]
        for driver in drivers:
            assert driver.stdout is not None
            assert any(line.strip() == "ready" for line in driver.stdout), "the session starts"
        for driver in drivers:
            assert driver.stdin is not None
            driver.stdin.write("\n")
            driver.stdin.flush()
        # Delta reads each commit that won before it tries again, so a writer without a pause would
        # starve the drivers.
        numbers: list[int] = []
        while any(driver.poll() is None for driver in drivers):
            numbers.append(3000 + len(numbers))
            append(numbers[-1])
            time.sleep(1.0)
        assert [driver.wait() for driver in drivers] == [0, 0]
    table = DeltaTable(uri, storage_options=s3_lake.delta_options)
    expected = [0, *range(1000, 1000 + _COMMITS), *range(2000, 2000 + _COMMITS), *numbers]
    assert sorted(table.to_pyarrow_table().column("id").to_pylist()) == expected
    assert table.version() == len(expected) - 1
    commits = len(store_proxy.log_entries())
    assert commits > len(expected), "some commits met another and were tried again"


@contextmanager
def _append_by_spark(uri: str, first: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process that appends rows; end it with the block."""
    program = "pgcdc_assets_tests.support.appending_spark"
    with subprocess.Popen(
        [sys.executable, "-m", program, uri, str(_COMMITS), str(first)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.soak
def test_the_jar_is_built_from_the_source() -> None:
    javac = shutil.which("javac")
    version = javac and subprocess.run([javac, "-version"], capture_output=True, text=True).stdout
    if javac is None or not version or not version.startswith("javac 17"):
        pytest.skip("the jar was built by the compiler of Java 17")
    try:
        class_path = find_jars("delta-storage", "hadoop-client-api")
    except LookupError:
        pytest.skip("Delta's jars are not downloaded yet")
    assert logstore.build(javac, class_path) == logstore.JAR.read_bytes()


def test_the_jars_are_those_of_the_hadoop_in_pyspark() -> None:
    assert f"hadoop-client-api-{HADOOP}.jar" in [jar.name for jar in spark_jars()]


def test_only_a_lake_in_s3_needs_more_jars(tmp_path: Path) -> None:
    conf = {"spark.jars.packages": "delta"}
    assert start_options([str(tmp_path)], conf) == conf
    found = start_options([str(tmp_path), "s3a://bucket/lake"], conf)
    assert found["spark.jars.packages"].startswith("delta,org.apache.hadoop:hadoop-aws:")
    assert found["spark.delta.logStore.s3.impl"] == logstore.CLASS
    assert "ProfileCredentialsProvider" in found[PROVIDERS]
    assert start_options(["s3://bucket/lake"], {PROVIDERS: "mine"})[PROVIDERS] == "mine"


@pytest.mark.parametrize(
    ("lake", "connector"),
    [
        ("abfss://container@account.dfs.core.windows.net/lake", "hadoop-azure"),
        ("abfs://container@account.dfs.core.windows.net/lake", "hadoop-azure"),
        ("gs://bucket/lake", "hadoop-gcp"),
    ],
)
def test_a_lake_in_azure_or_google_needs_the_connector_of_this_hadoop(
    lake: str, connector: str
) -> None:
    """The stores themselves are not tried: there is no server for them here."""
    found = start_options([lake, lake], {"spark.jars.packages": "delta", "a": "b"})
    package = f"org.apache.hadoop:{connector}:{HADOOP}"
    assert found == {"spark.jars.packages": f"delta,{package}", "a": "b"}
    both = start_options([lake, "s3://bucket/lake"], {"spark.jars.packages": "delta"})
    packages = both["spark.jars.packages"].split(",")
    assert packages[:2] == ["delta", package]
    assert packages[2].startswith("org.apache.hadoop:hadoop-aws:")


def test_a_server_on_another_machine_does_not_get_a_local_lake() -> None:
    with pytest.raises(ConfigurationError, match="a folder of this machine"):
        check_reachable("/data/lake", "sc://spark.example:15002", is_here=False)
    check_reachable("/data/lake", "sc://localhost:15002", is_here=True)
    check_reachable("s3://bucket/lake", "sc://spark.example:15002", is_here=False)
