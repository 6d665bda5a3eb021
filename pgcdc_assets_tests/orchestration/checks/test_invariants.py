"""Invariants as asset checks, after each merge and on demand. A violation fails no merge."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.checks import invariants as invariant_checks
from pgcdc_assets.orchestration.checks.invariants import (
    INVARIANTS,
    INVARIANTS_IN_FULL,
    MergeChecks,
)
from pgcdc_assets.orchestration.resources import LakeResource
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify import Findings, Rule
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update

NAME = "test"
IMAGE, HISTORY = (dg.AssetKey([NAME, kind, "shop", "items"]) for kind in ("scd1", "scd2"))


class Dagster:
    """A capture of one table of both kinds. The test itself lands the raw zone."""

    def __init__(self, zone: RawZone, instance: dg.DagsterInstance) -> None:
        self.zone = zone
        self.instance = instance
        self.capture = CdcCapture(NAME, "pub", (CdcTable("shop", "items", (1, 2)),))
        self.definitions = build_cdc_definitions(self.capture, lake=LakeResource(uri=zone.lake.uri))

    def merge(self, window: str) -> dg.ExecuteInProcessResult:
        self.instance.add_dynamic_partitions(self.capture.windows_name, [window])
        return self.definitions.resolve_job_def(f"{NAME}_merge").execute_in_process(
            instance=self.instance, partition_key=window, raise_on_error=False
        )

    def check(self, *checks: dg.AssetCheckKey) -> dg.ExecuteInProcessResult:
        job = dg.define_asset_job("alone", selection=dg.AssetSelection.checks(*checks))
        definitions = dg.Definitions.merge(self.definitions, dg.Definitions(jobs=[job]))
        return definitions.resolve_job_def("alone").execute_in_process(
            instance=self.instance, raise_on_error=False
        )


def found(result: dg.ExecuteInProcessResult) -> dict[tuple[dg.AssetKey, str], set[str]]:
    """Return the checks of a successful run, and the violated rules."""
    assert result.success
    rules = {rule.value for rule in Rule}
    return {
        (e.asset_key, e.check_name): {
            name for name, value in e.metadata.items() if name in rules and value.value
        }
        for e in result.get_asset_check_evaluations()
        if e.passed == (not any(e.metadata[n].value for n in rules & set(e.metadata)))
    }


@pytest.mark.sampled
@pytest.mark.spark
@pytest.mark.slow
def test_a_merge_checks_the_changed_rows_and_succeeds_despite_a_violation(
    spark: SparkSession, zone: RawZone, instance: dg.DagsterInstance
) -> None:
    dagster = Dagster(zone, instance)
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([("1", "a"), ("2", "a")])
    first = landing.land([update("1", "secret")])
    result = dagster.merge(first.key)
    assert found(result) == {(IMAGE, INVARIANTS): set(), (HISTORY, INVARIANTS): set()}
    (of_history,) = (e for e in result.get_asset_check_evaluations() if e.asset_key == HISTORY)
    assert of_history.metadata["rows_looked_at"].value == 3.0
    assert "not_judged" not in of_history.metadata

    table = DeltaTable(table_path(zone.lake, NAME, "shop", "items", 1))
    rows = pa.Table.from_pylist(
        [{"id": 2, "v": "secret", "_lsn": 4096, "_ordinal": 5}],
        schema=pa.schema(table.schema().to_arrow()),
    )
    write_deltalake(table, rows, mode="append")
    second = landing.land([insert("3", "b")])
    broken = {
        (IMAGE, INVARIANTS): {Rule.DUPLICATE_KEYS},
        (HISTORY, INVARIANTS): {Rule.ROW_COUNTS},
    }
    result = dagster.merge(second.key)
    assert found(result) == broken
    for evaluation in result.get_asset_check_evaluations():
        assert evaluation.severity == dg.AssetCheckSeverity.ERROR
        assert "secret" not in str(evaluation.metadata)
        description = str(evaluation.description)
        assert f"pgcdc rebuild {NAME} shop.items; then" in description
        assert description.endswith(f"pgcdc verify --name {NAME} shop.items")
    assert found(dagster.merge(second.key)) == {}, "a merge without changes has no result"

    in_full = [dg.AssetCheckKey(key, INVARIANTS_IN_FULL) for key in (IMAGE, HISTORY)]
    assert found(dagster.check(*in_full)) == {
        (key, INVARIANTS_IN_FULL): rules for (key, _), rules in broken.items()
    }
    alone = dagster.check(dg.AssetCheckKey(IMAGE, INVARIANTS))
    assert found(alone) == {(IMAGE, INVARIANTS): {Rule.DUPLICATE_KEYS}}


def test_the_merge_job_has_the_cheap_checks_and_the_check_job_the_others() -> None:
    definitions = build_cdc_definitions(
        CdcCapture(NAME, "pub", (CdcTable("shop", "items", (1, 2)),))
    )

    def names(job: str) -> set[tuple[str, str]]:
        graph = definitions.resolve_job_def(f"{NAME}_{job}").asset_layer.asset_graph
        return {(key.asset_key.path[1], key.name) for key in graph.asset_check_keys}

    assert names("merge") == {("scd1", INVARIANTS), ("scd2", INVARIANTS)}
    assert names("checks") == {
        ("raw", "slot_health"),
        ("snapshot", "replica_identity"),
        ("scd1", INVARIANTS_IN_FULL),
        ("scd1", "equals_source"),
        ("scd2", INVARIANTS_IN_FULL),
        ("scd1", "schema_changes"),
        ("scd2", "schema_changes"),
        ("scd1", "source_table"),
        ("scd2", "source_table"),
    }


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Record the calls of the checks without Spark."""
    made: list[tuple[int, Any]] = []

    def check(session: Any, zone: Any, table: CdcTable, scd: int, since: Any) -> Findings:
        made.append((scd, since))
        return Findings(table.schema, table.table, scd)

    monkeypatch.setattr(invariant_checks, "check_merged", check)
    return made


