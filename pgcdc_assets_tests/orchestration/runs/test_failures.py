"""Errors of steps and sensors in Dagster's records: sentences, classes, stacks, but no values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import dagster as dg
import pytest
from dagster import serialize_value
from dagster._utils.error import serializable_error_info_from_exc_info
from pyspark.errors import NumberFormatException
from pyspark.sql import SparkSession

from pgcdc_assets.errors import DefiniteError, MergeConflict, TransientError
from pgcdc_assets.orchestration.checks import scd as table_checks
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS_IN_FULL
from pgcdc_assets.orchestration.checks.raw import SLOT_HEALTH
from pgcdc_assets.orchestration.resources import LakeResource
from pgcdc_assets.orchestration.runs import failures
from pgcdc_assets.orchestration.runs.errors import error_of_run
from pgcdc_assets.orchestration.runs.failures import LibraryError, dagster_failures, raise_failed
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import MessagePolicy
from pgcdc_assets.spark.session import runs_embedded
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

VALUE = "sesame"
CONDITION = "CAST_INVALID_INPUT"


def cast_of_spark() -> None:
    """Raise Spark's error about a text that is no number."""
    text = f"The value '{VALUE}' cannot be cast"
    raise NumberFormatException(
        text, errorClass=CONDITION, messageParameters=dict.fromkeys(["expression"], VALUE)
    )


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "SECONDS_BETWEEN", 0.0)


def recorded(instance: dg.DagsterInstance, run_id: str) -> str:
    """Return all events and log lines of a run as stored."""
    return "\n".join(serialize_value(entry) for entry in instance.all_logs(run_id))


def check_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Check the standard output and error, which Dagster shows as the logs of a run."""
    written = "".join(capfd.readouterr())
    assert "QueryContextLogger" not in written
    # The JVM of an embedded session writes the errors of its tasks.
    assert VALUE not in written or runs_embedded()


def run_step(body: Callable[[], None]) -> tuple[dg.ExecuteInProcessResult, str]:
    """Run a step, and return its result and its events."""

    @dg.op(out=dg.Out(dg.Nothing))
    def step() -> None:
        body()

    @dg.job
    def job() -> None:
        step()

    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance, raise_on_error=False)
        return result, recorded(instance, result.run_id)


@pytest.mark.parametrize("kind", [TransientError, DefiniteError])
@pytest.mark.parametrize("is_cause", [True, False])
def test_the_error_of_a_library_is_recorded_without_its_text(
    kind: type[TransientError], is_cause: bool
) -> None:
    def fail() -> None:
        with dagster_failures(NAME):
            try:
                cast_of_spark()
            except NumberFormatException as error:
                if is_cause:
                    raise kind(reason="Not done.") from error
                raise kind(reason="Not done.")  # noqa: B904

    result, events = run_step(fail)
    error = error_of_run(result)
    assert (str(error), error.exit_status) == ("Not done.", kind.exit_status)
    assert VALUE not in events
    assert f"NumberFormatException ({CONDITION})" in events
    assert "in cast_of_spark" in events, "the stack remains"


@pytest.mark.parametrize("is_lasting", [True, False])
def test_the_errors_of_several_tables_are_recorded_without_texts_of_libraries(
    is_lasting: bool,
) -> None:
    def fail() -> None:
        inner: Exception = TransientError(reason="Not merged.")
        if is_lasting:
            inner = MergeConflict(table="public.t", reason="its rows differ.")
        try:
            cast_of_spark()
        except NumberFormatException as error:
            inner.__cause__ = error
        with dagster_failures(NAME):
            raise_failed("Not merged", [("public.t", inner)], NAME)

    result, events = run_step(fail)
    assert (
        error_of_run(result).exit_status
        == (MergeConflict if is_lasting else TransientError).exit_status
    )
    assert VALUE not in events
    assert CONDITION in events


def test_an_unexpected_error_is_recorded_by_its_class_and_its_stack() -> None:
    def fail_in_spark() -> None:
        with dagster_failures(NAME):
            cast_of_spark()

    def fail_by_a_defect() -> None:
        with dagster_failures(NAME):
            try:
                int(VALUE)
            except ValueError as error:
                raise KeyError(VALUE) from error

    def fail_without_space() -> None:
        with dagster_failures(NAME):
            raise OSError(28, "No space left on device", VALUE)

    result, events = run_step(fail_in_spark)
    assert VALUE not in events
    assert f"NumberFormatException ({CONDITION})" in events
    assert "in cast_of_spark" in events
    assert f"NumberFormatException ({CONDITION})" in str(error_of_run(result))
    _, events = run_step(fail_by_a_defect)
    assert f"'{VALUE}'" not in events
    assert "KeyError. Its text" in events
    assert "ValueError. Its text" in events
    _, events = run_step(fail_without_space)
    assert "No space left on device" in events


@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.sampled
def test_runs_on_a_table_that_was_changed_by_hand_record_no_values(
    orchestrated: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Spark quotes the text of `_deleted`, which is the condition of deleted rows in a check."""
    both = replace(orchestrated.capture, tables=(CdcTable("public", "a", scd=(1, 2)),))
    orchestrated = replace(orchestrated, capture=both)
    orchestrated.sync()
    table = delta_table(table_path(orchestrated.lake, NAME, "public", "a", 1))
    spark.sql(f"ALTER TABLE {table} ADD COLUMNS (_deleted STRING)")
    spark.sql(f"UPDATE {table} SET _deleted = '{VALUE}'")
    # All changes are captured, but the LSN of the source is always higher.
    monkeypatch.setattr(table_checks, "wait_captured", lambda *_: None)
    monkeypatch.setattr(failures, "MAX_RETRIES", 0)
    capfd.readouterr()
    for scd, check, sentence in [
        (1, table_checks.EQUALS_SOURCE, "Table public.a was not compared"),
        (2, INVARIANTS_IN_FULL, "The invariants of table public.a were not checked"),
    ]:
        asset = dg.AssetKey([NAME, f"scd{scd}", "public", "a"])
        job = orchestrated.location.repository.get_job(f"{NAME}_checks")
        checked = job.get_subset(
            asset_check_selection={dg.AssetCheckKey(asset, check)}
        ).execute_in_process(instance=orchestrated.instance, raise_on_error=False)
        assert sentence in str(error_of_run(checked))
        events = recorded(orchestrated.instance, checked.run_id)
        assert CONDITION in events
        assert ("LibraryError" in events) == (check == INVARIANTS_IN_FULL)
        assert VALUE not in events
        check_output(capfd)


