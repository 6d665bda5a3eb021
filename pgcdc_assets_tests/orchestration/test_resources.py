"""The resources find their servers in the environment."""

from __future__ import annotations

import json
import logging
import socket
from contextlib import nullcontext
from pathlib import Path

import dagster as dg
import dagster_pyspark.resources
import pytest

from pgcdc_assets.cli.check import examine_snapshot_source
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration import resources
from pgcdc_assets.orchestration.resources import PostgresResource, SparkResource
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.spark import embedded_jvm
from pgcdc_assets.spark import session as spark_session
from pgcdc_assets.spark.jars import MASTER
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.spark.server_process import RunningServer


def test_a_standby_for_copies_is_named_by_an_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    primary = "host=127.0.0.1 port=1"
    postgres = PostgresResource(capture="shop", conninfo=primary, lock_timeout_ms=7)
    assert postgres.standby_settings(SnapshotPolicy()) is None
    assert examine_snapshot_source(postgres, SnapshotPolicy()) == []
    policy = SnapshotPolicy(dsn_env="SHOP_STANDBY")
    with pytest.raises(ConfigurationError, match="SHOP_STANDBY, which is not set"):
        postgres.standby_settings(policy)
    [finding] = examine_snapshot_source(postgres, policy)
    assert (finding.code, finding.severity) == ("snapshot_standby", "error")
    assert (
        "snapshot.dsn_env names the environment variable SHOP_STANDBY, which is not set"
        in finding.message
    )
    for value in (" ", "postgresql://bob:secret@[host", "host='secret"):
        monkeypatch.setenv("SHOP_STANDBY", value)
        [finding] = examine_snapshot_source(postgres, policy)
        assert (finding.code, finding.severity) == ("snapshot_standby", "error")
        assert "SHOP_STANDBY" in finding.message
        assert "secret" not in finding.message
    monkeypatch.setenv("SHOP_STANDBY", "host=standby")
    standby = postgres.standby_settings(policy)
    assert standby is not None
    assert (standby.conninfo, standby.name, standby.lock_timeout_ms) == ("host=standby", "shop", 7)
    with pytest.raises(ConfigurationError, match=r"snapshot\.dsn_env must name"):
        SnapshotPolicy(dsn_env=" ")


def test_the_primary_of_a_source_on_a_standby_is_named_by_an_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B17: the settings of the source have its primary, and those of other servers have not."""
    postgres = PostgresResource(
        capture="shop", conninfo="host=source", primary_dsn_env="SHOP_PRIMARY", lock_timeout_ms=7
    )
    monkeypatch.delenv("SHOP_PRIMARY", raising=False)
    with pytest.raises(ConfigurationError, match=r"^primary_dsn_env names .* SHOP_PRIMARY, which"):
        postgres.settings()
    monkeypatch.setenv("SHOP_PRIMARY", "host=primary password=secret")
    settings = postgres.settings()
    assert settings.primary is not None
    assert (settings.conninfo, settings.primary.primary) == ("host=source", None)
    assert settings.primary.conninfo == "host=primary password=secret"
    assert (settings.primary.variable, settings.primary.lock_timeout_ms) == ("SHOP_PRIMARY", 7)
    assert "secret" not in repr(settings)
    monkeypatch.setenv("SHOP_STANDBY", "host=standby")
    standby = postgres.standby_settings(SnapshotPolicy(dsn_env="SHOP_STANDBY"))
    assert standby is not None
    assert (standby.conninfo, standby.primary) == ("host=standby", None)


def test_a_merge_of_a_local_lake_on_another_machine_is_refused_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote = "sc://spark.example/;token=hidden"
    for spark in (SparkResource(remote=remote), SparkResource()):
        monkeypatch.setenv("PGCDC_SPARK_REMOTE", remote)
        with pytest.raises(
            ConfigurationError,
            match=r"^The lake /x is a folder of this machine, and the Spark server "
            r"sc://spark\.example is on another machine, which would read and write a folder of "
            r"its own\. Set the lake to an object store, or use a Spark on this machine\.?$",
        ):
            spark.session(Lake("/x"))


class _ClusterSession:
    """A session on a cluster."""

    def __init__(self, master: str) -> None:
        self.conf = {MASTER: master}


def _warnings_of_run(spark: SparkResource, lake: Lake) -> list[str]:
    """Start a session in a run, and list the warnings of the run's log."""

    @dg.asset
    def merged() -> None:
        spark.session(lake)

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([merged], instance=instance)
        entries = instance.all_logs(result.run_id)
    assert result.success
    return [entry.user_message for entry in entries if entry.level == logging.WARNING]


