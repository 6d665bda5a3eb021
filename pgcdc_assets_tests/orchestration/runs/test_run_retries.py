"""Retries of runs by the instance (`run_retries` of dagster.yaml), beside those of the sensors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
import yaml

from pgcdc_assets.orchestration.project.home import CONFIG
from pgcdc_assets_tests.orchestration.conftest import Orchestrated

pytestmark = pytest.mark.postgres


@pytest.fixture
def retrying(
    orchestrated: Orchestrated, tmp_path: Path, fresh_home: Path
) -> Iterator[Orchestrated]:
    """Return the capture in an instance that repeats failed runs."""
    home = shutil.copytree(fresh_home, tmp_path / "retrying")
    retries = {"run_retries": {"enabled": True, "max_retries": 3}}
    config = {**yaml.safe_load(CONFIG.read_text()), **retries}
    (home / "dagster.yaml").write_text(yaml.safe_dump(config))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield replace(orchestrated, instance=instance)


def will_retry(orchestrated: Orchestrated) -> str | None:
    """Return whether Dagster repeats the newest run."""
    newest = orchestrated.instance.get_runs(limit=1)[0]
    assert newest.status is dg.DagsterRunStatus.FAILURE
    return newest.tags.get("dagster/will_retry")


def test_the_instance_does_not_repeat_runs_that_a_sensor_requests_again(
    retrying: Orchestrated,
) -> None:
    """A repeated run would copy all its tables again, without the sensor's growing pause."""
    retrying.database.execute("drop publication pub")
    (request,) = retrying.tick("lag").run_requests
    assert not retrying.execute(request, "snapshot").success
    assert will_retry(retrying) == "false"


def test_the_instance_does_not_repeat_a_killed_run_of_a_sensor(retrying: Orchestrated) -> None:
    retrying.copy()
    retrying.commit("insert into b values (1, 1)")
    (request,) = retrying.tick("lag").run_requests
    kill(retrying, "capture", dict(request.tags))
    assert will_retry(retrying) == "false"
    retrying.land()
    (request,) = retrying.tick("merges").run_requests
    kill(retrying, "merge", dict(request.tags))
    assert will_retry(retrying) == "false"


@pytest.mark.parametrize("job", ["rebuild", "snapshot"])
def test_the_instance_repeats_a_failed_run_that_no_sensor_requests(
    retrying: Orchestrated, job: str
) -> None:
    kill(retrying, job, {})
    assert will_retry(retrying) == "true"


def kill(orchestrated: Orchestrated, job: str, tags: dict[str, str]) -> None:
    run = orchestrated.start_run(job, tags)
    orchestrated.instance.report_run_failed(run, "killed")
