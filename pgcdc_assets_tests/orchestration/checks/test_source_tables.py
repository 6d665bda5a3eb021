"""The check `source_table`: the changes of the source table are captured."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.errors import TransientError
from pgcdc_assets.orchestration.checks.raw import SOURCE_TABLE
from pgcdc_assets.orchestration.sensors import lag_observation
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.table_name import quoted
from pgcdc_assets_tests.orchestration.conftest import Orchestrated

pytestmark = pytest.mark.postgres

ODD = 'a "b" / c...%'
FOREVER = WindowPolicy(max_age_seconds=10_000, min_bytes=1 << 40)


def check_of(table: str, scd: int) -> dg.AssetCheckKey:
    return dg.AssetCheckKey(dg.AssetKey(["t", f"scd{scd}", "public", table]), SOURCE_TABLE)


def evaluations(orchestrated: Orchestrated, table: str, scd: int) -> list[dg.AssetCheckEvaluation]:
    """Return all evaluations of a table's check, newest first."""
    found = orchestrated.instance.event_log_storage.get_asset_check_execution_history(
        check_of(table, scd), limit=20
    )
    return [evaluation for record in found if (evaluation := record.evaluation) is not None]


@pytest.fixture
def both_kinds(orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch) -> Orchestrated:
    """Return the capture with a history of `a`, after its snapshots, checked in each tick."""
    monkeypatch.setattr(lag_observation, "EVERY_SECONDS", 0.0)
    tables = (CdcTable("public", "a", scd=(1, 2)), CdcTable("public", "b"))
    capture = replace(orchestrated.capture, tables=tables, windows=FOREVER)
    made = Orchestrated(orchestrated.database, orchestrated.lake, orchestrated.instance, capture)
    made.copy()
    return made


@pytest.mark.sampled
def test_the_check_shows_a_new_name_and_fails_if_another_table_has_the_old_name(
    both_kinds: Orchestrated,
) -> None:
    both_kinds.tick("lag")
    assert [e.passed for e in evaluations(both_kinds, "a", 1)] == [True]
    both_kinds.database.execute("alter table a rename to z")
    both_kinds.tick("lag")
    newest, *_ = evaluations(both_kinds, "a", 2)
    assert newest.passed
    assert newest.metadata["source_name"].value == "public.z"
    assert "is named public.z now" in (newest.description or "")
    raw = dg.AssetKey(["t", "raw"])
    observed = both_kinds.instance.fetch_observations(raw, limit=1).records[0].asset_observation
    assert observed is not None
    assert observed.metadata["renamed_tables"].value == "public.a is named public.z now"
    assert observed.metadata["moved_tables"].value == "none"
    findings = examine_capture(both_kinds.database.settings(), both_kinds.capture, both_kinds.zone)
    (ready,) = [finding for finding in findings if finding.table == "public.a"]
    assert ready.message == "Table public.a is ready, and is named public.z at the source."
    assert not [finding for finding in findings if finding.code == "undeclared"]
    both_kinds.database.execute("create table a (id int primary key)")
    both_kinds.tick("lag")
    for scd in (1, 2):
        newest, *_ = evaluations(both_kinds, "a", scd)
        assert (newest.passed, newest.severity) == (False, dg.AssetCheckSeverity.ERROR)
        assert "Table public.a is named public.z now" in (newest.description or "")
        assert "pgcdc resnapshot t public.a" in str(newest.metadata["reason"].value)
    assert [e.passed for e in evaluations(both_kinds, "b", 1)] == [True]
    both_kinds.database.execute("alter publication pub add table a")
    both_kinds.tick("lag")
    newest, *_ = evaluations(both_kinds, "a", 2)
    assert newest.passed
    assert "The next snapshot reads the other table" in (newest.description or "")
    both_kinds.database.execute("drop table a; alter table z rename to a")
    both_kinds.tick("lag")
    passed = [e.passed for e in evaluations(both_kinds, "a", 2)]
    assert passed == [True, True, False, True, True]


@pytest.mark.sampled
def test_ticks_record_a_check_only_when_its_result_changes(both_kinds: Orchestrated) -> None:
    both_kinds.database.execute("alter publication pub drop table a")
    for _ in range(3):
        both_kinds.tick("lag")
    assert [e.passed for e in evaluations(both_kinds, "a", 1)] == [False]
    assert [e.passed for e in evaluations(both_kinds, "b", 1)] == [True]
    both_kinds.database.execute("drop table a")
    both_kinds.tick("lag")
    newest, *_ = evaluations(both_kinds, "a", 1)
    assert len(evaluations(both_kinds, "a", 1)) == 2, "the reason has changed"
    assert "was dropped" in (newest.description or "")


@pytest.mark.sampled
def test_the_check_runs_on_demand_for_tables_of_any_name(orchestrated: Orchestrated) -> None:
    database = orchestrated.database
    name = quoted("public", ODD)
    database.execute(f"create table {name} (id int primary key)")
    database.execute(f"alter publication pub add table {name}")
    table = CdcTable("public", ODD)
    capture = replace(orchestrated.capture, tables=(*orchestrated.capture.tables, table))
    made = Orchestrated(database, orchestrated.lake, orchestrated.instance, capture)
    made.copy()
    layer = made.location.repository.asset_graph
    keys = sorted(key for key in layer.asset_check_keys if key.name == SOURCE_TABLE)
    assert len(keys) == 3

    def ask() -> dict[str, bool]:
        return {e.asset_key.path[-1]: e.passed for e in made.evaluate(*keys)}

    assert list(ask().values()) == [True, True, True]
    database.execute("create schema other")
    database.execute(f"alter table {name} set schema other")
    assert list(ask().values()) == [True, True, True]
    database.execute(f"drop table {quoted('other', ODD)}")
    assert sorted(ask().values()) == [False, True, True]
    assert ask()["a"]


def test_a_failed_query_of_the_catalog_changes_no_check(
    both_kinds: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_kinds.database.execute("alter publication pub drop table a")
    both_kinds.tick("lag")
    both_kinds.database.execute("alter publication pub add table a")

    def fail(*_: object) -> None:
        raise TransientError(reason="the server restarts")

    monkeypatch.setattr(lag_observation, "read_table_places", fail)
    both_kinds.tick("lag")
    assert [e.passed for e in evaluations(both_kinds, "a", 1)] == [False]
