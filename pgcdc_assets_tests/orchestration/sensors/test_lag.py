"""The lag sensor on a real server: its requests, skip reasons and errors."""

from __future__ import annotations

import time
from dataclasses import replace

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgcdc_assets.errors import RawZoneError, SlotAdvanced, SlotLost, SlotMissing
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.orchestration.checks.raw import SLOT_HEALTH
from pgcdc_assets.orchestration.partitions import build_range_tags
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.tables.state import advance_watermark, table_path
from pgcdc_assets_tests.orchestration.conftest import Orchestrated
from pgcdc_assets_tests.support.preflight import findings_of, problems_in

pytestmark = pytest.mark.postgres

RANGE = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")


def test_the_first_tick_requests_the_snapshots_of_all_tables_in_one_run(
    orchestrated: Orchestrated,
) -> None:
    data = orchestrated.tick("lag")
    (request,) = data.run_requests
    assert request.job_name == "t_snapshot"
    assert [request.tags[tag] for tag in RANGE] == ["public.a", "public.b"]
    assert orchestrated.windows() == []


def test_after_the_snapshots_a_window_is_opened_at_the_slot_s_consistent_point(
    orchestrated: Orchestrated,
) -> None:
    orchestrated.copy()
    (request,) = orchestrated.tick("lag").run_requests
    assert request.job_name == "t_capture"
    window = LsnWindow.parse(request.partition_key or "")
    epoch = orchestrated.zone.epochs.latest()
    assert epoch is not None
    assert window.start == epoch.start_lsn
    assert orchestrated.windows() == [window.key]


