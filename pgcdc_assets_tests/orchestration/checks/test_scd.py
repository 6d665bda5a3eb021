"""The checks of whole tables while one check fails, without Spark and Postgres."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from pgcdc_assets.errors import (
    ConfigurationError,
    MergeConflict,
    TransientError,
    rebuild_command,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.checks import scd as table_checks
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS_IN_FULL
from pgcdc_assets.orchestration.checks.scd import EQUALS_SOURCE
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.spark import session
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify import Comparison, ComparisonFailure, Findings, Moment
from pgcdc_assets_tests.support.verify.empty_images import create_image

NAME = "test"
TABLES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def merged_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the checks: all tables are merged, sound and equal, and the moment is captured."""

    @contextlib.contextmanager
    def source_moment(*_: Any) -> Iterator[Moment]:
        yield Moment(1, Lsn(0x50), "snapshot")

    def check_all(_: Any, zone: RawZone, table: CdcTable, scd: int) -> Findings:
        return Findings(table.schema, table.table, scd)

    own = contextlib.nullcontext((None,))
    monkeypatch.setattr(SparkResource, "session", lambda self, lake: None)
    monkeypatch.setattr(session, "own_sessions", lambda *_: own)
    monkeypatch.setattr(table_checks, "read_scd_state", lambda *_: "merged")
    monkeypatch.setattr(table_checks, "source_moment", source_moment)
    monkeypatch.setattr(table_checks, "wait_captured", lambda *_: None)
    monkeypatch.setattr(table_checks, "check_all", check_all)
    monkeypatch.setattr(table_checks, "compare_tables", compare_equal)


def compare_equal(*arguments: Any, **_: Any) -> Iterator[Comparison]:
    targets: Sequence[CdcTable] = arguments[4]
    return (Comparison(t.schema, t.table, 1, 1, lsn=Lsn(0x50)) for t in targets)


def check_all_tables(
    zone: RawZone, instance: dg.DagsterInstance, without_key: str = "bag"
) -> dg.ExecuteInProcessResult:
    tables = (CdcTable("public", table, without_key=without_key) for table in TABLES)
    capture = CdcCapture(NAME, "pub", tuple(tables))
    definitions = build_cdc_definitions(
        capture,
        postgres=PostgresResource(capture=NAME, conninfo="postgresql://127.0.0.1:1/nowhere"),
        lake=LakeResource(uri=zone.lake.uri),
    )
    checks = [
        dg.AssetCheckKey(dg.AssetKey([NAME, "scd1", "public", table]), name)
        for table in TABLES
        for name in (EQUALS_SOURCE, INVARIANTS_IN_FULL)
    ]
    job = dg.define_asset_job("alone", selection=dg.AssetSelection.checks(*checks))
    merged = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job]))
    return merged.resolve_job_def("alone").execute_in_process(
        instance=instance, raise_on_error=False
    )


def passed(result: dg.ExecuteInProcessResult) -> set[tuple[str, str]]:
    return {
        (evaluation.asset_key.path[-1], evaluation.check_name)
        for evaluation in result.get_asset_check_evaluations()
        if evaluation.passed
    }


def test_a_failed_comparison_does_not_prevent_other_comparisons(
    zone: RawZone, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = MergeConflict(table="public.x", reason="It differs. Build it", command=rebuild_command)

    def compare(*arguments: Any, **_: Any) -> Iterator[Comparison | ComparisonFailure]:
        for found in compare_equal(*arguments):
            yield ComparisonFailure("public", "a", error) if found.table == "a" else found

    monkeypatch.setattr(table_checks, "compare_tables", compare)
    result = check_all_tables(zone, instance)
    both = (EQUALS_SOURCE, INVARIANTS_IN_FULL)
    assert passed(result) == {("a", INVARIANTS_IN_FULL)} | {(t, c) for t in "bc" for c in both}
    assert not result.success
    (failure,) = result.filter_events(lambda event: event.is_step_failure)
    data = failure.step_failure_data.user_failure_data
    assert data is not None
    assert data.description == (
        "Not checked: public.a (equals_source). Table public.x cannot be merged: It differs. Build "
        f"it: pgcdc rebuild {zone.name} public.a"
    )


def test_a_difference_is_described_by_what_to_type(
    zone: RawZone, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*arguments: Any, **_: Any) -> Iterator[Comparison]:
        for found in compare_equal(*arguments):
            yield replace(found, missing=1) if found.table == "a" else found

    monkeypatch.setattr(table_checks, "compare_tables", compare)
    result = check_all_tables(zone, instance)
    assert result.success
    (failed,) = (each for each in result.get_asset_check_evaluations() if not each.passed)
    assert failed.asset_key.path[-1] == "a"
    for command in ("verify --name test", "rebuild test", "resnapshot test"):
        assert f"pgcdc {command} public.a" in str(failed.description)


def test_comparisons_wait_once_for_the_capture_and_invariants_are_checked(
    zone: RawZone, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []

    def wait(*_: Any) -> None:
        waits.append(1)
        raise TransientError(reason="The moment is not captured.")

    monkeypatch.setattr(table_checks, "wait_captured", wait)
    result = check_all_tables(zone, instance)
    assert result.success
    assert passed(result) == {(table, INVARIANTS_IN_FULL) for table in TABLES}
    judged = {
        evaluation.metadata["is_judged"].value
        for evaluation in result.get_asset_check_evaluations()
        if evaluation.check_name == EQUALS_SOURCE
    }
    assert judged == {False}
    assert len(waits) == 1


def test_results_of_a_comparison_that_ends_early_are_kept(
    zone: RawZone, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def compare(*arguments: Any, **_: Any) -> Iterator[Comparison]:
        calls.append([target.table for target in arguments[4]])
        yield next(compare_equal(*arguments))
        raise ConfigurationError(reason="Spark is not available.")

    monkeypatch.setattr(table_checks, "compare_tables", compare)
    result = check_all_tables(zone, instance)
    assert calls == [list(TABLES)]
    assert ("a", EQUALS_SOURCE) in passed(result)
    assert {name for name, check in passed(result) if check == INVARIANTS_IN_FULL} == set(TABLES)
    (failure,) = result.filter_events(lambda event: event.is_step_failure)
    data = failure.step_failure_data.user_failure_data
    assert data is not None
    assert "public.b (equals_source), public.c (equals_source)" in (data.description or "")


def test_a_log_of_changes_is_not_compared_and_a_table_with_a_key_is(
    zone: RawZone, instance: dg.DagsterInstance
) -> None:
    for table, key in (("a", ()), ("b", ("id",)), ("c", ("id",))):
        create_image(zone, TableName("public", table), key)
    result = check_all_tables(zone, instance, "log")
    assert result.success
    assert passed(result) == {(t, c) for t in TABLES for c in (EQUALS_SOURCE, INVARIANTS_IN_FULL)}
    compared = {
        evaluation.asset_key.path[-1]
        for evaluation in result.get_asset_check_evaluations()
        if "source_row_count" in evaluation.metadata
    }
    assert compared == {"b", "c"}
