"""A Spark standalone cluster of this machine: a master, and two workers with an executor each.

`--spark cluster` runs the tests of the merge with the driver in the test process, and
`--spark cluster_connect` with the driver in a server of `pgcdc spark start`. `--lake s3` puts their
tables into the S3 server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pgcdc_assets.local import free_port
from pgcdc_assets.spark.jars import MASTER
from pgcdc_assets_tests.support.spark import JAVA_OPTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WORKERS = 2
_SECONDS_TO_START = 120.0
_EXECUTOR = "CoarseGrainedExecutorBackend"

# Sizes for one machine, which a user of a small cluster sets too. The package sets none of them for
# the master of a cluster.
CLUSTER_CONF = {
    "spark.executor.memory": "700m",
    "spark.executor.cores": "1",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.ui.enabled": "false",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
}


class SparkCluster:
    """A running cluster. As a context manager, end it.

    Args:
        folder: a folder for the workers' files and logs.
        environment: variables of the executors, such as the credentials of a store.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = environment
        self._port, self._web_port = free_port(), free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        """The value of `spark.master`."""
        return f"spark://127.0.0.1:{self._port}"

    @property
    def conf(self) -> dict[str, str]:
        """The settings of a session on this cluster."""
        return {**CLUSTER_CONF, MASTER: self.master}

    def __enter__(self) -> SparkCluster:
        try:
            self._launch("master.Master", "--port", self._port, "--webui-port", self._web_port)
            self._wait(0)
            for _ in range(_WORKERS):
                sizes = ("--cores", 1, "--memory", "1g", "--work-dir", self.folder / "work")
                self._launch("worker.Worker", *sizes, "--webui-port", 0, self.master)
            self._wait(_WORKERS)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all processes of the cluster."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def executors(self) -> list[psutil.Process]:
        """List the executors, oldest first."""
        found = []
        for process in self._processes:
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        if any(_EXECUTOR in word for word in child.cmdline()):
                            found.append(child)
        return sorted(found, key=lambda child: child.create_time())

    def applications(self) -> list[str]:
        """List the applications that have had executors, ended ones included."""
        return sorted(folder.name for folder in (self.folder / "work").glob("app-*"))

    def kill_executor(self) -> bool:
        """Kill the oldest executor; return whether there was one."""
        for executor in self.executors():
            with suppress(psutil.NoSuchProcess):
                executor.kill()
                return True
        return False

    def _launch(self, role: str, *arguments: object) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        command = [home / "bin" / "spark-class", f"org.apache.spark.deploy.{role}"]
        log = self.folder / f"{role}-{len(self._processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*map(str, command), "--host", "127.0.0.1", *map(str, arguments)],
                env={
                    **os.environ,
                    **self._environment,
                    "SPARK_HOME": str(home),
                    "SPARK_DAEMON_MEMORY": "200m",
                    "SPARK_LOCAL_IP": "127.0.0.1",
                },
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)

    def _wait(self, workers: int) -> None:
        """Wait for the master and for a number of workers."""
        deadline = time.monotonic() + _SECONDS_TO_START
        while self._alive_workers() < workers:
            ended = [each.poll() for each in self._processes if each.poll() is not None]
            assert not ended and time.monotonic() < deadline, f"see the logs in {self.folder}"
            time.sleep(0.2)

    def _alive_workers(self) -> int:
        url = f"http://127.0.0.1:{self._web_port}/json/"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return int(json.load(answer)["aliveworkers"])
        except (OSError, ValueError):
            return -1


@pytest.fixture(scope="session")
def spark_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkCluster]:
    """A cluster of the test process, whose executors reach the S3 server with `--lake s3`."""
    environment = request.getfixturevalue("lake_environment")
    with SparkCluster(tmp_path_factory.mktemp("cluster"), environment) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster_session(spark_cluster: SparkCluster, lake_uri: str) -> Iterator[SparkSession]:
    """A session on the cluster, with the driver in this process."""
    from pgcdc_assets.orchestration.resources import SparkResource
    from pgcdc_assets.raw.lake import Lake

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)
        resource = SparkResource(remote="local", spark_config=spark_cluster.conf)
        session = resource.session(Lake(lake_uri))
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster_connect_session(
    spark_cluster: SparkCluster, lake_uri: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """A session on a Spark Connect server whose driver uses the cluster."""
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    from pgcdc_assets.raw.lake import Lake
    from pgcdc_assets.spark.object_store import bucket_options
    from pgcdc_assets.spark.server import SparkServer
    from pgcdc_assets.spark.session import release_at_exit, release_session, set_lake

    server = SparkServer(tmp_path_factory.mktemp("spark"), spark_cluster.conf, [lake_uri])
    lake = Lake(lake_uri)
    with server.running() as running:
        session: Any = ConnectSession.builder.remote(running.remote).create()
        yield set_lake(release_at_exit(session), bucket_options(lake.uri, lake.storage))
        release_session(session)