@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.sampled
def test_a_merge_that_violates_a_constraint_of_the_owner_records_no_values(
    orchestrated: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    merge_by_spark(monkeypatch)
    orchestrated.sync()
    table = delta_table(table_path(orchestrated.lake, NAME, "public", "a", 1))
    spark.sql(f"ALTER TABLE {table} ADD CONSTRAINT short CHECK (v NOT LIKE 'ses%')")
    orchestrated.commit(f"update a set v = '{VALUE}' where id = 1")
    orchestrated.land()
    (request,) = orchestrated.tick("merges", one_shot=True).run_requests
    capfd.readouterr()
    merged = orchestrated.execute(request, "merge")
    assert "public.a" in str(error_of_run(merged))
    events = recorded(orchestrated.instance, merged.run_id)
    assert "LibraryError" in events
    assert VALUE not in events
    check_output(capfd)


def fail_with_cause(*arguments: object) -> None:
    """Raise an error of this package that Spark's error has caused."""
    try:
        cast_of_spark()
    except NumberFormatException as error:
        raise DefiniteError(reason="Not read.") from error


@pytest.mark.postgres
@pytest.mark.parametrize("sensor", ["lag", "merges", "messages"])
@pytest.mark.parametrize("is_cause", [True, False])
def test_the_tick_of_a_sensor_records_no_text_of_a_library(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch, sensor: str, is_cause: bool
) -> None:
    capture = replace(orchestrated.capture, messages=MessagePolicy())
    orchestrated = replace(orchestrated, capture=capture)
    fail = fail_with_cause if is_cause else lambda *_: cast_of_spark()
    monkeypatch.setattr(LakeResource, "zone", fail)
    with pytest.raises(DefiniteError if is_cause else LibraryError) as caught:
        orchestrated.tick(sensor)
    # The daemon records this text with the tick.
    shown = serializable_error_info_from_exc_info(
        (caught.type, caught.value, caught.tb)
    ).to_string()
    assert VALUE not in shown
    assert f"NumberFormatException ({CONDITION})" in shown
    assert "in cast_of_spark" in shown
    assert ("Not read." in shown) == is_cause


@pytest.mark.postgres
def test_the_checks_of_the_source_record_no_text_of_a_library(
    orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LakeResource, "zone", fail_with_cause)
    slot = dg.AssetCheckKey(orchestrated.raw, SLOT_HEALTH)
    job = orchestrated.location.repository.get_job(f"{NAME}_checks")
    checked = job.get_subset(asset_check_selection={slot}).execute_in_process(
        instance=orchestrated.instance, raise_on_error=False
    )
    error = error_of_run(checked)
    assert (str(error), error.exit_status) == ("Not read.", DefiniteError.exit_status)
    events = recorded(orchestrated.instance, checked.run_id)
    assert VALUE not in events
    assert CONDITION in events
