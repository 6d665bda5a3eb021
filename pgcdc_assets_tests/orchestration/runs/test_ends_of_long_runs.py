"""Conditions that end a run which looks for further work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
import pytest
from dagster._core.instance.config import ConcurrencyConfig
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs import long_runs as module
from pgcdc_assets.orchestration.runs.long_runs import LongRun, poll_seconds
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets_tests.orchestration.conftest import Orchestrated

pytestmark = pytest.mark.postgres


def following(continuing: Orchestrated, run: dg.DagsterRun, idle_seconds: float = 5.0) -> LongRun:
    names = Names.of(continuing.capture)
    return LongRun(continuing.instance, run.run_id, names.slot_pool, 60.0, idle_seconds, 0.1)


def started(continuing: Orchestrated, **tags: str) -> dg.DagsterRun:
    return continuing.instance.create_run_for_job(
        continuing.location.repository.get_job("t_capture"),
        status=dg.DagsterRunStatus.STARTED,
        tags=tags,
    )


def test_a_run_that_dagster_has_ended_lands_no_further_window(continuing: Orchestrated) -> None:
    """Dagster may start another run, and two runs must not open windows."""
    run = started(continuing)
    assert following(continuing, run).find(lambda: "more") == "more"
    continuing.instance.report_run_canceled(run)
    assert following(continuing, run).find(lambda: "more") is None


@pytest.mark.sampled
@pytest.mark.parametrize(("job", "ends"), [("t_capture", True), ("t_snapshot", False)])
def test_a_run_ends_if_another_run_is_queued_for_its_pool_and_cannot_start(
    continuing: Orchestrated, unbuffered: dg.DagsterInstance, job: str, ends: bool
) -> None:
    continuing.instance = unbuffered
    run = started(continuing)
    queue(continuing, job)
    assert following(continuing, run).find(lambda: "more") == (None if ends else "more")


def test_a_run_continues_after_its_time_for_a_limited_time(
    continuing: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = following(continuing, started(continuing))
    run.seconds = 0.001
    time.sleep(0.01)
    assert run.find(lambda: "more") == "more"
    monkeypatch.setattr(module, "HANDOVER_SECONDS", 0.0)
    assert run.find(lambda: "more") is None


def test_a_run_ends_at_its_time_if_dagster_would_start_no_successor(
    continuing: Orchestrated, unbuffered: dg.DagsterInstance
) -> None:
    continuing.instance = unbuffered
    run = following(continuing, started(continuing))
    run.seconds = 0.001
    time.sleep(0.01)
    assert run.find(lambda: "more") is None


ONE_RUN = {"max_concurrent_runs": 1}
TEN_RUNS = {"max_concurrent_runs": 10}
ANY_NUMBER = {"max_concurrent_runs": -1}
TEAM = {"tag_concurrency_limits": [{"key": "team", "value": "a", "limit": 1}]}
ANY_TEAM = {"tag_concurrency_limits": [{"key": "team", "limit": 1}]}
EACH_TEAM = {
    "tag_concurrency_limits": [
        {"key": "team", "value": {"applyLimitPerUniqueValue": True}, "limit": 1}
    ]
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("limits", "queued_team", "ends"),
    [
        pytest.param(ONE_RUN, "b", True, id="one-run"),
        pytest.param(TEN_RUNS, "a", False, id="ten-runs"),
        pytest.param(ANY_NUMBER, "a", False, id="any-number"),
        pytest.param(TEAM, "a", True, id="team"),
        pytest.param(TEAM, "b", False, id="team-b"),
        pytest.param(ANY_TEAM, "b", True, id="any-team"),
        pytest.param(EACH_TEAM, "a", True, id="each-team"),
        pytest.param(EACH_TEAM, "b", False, id="each-team-b"),
    ],
)
def test_a_run_ends_for_a_run_that_is_queued_for_long_because_of_a_limit(
    continuing: Orchestrated,
    limited: Callable[[Mapping[str, Any]], dg.DagsterInstance],
    monkeypatch: pytest.MonkeyPatch,
    limits: Mapping[str, Any],
    queued_team: str,
    ends: bool,
) -> None:
    """An instance with one run at a time would never merge during a capture.

    A run that waits for something else must not end captures, which would land a window each.
    """
    continuing.instance = limited(limits)
    run = started(continuing, team="a")
    queue(continuing, "t_merge", team=queued_team)
    assert following(continuing, run).find(lambda: "more") == "more"
    monkeypatch.setattr(module, "QUEUED_SECONDS", -60.0)
    assert following(continuing, run).find(lambda: "more") == (None if ends else "more")


def test_a_run_continues_if_the_queued_run_waits_for_another_run_too(
    continuing: Orchestrated,
    limited: Callable[[Mapping[str, Any]], dg.DagsterInstance],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    continuing.instance = limited(ANY_TEAM)
    run = started(continuing, team="a")
    started(continuing, team="b")
    queue(continuing, "t_merge", team="c")
    monkeypatch.setattr(module, "QUEUED_SECONDS", -60.0)
    assert following(continuing, run).find(lambda: "more") == "more"


def test_a_run_ends_for_a_queued_run_whose_limits_are_unknown(
    continuing: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that queues runs itself does not tell its limits."""
    pools = continuing.instance.event_log_storage.get_pool_config()
    unknown = ConcurrencyConfig(pool_config=pools, run_queue_config=None)
    monkeypatch.setattr(continuing.instance, "get_concurrency_config", lambda: unknown)
    run = started(continuing)
    monkeypatch.setattr(module, "QUEUED_SECONDS", -60.0)
    assert following(continuing, run).find(lambda: "more") == "more"
    queue(continuing, "t_merge")
    assert following(continuing, run).find(lambda: "more") is None