@pytest.mark.parametrize(
    ("master", "uri", "is_warned"),
    [
        ("spark://other.example:7077", "/x", True),
        ("spark://localhost:7077,other.example:7077", "/x", True),
        ("yarn", "/x", True),
        ("k8s://https://localhost:6443", "/x", True),
        ("spark://other.example:7077", "s3://lake/x", False),
        ("spark://localhost:7077", "/x", False),
        (f"spark://{socket.gethostname()}:7077", "/x", False),
        ("local", "/x", False),
        ("local[4,2]", "/x", False),
        ("local-cluster[2,1,1024]", "/x", False),
    ],
)
def test_a_run_warns_if_executors_on_other_machines_may_not_share_the_folder_of_the_lake(
    master: str, uri: str, is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _ClusterSession(master)
    monkeypatch.delenv("PGCDC_SPARK_REMOTE", raising=False)
    monkeypatch.setattr(spark_session, "connecting", lambda _: nullcontext())
    monkeypatch.setattr(dagster_pyspark.resources, "spark_session_from_config", lambda _: session)
    monkeypatch.setattr(spark_session, "started", lambda *_: session)
    monkeypatch.setattr(spark_session, "set_lake", lambda *_: session)
    monkeypatch.setattr(spark_session, "runs_embedded", lambda: False)
    monkeypatch.setattr(embedded_jvm, "with_jvm", lambda conf: conf)
    found = _warnings_of_run(SparkResource(spark_config={MASTER: master}), Lake(uri))
    expected = (
        f"The lake {uri} is a folder, and the Spark executors of {master} may be on other machines."
        " All machines must share this folder. Otherwise each executor writes to a folder of its "
        "own, and the tables lack its files."
    )
    assert found == ([expected] if is_warned else [])


@pytest.mark.spark
def test_the_master_of_a_server_is_known(
    spark_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pgcdc spark start --conf spark.master=...` is on this machine, its executors are not."""
    spark = SparkResource(remote=spark_server.remote)
    assert _warnings_of_run(spark, Lake(str(tmp_path))) == []
    monkeypatch.setattr(resources, "_is_here", lambda _: False)
    [warning] = _warnings_of_run(spark, Lake(str(tmp_path)))
    assert "the Spark executors of local[" in warning


@pytest.mark.parametrize(
    ("uri", "stores", "is_used"),
    [
        ("/x", [], True),
        ("hdfs://name/x", [], True),
        ("s3://lake/x", [], False),
        ("s3a://lake/x", ["s3"], True),
        ("abfss://c@a.dfs.core.windows.net/x", ["gs", "s3"], False),
        ("abfss://c@a.dfs.core.windows.net/x", ["abfs"], True),
        ("gs://lake/x", [], False),
        ("gs://lake/x", ["gs"], True),
    ],
)
def test_a_server_without_the_connector_of_the_store_is_not_used(
    uri: str, stores: list[str], is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RunningServer(1, 15002, "token", 0.0, ready=True, stores=stores)
    monkeypatch.setattr(SparkServer, "usable", lambda _: server)
    assert (SparkResource()._own_server(Lake(uri)) is not None) == is_used


def test_the_state_file_of_another_release_names_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SparkServer(tmp_path)
    server.state_file.parent.mkdir(parents=True, exist_ok=True)
    fields = {"pid": 1, "port": 15002, "token": "token", "started_at": 0.0, "has_s3": True}
    server.state_file.write_text(json.dumps(fields))
    monkeypatch.setattr(RunningServer, "is_alive", lambda _: True)
    assert server.find() == RunningServer(1, 15002, "token", 0.0)