def checks(zone: RawZone, merging: tuple[int, ...] = (1, 2)) -> MergeChecks:
    return MergeChecks(
        zone,
        open_session=lambda: None,  # type: ignore[arg-type,return-value]
        targets={TableName("shop", "items"): CdcTable("shop", "items", (1, 2))},
        merging={("shop", "items", scd) for scd in merging},
        wanted={
            ("shop", "items", 1): dg.AssetCheckKey(IMAGE, INVARIANTS),
            ("shop", "items", 2): dg.AssetCheckKey(HISTORY, INVARIANTS),
        },
    )


def report(scd: int, before: int | None, changes: int = 1, **more: Any) -> MergeReport:
    mark = None if before is None else Lsn(before)
    return MergeReport("shop", "items", scd, "path", mark, Lsn(0x90), changes_read=changes, **more)


def test_the_check_of_a_history_waits_for_the_merge_of_its_image(
    zone: RawZone, calls: list[tuple[int, Any]]
) -> None:
    both = checks(zone)
    assert not list(both.after(report(2, 0x50), 1))
    assert len(list(both.after(report(1, 0x30), 1))) == 2
    assert calls == [(1, (1, 0x30)), (2, (1, 0x30))]
    assert not list(both.rest())


def test_a_history_whose_image_failed_is_checked_at_the_end(
    zone: RawZone, calls: list[tuple[int, Any]]
) -> None:
    both = checks(zone)
    assert not list(both.after(report(2, 0x50), 1))
    assert len(list(both.rest())) == 1
    assert calls == [(2, (1, 0x50))]


def test_an_unchanged_table_is_checked_only_if_its_other_kind_changed(
    zone: RawZone, calls: list[tuple[int, Any]]
) -> None:
    idle = checks(zone)
    for scd in (1, 2):
        assert not list(idle.after(report(scd, 0x50, changes=0), 1))
    late = checks(zone)
    assert not list(late.after(report(2, 0x50, changes=0), 1))
    assert len(list(late.after(report(1, 0x30), 1))) == 2
    assert calls == [(1, (1, 0x30)), (2, (1, 0x30))]


@pytest.mark.parametrize(
    "touched", [report(1, None), report(1, 0x50, changes=0, snapshot_lsn=Lsn(0x60))]
)
def test_after_a_snapshot_the_whole_table_is_checked(
    zone: RawZone, calls: list[tuple[int, Any]], touched: MergeReport
) -> None:
    assert len(list(checks(zone, (1,)).after(touched, 1))) == 1
    assert calls == [(1, None)]


def test_a_check_that_cannot_be_evaluated_is_a_warning(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Findings:
        raise TransientError(reason="no Spark")

    monkeypatch.setattr(invariant_checks, "check_merged", fail)
    (result,) = checks(zone).after(report(1, 0x50), 1)
    assert (result.passed, result.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert result.metadata["reason"].value == "not checked: no Spark"
