"""Merges on a Spark standalone cluster with two executors, and tables in an S3 store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from pgcdc_assets.merge.batch import scope
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.jars import MASTER
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.spark.settings import embedded_conf, server_conf
from pgcdc_assets_tests.support.cluster import SparkCluster
from pgcdc_assets_tests.support.merge.history import Landing, column, delete, relation, update
from pgcdc_assets_tests.support.merge.lost_executors import ROWS
from pgcdc_assets_tests.support.spark import ON_CLUSTER

_KILLS, _SECONDS_BETWEEN_KILLS = 2, 5.0
# An executor that runs a task uses a core, which it may share with the driver. So does one that
# starts.
_BUSY_PERCENT, _BUSY_SECONDS, _SECONDS_TO_START = 30.0, 0.2, 8.0
# Spark writes the events of its driver to a file, as they happen.
_EVENT_LOG = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.rolling.enabled": "false",
    "spark.eventLog.compress": "false",
}

ROOT = Path(__file__).parents[2]

# SCD1, SCD2, soft deletes, tables without a key, rebuild and verify, killed syncs; random histories
# among them.
# Each kind of history is cut once; a folder of this machine has the other cuts.
_ONE_CUT = "not (-one or -many or -all)"
_TESTS = {
    "merge/test_random_histories.py": _ONE_CUT,
    "merge/test_random_versions.py": "some and not two or rewrite or untracked or snapshot",
    "merge/test_random_bags.py": _ONE_CUT,
    "merge/test_random_soft_deletes.py": _ONE_CUT,
    "merge/test_rebuild.py::test_a_table_is_rebuilt_with_the_source_switched_off": "",
    "verify/test_compare_at.py": "",
    "test_random_convergence.py::test_killed_syncs_land_each_change_once_and_converge": "",
}
_FOR_ONE_MACHINE = (
    "spark.sql.shuffle.partitions",
    "spark.databricks.delta.snapshotPartitions",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism",
)


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://host", "local-cluster[2]"])
def test_settings_for_the_cores_of_one_machine_do_not_go_to_a_cluster(master: str) -> None:
    for conf in (embedded_conf(), embedded_conf("local"), server_conf(1, "/f", "local[4,2]")):
        assert set(_FOR_ONE_MACHINE) <= conf.keys()
    for conf in (embedded_conf(master), server_conf(1, "/f", master)):
        assert conf[MASTER] == master
        assert not set(_FOR_ONE_MACHINE) & conf.keys()


@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ON_CLUSTER)
@pytest.mark.parametrize("test", _TESTS)
def test_the_tests_of_the_merge_pass_on_a_cluster_with_a_lake_in_s3(test: str, kind: str) -> None:
    chosen = ["-k", _TESTS[test], "--spark", kind, "--lake", "s3"]
    arguments = ["-q", "-p", "no:cacheprovider", "--durations=30", *chosen]
    path = f"pgcdc_assets_tests/{test}"
    # A process has one embedded session.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, path],
        cwd=ROOT,
        env={**os.environ, scope.SMALL_TABLES: scope.APART},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d+ passed", done.stdout) and "skipped" not in done.stdout


@contextmanager
def _driver(conf: dict[str, str], kind: str, folder: Path, lake: str) -> Iterator[tuple[str, str]]:
    """The address of the server with the driver, or `local`, and a client's settings as JSON."""
    if kind == "cluster":
        yield "local", json.dumps(conf)
        return
    with SparkServer(folder, conf, [lake]).running() as server:
        yield server.remote, "{}"


def _kill_busy_executor(cluster: SparkCluster) -> bool:
    """Kill the executor that uses the most of its core; return whether one was busy."""
    started = time.time() - _SECONDS_TO_START
    # The executors end with the driver.
    with suppress(psutil.NoSuchProcess):
        executors = [each for each in cluster.executors() if each.create_time() < started]
        for executor in executors:
            executor.cpu_percent()
        time.sleep(_BUSY_SECONDS)
        used = [executor.cpu_percent() for executor in executors]
        if max(used, default=0.0) >= _BUSY_PERCENT:
            executors[used.index(max(used))].kill()
            return True
    return False


def _lost_tasks(events: Path, begin: float, end: float) -> dict[str, int]:
    """Count the tasks that ran on an executor when it ended, by the executor's id.

    Args:
        begin, end: the time in which they ended, in seconds.
    """
    lost: Counter[str] = Counter()
    for file in events.iterdir():
        for line in file.read_text().splitlines():
            # The last line may be incomplete.
            if '"SparkListenerTaskEnd"' not in line or not line.endswith("}"):
                continue
            with suppress(ValueError):
                event = json.loads(line)
                reason, ended = event["Task End Reason"], event["Task Info"]["Finish Time"] / 1000
                if reason["Reason"] == "ExecutorLostFailure" and begin <= ended <= end:
                    lost[reason["Executor ID"]] += 1
    return dict(lost)


@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.parametrize("kind", ON_CLUSTER)
def test_a_merge_that_loses_executors_loses_and_repeats_nothing(
    kind: str, s3_lake: Lake, tmp_path: Path
) -> None:
    """Executors are killed during the merge. It continues, or it fails and is repeated."""
    landing = Landing(RawZone(s3_lake, "test"), [relation(column("id"), column("v", "text"))])
    landing.begin([str(number), "old"] for number in range(ROWS))
    landing.land([])
    updated = [update(str(number), "new") for number in range(0, ROWS, 2)]
    landing.land(updated, [delete(str(number), None) for number in range(1, ROWS, 2)])
    keys = [window.key for window in landing.windows]
    program = "pgcdc_assets_tests.support.merge.lost_executors"
    events = tmp_path / "events"
    events.mkdir()
    with SparkCluster(tmp_path, {}) as cluster:
        settings = {**cluster.conf, **_EVENT_LOG, "spark.eventLog.dir": events.as_uri()}
        with _driver(settings, kind, tmp_path, s3_lake.uri) as (remote, conf):
            command = [sys.executable, "-m", program, s3_lake.uri, conf, *keys]
            environment = {**os.environ, "PGCDC_SPARK_REMOTE": remote}
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, text=True
            ) as merging:
                assert merging.stdout is not None
                assert any(line == "begin\n" for line in merging.stdout)
                begin, kills = time.time(), 0
                while merging.poll() is None:
                    if not _kill_busy_executor(cluster):
                        continue
                    kills += 1
                    time.sleep(_SECONDS_BETWEEN_KILLS)
                    if len(_lost_tasks(events, begin, time.time())) >= _KILLS:
                        break
                output, _ = merging.communicate()
    assert merging.returncode == 0
    found = json.loads(output.splitlines()[-1])
    print(f"{kills} executors were killed: {found}")
    # The executors ran tasks of the merge.
    assert len(_lost_tasks(events, begin, found["merged_at"])) >= _KILLS
    assert min(found["by_spark"].values()) > 0
    assert set(found["errors"]) <= {"TransientError"}
    held, ids = ROWS // 2, sum(range(0, ROWS, 2))
    expected = {"scd1": [held, held, ids, held], "scd2": [ROWS + held, held, ids, held]}
    assert found["contents"] == expected
