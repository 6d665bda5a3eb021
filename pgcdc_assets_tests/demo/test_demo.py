"""`make demo` and `make dev` as child processes, with their state in a temporary folder."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import psutil
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets_tests.support.demo_clone import demo_clone, server_of
from pgcdc_assets_tests.support.waits import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone() -> Iterator[Path]:
    """A copy of the clone, whose Spark server ends with the test."""
    with demo_clone("pgcdc-test-demo-") as folder:
        try:
            yield folder
        finally:
            spark_server_of(folder).stop()


def spark_server_of(clone: Path) -> SparkServer:
    return SparkServer(clone / ".pgcdc")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pgcdc_assets.demo", *arguments]


def environment(clone: Path) -> dict[str, str]:
    """Return an environment with the clone's package, and with settings to ignore."""
    return {
        **os.environ,
        "PYTHONPATH": str(clone),
        "PGCDC_DSN": "host=nowhere.invalid",
        "PGCDC_LAKE": str(clone / "precious"),
        "PGSSLMODE": "require",
    }


def run_demo(clone: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("--scale", "0.02", "--rate", "20", "--seconds", "1", *options),
        cwd=clone,
        env=environment(clone),
        capture_output=True,
        text=True,
    )


def test_the_demo_ends_with_equal_tables(clone: Path, spark: SparkSession) -> None:
    first = run_demo(clone)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Every table of the lake equals its source" in first.stdout
    assert first.stdout.count("  yes\n") == 6
    assert not server_of(clone).is_running
    assert not (clone / "precious").exists()
    try_the_lines_of_the_guide(clone / ".pgcdc" / "lake", spark)


@pytest.mark.soak
@pytest.mark.usefixtures("object_store")
def test_the_demo_with_a_lake_in_an_s3_store_ends_with_equal_tables(clone: Path) -> None:
    first = run_demo(clone, "--lake", "s3")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Every table of the lake equals its source" in first.stdout
    assert first.stdout.count("  yes\n") == 6
    state = clone / ".pgcdc" / "s3"
    store = state / "object-store"
    assert len(list((store / "objects").glob("lake/lake/shop/scd?/shop/*/_delta_log"))) >= 6
    assert not (store / "server.pid").exists(), "the S3 server has ended"
    assert not EmbeddedServer(state / "postgres").is_running
    assert not (state / "lake").exists() and not (clone / "precious").exists()


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_demo_continues_with_its_tables_and_finds_a_planted_difference(
    clone: Path, spark: SparkSession
) -> None:
    first = run_demo(clone)
    assert first.returncode == 0, first.stdout + first.stderr

    # An additional row with a key that no change touches.
    path = str(clone / ".pgcdc/lake/shop/scd1/shop/customers")
    customers = spark.read.format("delta").load(path)
    planted = customers.limit(1).selectExpr("* except (id)", "-1L as id").select(customers.columns)
    planted.write.format("delta").mode("append").save(path)

    second = run_demo(clone)
    assert second.returncode == 1, second.stdout + second.stderr
    assert "exists from an earlier demonstration" in second.stdout
    assert second.stdout.count("  yes\n") == 5
    assert "shop.customers" in second.stderr


@pytest.mark.sampled
def test_sigterm_to_the_demo_stops_its_postgres(clone: Path) -> None:
    log = clone / "demo.log"
    with log.open("wb") as output:
        demo = subprocess.Popen(
            command("--scale", "0.02"),
            cwd=clone,
            env=environment(clone),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: "Loading the definitions" in log.read_text(), "Postgres", limit_seconds=200
        )
        demo.terminate()
        assert demo.wait(timeout=200) == 130, log.read_text()
    finally:
        demo.kill()
    assert not server_of(clone).is_running


@pytest.mark.sampled
def test_dev_serves_the_ui_with_running_sensors_and_ends_at_one_sigint(
    clone: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (clone / "dev.log").open("wb") as output:
        dev = subprocess.Popen(
            command("dev", "--scale", "0.02", "--rate", "2", "--port", str(port)),
            # The process ignores SIGINT, as a background job of a shell does.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            start_new_session=True,
            cwd=clone,
            env=environment(clone),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: sensors_running(port) >= {"shop_lag", "shop_merges"},
            "the UI to show running sensors",
            limit_seconds=300,
            poll_seconds=1,
        )
        wait_until(
            lambda: any((clone / ".pgcdc/lake/shop/raw").glob("changes/_delta_log/*.json")),
            "a first window",
            limit_seconds=200,
            poll_seconds=1,
        )
        spark_server = spark_server_of(clone).usable()
        assert spark_server is not None
        dev.send_signal(signal.SIGINT)
        assert dev.wait(timeout=120) == 0
    except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as error:
        error.add_note((clone / "dev.log").read_text(errors="replace")[-4000:])
        raise
    finally:
        if dev.poll() is None:
            for process in psutil.Process(dev.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            dev.kill()
    assert not server_of(clone).is_running
    assert not spark_server.is_alive()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0


def try_the_lines_of_the_guide(lake: Path, spark: SparkSession) -> None:
    """Run the code of the guide to reading tables, and check that all readers agree."""
    guide = (ROOT / "docs" / "guides" / "read-tables.md").read_text()
    lines = re.findall(r"^\| ([A-Z]?[A-Za-z-]+)[^|]*\| `([^`]+)` \|$", guide, re.MULTILINE)
    assert [name for name, _ in lines] == ["delta-rs", "Spark", "DuckDB"] * 2
    names: dict[str, Any] = {
        "DeltaTable": DeltaTable,
        "QueryBuilder": QueryBuilder,
        "duckdb": duckdb,
        "spark": spark,
    }
    for place, table in ((0, "orders"), (3, "changes")):
        code = [line.replace(".pgcdc/lake", str(lake)) for _, line in lines[place : place + 3]]
        names[table] = eval(code[0], names)
        counted = sum(count for _, count in eval(code[2], names).fetchall())
        assert counted == eval(code[1], names).count() > 0
    (block,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    exec(block.replace(".pgcdc/lake", str(lake)), names)


def sensors_running(port: int) -> set[str]:
    """Return the names of the running sensors in Dagster's UI; none before the UI answers."""
    query = (
        "{ repositoriesOrError { ... on RepositoryConnection { nodes { "
        "sensors { name sensorState { status } } } } } }"
    )
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/graphql",
        json.dumps({"query": query}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            answer: dict[str, Any] = json.load(response)
    except OSError:
        return set()
    nodes = answer["data"]["repositoriesOrError"].get("nodes", [])
    return {
        sensor["name"]
        for node in nodes
        for sensor in node["sensors"]
        if sensor["sensorState"]["status"] == "RUNNING"
    }
