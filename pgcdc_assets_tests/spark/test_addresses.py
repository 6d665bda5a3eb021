"""The addresses of Spark Connect servers."""

from __future__ import annotations

import socket

import pytest

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.orchestration.resources import SparkResource
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark import addresses
from pgcdc_assets.spark.addresses import check_address, check_answers
from pgcdc_assets.spark.server_process import RunningServer


@pytest.mark.parametrize(
    "remote",
    [
        "sc://localhost",
        "sc://localhost:15002",
        "sc://spark_1.example.com:443/",
        "sc://10.0.0.1:15002/;token=a=b;use_ssl=true",
        "sc://[::1]:15002/;user_id=x",
    ],
)
def test_an_address_of_spark_is_accepted(remote: str) -> None:
    check_address(remote, "spark_remote")


@pytest.mark.parametrize(
    "remote",
    [
        "sesame",
        "sc://",
        "sc://h:70000",
        "sc://localhost:15002;token=sesame",
        "sc://token:sesame@localhost:15002",
        "http://localhost:15002/;token=sesame",
        "sc://h ost",
    ],
)
def test_another_text_is_refused_by_the_name_of_the_setting(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCDC_SPARK_REMOTE", remote)
    for resource, setting in (
        (SparkResource(), "PGCDC_SPARK_REMOTE"),
        (SparkResource(remote=remote), "spark_remote"),
    ):
        with pytest.raises(ConfigurationError, match=f"^{setting} is not the address") as refused:
            resource.session(Lake("/tmp/no_such_lake"))
        assert "sesame" not in str(refused.value)


@pytest.mark.spark
def test_a_server_that_does_not_answer_is_named_in_time(
    spark_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PySpark would repeat its first request for many minutes."""
    check_answers(spark_server.remote)
    monkeypatch.setattr(addresses, "_ANSWER_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for remote in (
            f"sc://127.0.0.1:{silent.getsockname()[1]}",
            "sc://nosuch.invalid:15002/;token=sesame",
            # A server without TLS.
            f"sc://127.0.0.1:{spark_server.port}/;token=sesame",
        ):
            with pytest.raises(TransientError, match="does not answer within 1 s") as refused:
                check_answers(remote)
            assert "sesame" not in str(refused.value)