def queue(continuing: Orchestrated, job: str, **tags: str) -> None:
    """Leave a run in Dagster's queue."""
    location = RegisteredCodeLocationOrigin("tests")
    continuing.instance.create_run_for_job(
        continuing.location.repository.get_job(job),
        status=dg.DagsterRunStatus.QUEUED,
        tags=tags,
        remote_job_origin=RemoteJobOrigin(RemoteRepositoryOrigin(location, "tests"), job),
    )


@pytest.mark.sampled
def test_a_run_ends_if_a_step_waits_for_its_pool(continuing: Orchestrated) -> None:
    run, other = started(continuing), started(continuing)
    pool = Names.of(continuing.capture).slot_pool
    storage = continuing.instance.event_log_storage
    storage.initialize_concurrency_limit_to_default(pool)
    assert storage.claim_concurrency_slot(pool, run.run_id, "a step").is_claimed
    first = following(continuing, run)
    assert first.find(lambda: "more") == "more"
    assert not first.is_ending
    assert not storage.claim_concurrency_slot(pool, other.run_id, "a step").is_claimed
    assert first.find(lambda: "last" if first.is_ending else "more") == "last"
    assert first.find(lambda: "more") is None
    looks: list[bool] = []
    second = following(continuing, run)
    assert second.find(lambda: looks.append(second.is_ending)) is None
    assert looks == [True], "nothing waits, and the run ends"


def test_a_run_looks_for_work_several_times_per_window() -> None:
    ages = (0.0, 1.0, 3.0, 5.0, 60.0)
    found = [poll_seconds(WindowPolicy(max_age_seconds=age)) for age in ages]
    assert found == [0.1, 0.1, 0.3, 0.5, 0.5]


def test_an_idle_run_ends(continuing: Orchestrated) -> None:
    looks: list[float] = []
    began = time.monotonic()
    assert following(continuing, started(continuing), 0.5).find(lambda: looks.append(0)) is None
    assert 0.4 < time.monotonic() - began < 30
    assert len(looks) > 1


@pytest.mark.sampled
def test_a_stopped_run_looks_for_no_further_window(continuing: Orchestrated) -> None:
    run = following(continuing, started(continuing))
    assert run.find(lambda: run.stop()) is None
    assert run.find(lambda: "more") is None