@pytest.mark.sampled
def test_windows_follow_each_other_without_a_gap(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    for number in range(3):
        orchestrated.database.execute(f"insert into b values ({number}, 1)")
        orchestrated.land()
    windows = [LsnWindow.parse(key) for key in orchestrated.windows()]
    assert len(windows) == 3
    assert windows == sorted(windows)
    assert [w.end for w in windows[:-1]] == [w.start for w in windows[1:]]


@pytest.mark.sampled
def test_a_tick_while_a_capture_is_queued_opens_nothing(orchestrated: Orchestrated) -> None:
    """H10: a run that was launched in the UI counts too."""
    orchestrated.copy()
    (request,) = orchestrated.tick("lag").run_requests
    orchestrated.instance.create_run_for_job(
        orchestrated.location.repository.get_job("t_capture"), tags=dict(request.tags)
    )
    again = orchestrated.tick("lag")
    assert again.run_requests == []
    assert "is running" in (again.skip_message or "")
    assert len(orchestrated.windows()) == 1


def test_a_failed_window_is_retried_with_another_run_key(
    orchestrated: Orchestrated,
) -> None:
    """H10: Dagster skips a used run key without a time limit, even after a failed run."""
    orchestrated.copy()
    (first,) = orchestrated.tick("lag").run_requests
    run = orchestrated.instance.create_run_for_job(
        orchestrated.location.repository.get_job("t_capture"), tags=dict(first.tags)
    )
    orchestrated.instance.report_run_failed(run)
    (second,) = orchestrated.tick("lag").run_requests
    assert second.partition_key == first.partition_key or second.tags == first.tags
    assert second.run_key != first.run_key
    assert len(orchestrated.windows()) == 1


def test_lag_is_observed_with_lsns_as_text_and_bytes_as_numbers(
    orchestrated: Orchestrated,
) -> None:
    orchestrated.copy()
    orchestrated.commit("insert into b select n, 1 from generate_series(1, 100) n")
    orchestrated.tick("lag")
    (record,) = orchestrated.instance.fetch_observations(orchestrated.raw, limit=5).records
    observation = record.asset_observation
    assert observation is not None
    metadata = {key: entry.value for key, entry in observation.metadata.items()}
    lag_bytes = metadata["lag_bytes"]
    assert isinstance(lag_bytes, float)
    assert lag_bytes > 0
    assert metadata["wal_status"] == "reserved"
    epoch = orchestrated.zone.epochs.latest()
    assert epoch is not None
    assert metadata["captured_through"] == str(epoch.start_lsn)


def test_observations_are_recorded_at_an_interval(
    orchestrated: Orchestrated,
) -> None:
    orchestrated.copy()
    for _ in range(3):
        orchestrated.tick("lag")
    assert len(orchestrated.instance.fetch_observations(orchestrated.raw, limit=5).records) == 1


def test_a_clock_that_is_set_back_stops_neither_windows_nor_retries_nor_observations(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of the time before would be in the future for an hour."""
    policy = WindowPolicy(max_age_seconds=600, retry_seconds=300)
    patient = replace(orchestrated, capture=replace(orchestrated.capture, windows=policy))
    patient.copy()
    patient.land()
    patient.tick("lag")
    patient.commit("insert into b values (1, 1)")
    assert not patient.tick("lag").run_requests, "the last window is young"
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() - 3600)
        (request,) = patient.tick("lag").run_requests
    observations = patient.instance.fetch_observations(patient.raw, limit=5).records
    assert len(observations) == 2
    observation = observations[0].asset_observation
    assert observation is not None and observation.metadata["lag_seconds"].value == 0

    patient.instance.report_run_failed(patient.create_run("capture", request.tags))
    assert not patient.tick("lag").run_requests, "the window failed just now"
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    (again,) = patient.tick("lag").run_requests
    assert again.partition_key == request.partition_key


def test_a_dropped_slot_fails_the_tick(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    orchestrated.database.drop_slots()
    for _ in range(2):
        with pytest.raises(Exception) as caught:
            orchestrated.tick("lag")
    assert isinstance(root_cause(caught.value), SlotMissing)
    evaluation = slot_health(orchestrated)
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert evaluation.metadata["wal_status"].value == "missing"
    assert "pgcdc renew" in (evaluation.description or "")


def test_a_slot_that_another_program_advanced_fails_the_tick(orchestrated: Orchestrated) -> None:
    """A9: the error names the gap before a later window is captured."""
    orchestrated.copy()
    orchestrated.commit("insert into b values (1, 1)")
    orchestrated.database.query(
        "select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())",
        [orchestrated.capture.slot],
    )
    with pytest.raises(Exception) as caught:
        orchestrated.tick("lag")
    error = root_cause(caught.value)
    assert isinstance(error, SlotAdvanced)
    assert error.gap_bytes > 0
    check_recorded(orchestrated, "another program confirmed")


def check_recorded(orchestrated: Orchestrated, words: str) -> None:
    """Check that the failed tick, and the check on demand, record an error with the words."""
    recorded = slot_health(orchestrated)
    (asked,) = orchestrated.evaluate(dg.AssetCheckKey(orchestrated.raw, SLOT_HEALTH))
    for evaluation in (recorded, asked):
        assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.ERROR)
        assert words in (evaluation.description or "")


@pytest.mark.sampled
def test_a_window_that_can_never_be_landed_does_not_stop_the_capture(
    orchestrated: Orchestrated,
) -> None:
    """B5: the daemon and `pgcdc sync` opened a window each at the same time."""
    orchestrated.copy()
    orchestrated.land()
    landed = LsnWindow.parse(orchestrated.windows()[-1])
    left = LsnWindow.of(landed.epoch, landed.start, landed.end + 8)
    name = orchestrated.capture.windows_name
    orchestrated.instance.add_dynamic_partitions(name, [left.key])
    orchestrated.commit("insert into b values (1, 1)")
    assert left.key in str(orchestrated.tick("lag").skip_message)
    assert orchestrated.windows() == [landed.key]
    (request,) = orchestrated.tick("lag").run_requests
    assert orchestrated.execute(request, "capture").success


def test_a_server_whose_wal_ends_below_the_captured_range_fails_the_tick(
    orchestrated: Orchestrated,
) -> None:
    """A window that was never captured is as of a restored server; no timeline is compared.

    `capture/test_failover.py` promotes a standby that lacks WAL.
    """
    orchestrated.copy()
    (epoch,) = orchestrated.zone.epochs.all()
    lost = LsnWindow.of(1, epoch.start_lsn, epoch.start_lsn + (1 << 30))
    orchestrated.zone.changes.land(lost, [])
    with pytest.raises(Exception) as caught:
        orchestrated.tick("lag")
    error = root_cause(caught.value)
    assert isinstance(error, RawZoneError)
    assert "the server's WAL ends at" in str(error)
    assert "pgcdc renew" in str(error)
    check_recorded(orchestrated, "the server's WAL ends at")


@pytest.mark.sampled
def test_a_new_instance_gets_the_windows_of_an_existing_lake(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    orchestrated.land()
    known = orchestrated.windows()
    for key in known:
        orchestrated.instance.delete_dynamic_partition(orchestrated.capture.windows_name, key)
    orchestrated.tick("lag")
    assert orchestrated.windows()[:1] == known


@pytest.mark.sampled
def test_keys_above_the_number_to_keep_are_pruned_only_when_merged_and_unused(
    orchestrated: Orchestrated,
) -> None:
    """Dagster fails a merge that reports a partition without a key."""
    few = replace(orchestrated.capture, windows=WindowPolicy(max_age_seconds=0, keep=1))
    pruning = Orchestrated(orchestrated.database, orchestrated.lake, orchestrated.instance, few)
    pruning.copy()
    for number in range(3):
        pruning.database.execute(f"insert into b values ({number}, 1)")
        pruning.land()
    pruning.tick("lag")
    landed = pruning.windows()
    assert len(landed) >= 3
    for table in ("a", "b"):
        merged_through(pruning, table, LsnWindow.parse(landed[1]).end)
    merge = pruning.start_run("merge", build_range_tags(landed[1], landed[2]))
    pruning.tick("lag")
    assert set(landed) - set(pruning.windows()) == set(landed[:1])
    pruning.instance.report_run_failed(merge)
    pruning.tick("lag")
    assert set(landed) - set(pruning.windows()) == set(landed[:2])


def merged_through(orchestrated: Orchestrated, table: str, lsn: Lsn) -> None:
    """Record a table's watermark as a merge does, without Spark and without rows."""
    zone = orchestrated.zone
    path = table_path(zone.lake, zone.name, "public", table, 1)
    write_deltalake(path, pa.table({"id": pa.array([], pa.int32())}))
    advance_watermark(zone, path, None, Position(1, lsn))


def test_the_tick_the_check_and_the_preflight_warn_about_an_unreserved_slot(
    orchestrated: Orchestrated, capfd: pytest.CaptureFixture[str]
) -> None:
    """B12."""
    orchestrated.copy()
    with orchestrated.database.unreserved_slots():
        orchestrated.tick("lag")
        found = findings_of(orchestrated.database.settings(), slot=orchestrated.capture.slot)
    assert f"{orchestrated.capture.slot} is unreserved" in capfd.readouterr().err
    evaluation = slot_health(orchestrated)
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert evaluation.metadata["wal_status"].value == "unreserved"
    assert "raise max_slot_wal_keep_size" in (evaluation.description or "")
    assert "warning: " in problems_in(found)["slot", None]
    assert "is unreserved" in problems_in(found)["slot", None]


def test_a_lost_slot_fails_the_tick(orchestrated: Orchestrated) -> None:
    """B11."""
    orchestrated.copy()
    with orchestrated.database.unreserved_slots():
        orchestrated.database.execute("checkpoint")
        with pytest.raises(Exception) as caught:
            orchestrated.tick("lag")
    assert isinstance(root_cause(caught.value), SlotLost)
    evaluation = slot_health(orchestrated)
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert evaluation.metadata["wal_status"].value == "lost"
    assert "pgcdc renew" in (evaluation.description or "")


def test_the_slot_s_health_is_checked_by_the_tick_and_on_demand(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    orchestrated.tick("lag")
    evaluation = slot_health(orchestrated)
    assert evaluation.passed
    assert evaluation.metadata["wal_status"].value == "reserved"

    key = dg.AssetCheckKey(orchestrated.raw, SLOT_HEALTH)
    (there,) = orchestrated.evaluate(key)
    assert there.passed
    orchestrated.database.drop_slots()
    (gone,) = orchestrated.evaluate(key)
    assert (gone.passed, gone.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert gone.metadata["wal_status"].value == "missing"
    assert "pgcdc renew" in (gone.description or "")


def slot_health(orchestrated: Orchestrated) -> dg.AssetCheckEvaluation:
    """Return the newest evaluation of the check."""
    key = dg.AssetCheckKey(orchestrated.raw, SLOT_HEALTH)
    record = orchestrated.instance.event_log_storage.get_latest_asset_check_execution_by_key([key])
    event = record[key].event
    assert event is not None
    assert event.dagster_event is not None
    return event.dagster_event.asset_check_evaluation_data


def test_an_idle_database_gets_its_first_window(orchestrated: Orchestrated) -> None:
    orchestrated.copy()
    epoch = orchestrated.zone.epochs.latest()
    assert epoch is not None
    orchestrated.land()
    assert (orchestrated.zone.changes.captured_through(1) or Lsn(0)) > epoch.start_lsn


def root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def test_a_snapshot_records_the_columns_and_rows_of_the_source_table(
    orchestrated: Orchestrated,
) -> None:
    orchestrated.copy()
    source = dg.AssetKey(["t", "source", "public", "b"])
    (record,) = orchestrated.instance.fetch_observations(source, limit=5).records
    observation = record.asset_observation
    assert observation is not None
    schema = observation.metadata["dagster/column_schema"].value
    assert isinstance(schema, dg.TableSchema)
    assert [(c.name, c.type) for c in schema.columns] == [("id", "integer"), ("n", "numeric")]
    assert observation.metadata["dagster/row_count"].value == 0
