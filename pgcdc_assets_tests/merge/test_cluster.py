"""Merges on a Spark standalone cluster with two executors, and tables in an S3 store."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pgcdc_assets.spark.jars import MASTER
from pgcdc_assets.spark.settings import embedded_conf, server_conf
from pgcdc_assets_tests.support.spark import ON_CLUSTER

ROOT = Path(__file__).parents[2]

# SCD1, SCD2, soft deletes, tables without a key, rebuild and verify; random histories among them.
_TESTS = (
    "test_random_histories.py",
    "test_random_versions.py",
    "test_random_bags.py",
    "test_random_soft_deletes.py",
    "test_rebuild.py::test_a_table_is_rebuilt_with_the_source_switched_off",
)
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
    arguments = ["-q", "-p", "no:cacheprovider", "--spark", kind, "--lake", "s3"]
    path = f"pgcdc_assets_tests/merge/{test}"
    # A process has one embedded session.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d+ passed", done.stdout) and "skipped" not in done.stdout
