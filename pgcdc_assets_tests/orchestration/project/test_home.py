"""The dagster.yaml files of the package, and the limits of their pools."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from pgcdc_assets.errors import TransientError
from pgcdc_assets.orchestration.checks.raw import WINDOW_CHECKS
from pgcdc_assets.orchestration.project.home import CONFIG, open_instance, prepare_home
from pgcdc_assets.orchestration.runs.record_retention import delete_old_records
from pgcdc_assets_tests.orchestration.conftest import Orchestrated
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.full_disk import full_disk

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "packaged": CONFIG,
    "clone": ROOT / "dagster.yaml",
    "postgres": ROOT / "docs" / "guides" / "dagster-postgres.yaml",
}


def settings(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(FILES[name].read_text())
    return read


@pytest.mark.parametrize("name", FILES)
def test_pools_admit_one_run_and_are_released_after_a_killed_run(name: str) -> None:
    found = settings(name)
    pools = found["concurrency"]["pools"]
    assert (pools["default_limit"], pools["op_granularity_run_buffer"]) == (1, 1)
    assert found["run_monitoring"]["enabled"] is True
    assert found["run_monitoring"]["free_slots_after_run_end_seconds"] > 0
    assert found["run_coordinator"]["class"] == "QueuedRunCoordinator"


@pytest.mark.parametrize("name", FILES)
def test_sensors_do_not_wait_for_each_other(name: str) -> None:
    assert settings(name)["sensors"] == {"use_threads": True, "num_workers": 8}


def test_the_file_of_a_clone_differs_from_the_packaged_file_only_in_paths() -> None:
    clone = settings("clone")
    for section in ("storage", "local_artifact_storage", "compute_logs"):
        assert ".pgcdc/dagster" in str(clone.pop(section))
    assert clone == settings("packaged")


def test_without_dagster_home_the_instance_is_below_pgcdc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.setattr("pgcdc_assets.orchestration.project.home.project_root", lambda: tmp_path)
    with open_instance() as instance:
        instance.add_dynamic_partitions("shop_windows", ["k"])
        assert instance.global_op_concurrency_default_limit == 1
    with open_instance() as again:
        assert again.get_dynamic_partitions("shop_windows") == ["k"]
    assert (tmp_path / ".pgcdc" / "dagster" / "dagster.yaml").read_text() == CONFIG.read_text()


def test_a_full_disk_is_named_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command left a part of the file, and asked for another folder."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.setenv("PGCDC_STATE", str(tmp_path))
    with full_disk(), pytest.raises(TransientError, match=r"dagster cannot .*Free space"):
        prepare_home()
    assert list((tmp_path / "dagster").iterdir()) == []
    assert prepare_home().joinpath("dagster.yaml").read_text() == CONFIG.read_text()


@pytest.mark.sampled
@pytest.mark.postgres
def test_an_instance_with_postgres_storage_records_runs(
    orchestrated: Orchestrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The production example, on a real server, records a snapshot and two windows.

    The time zone of the server makes no difference to the records that are deleted.
    """
    records = Database(orchestrated.database.server, f"{orchestrated.database.name}_dagster")
    orchestrated.database.execute(f"create database {records.name}")
    orchestrated.database.execute(f"alter database {records.name} set timezone = 'Asia/Tokyo'")
    uri = f"postgresql+psycopg2://postgres@127.0.0.1:{records.server.port}/{records.name}"
    monkeypatch.setenv("PGCDC_DAGSTER_DSN", uri)
    home = tmp_path / "production"
    home.mkdir()
    (home / "dagster.yaml").write_text(FILES["postgres"].read_text())
    try:
        with dg.DagsterInstance.from_config(str(home)) as instance:
            orchestrated.instance = instance
            orchestrated.copy()
            orchestrated.land()
            orchestrated.database.execute("insert into b values (1, 1)")
            orchestrated.land()
            assert len(orchestrated.windows()) == 2
            assert all(run.is_success for run in instance.get_runs())
            assert records.value("select count(*) from dynamic_partitions") == 2
            oldest, _ = orchestrated.windows()
            instance.delete_dynamic_partition(orchestrated.capture.windows_name, oldest)
            later = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
            deleted = delete_old_records(
                instance, orchestrated.capture, orchestrated.raw, [], later
            )
            assert (deleted.runs, deleted.check_results) == (1, len(WINDOW_CHECKS))
    finally:
        orchestrated.database.execute(f"drop database {records.name} with (force)")
