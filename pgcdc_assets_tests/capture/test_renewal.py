"""Captures without their slot stop with an error until a person begins a new epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    RawZoneError,
    SlotAdvanced,
    SlotMissing,
)
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_TABLE = "create table t (id int primary key, v text)"


def _renew(pipeline: Pipeline, *, adopt_slot: bool = False) -> Epoch:
    return renew_epoch(
        pipeline.database.settings(),
        pipeline.zone,
        pipeline.slot,
        PUBLICATION,
        adopt_slot=adopt_slot,
    )


def _drop_slot(pipeline: Pipeline) -> None:
    pipeline.database.execute(f"select pg_drop_replication_slot('{pipeline.slot}')")


@pytest.mark.sampled
def test_after_a_dropped_slot_the_tables_of_a_new_epoch_equal_the_source(
    pipeline: Pipeline,
) -> None:
    """A10: the drop stops captures, and the snapshots of epoch 2 restore the lost changes."""
    pipeline.start(_TABLE, "insert into t select i, 'a' from generate_series(1, 50) i")
    pipeline.database.execute("update t set v = 'b' where id <= 10")
    pipeline.sync()
    _drop_slot(pipeline)
    pipeline.database.execute("delete from t where id > 40")
    with pytest.raises(SlotMissing, match="pgcdc renew"):
        pipeline.capture()

    assert _renew(pipeline).epoch == 2
    pipeline.copy()
    pipeline.database.execute("update t set v = 'c' where id = 1")
    window = pipeline.capture()
    assert window.epoch == 2
    pipeline.sync()
    pipeline.assert_equal()
    assert len(pipeline.rows()) == 40


@pytest.mark.sampled
def test_a_slot_recreated_by_another_program_stops_the_capture_until_renewal(
    pipeline: Pipeline,
) -> None:
    """A10: the new slot has the same name, but not the changes in between."""
    pipeline.start(_TABLE, "insert into t values (1, 'a')")
    pipeline.sync()
    _drop_slot(pipeline)
    pipeline.database.execute("insert into t values (2, 'lost to the stream')")
    pipeline.database.execute(
        f"select pg_create_logical_replication_slot('{pipeline.slot}', 'pgoutput')"
    )
    pipeline.database.execute("insert into t values (3, 'seen')")
    with pytest.raises(SlotAdvanced):
        pipeline.capture()

    _renew(pipeline)
    pipeline.copy()
    pipeline.sync()
    pipeline.assert_equal()
    assert [row[0] for row in pipeline.rows()] == [1, 2, 3]


@pytest.mark.sampled
def test_after_a_restore_of_the_server_a_new_epoch_continues(pipeline: Pipeline) -> None:
    """After a restore or failover the captured WAL ends above the server's WAL."""
    pipeline.start(_TABLE, "insert into t values (1, 'a')")
    pipeline.database.execute("insert into t values (2, 'b')")
    lost = LsnWindow.of(1, pipeline.capture().end, Lsn(1 << 50))
    pipeline.zone.changes.land(lost, [])
    pipeline.merge(lost)
    pipeline.database.execute("delete from t where id = 1")
    with pytest.raises(RawZoneError, match=r"WAL ends at .* pgcdc renew"):
        capture_window(
            pipeline.database.settings(),
            pipeline.zone,
            pipeline.slot,
            PUBLICATION,
            LsnWindow.of(1, lost.end, lost.end + 8),
        )

    renewed = _renew(pipeline)
    assert (renewed.epoch, renewed.start_lsn < lost.end) == (2, True)
    pipeline.copy()
    pipeline.database.execute("insert into t values (3, 'c')")
    pipeline.sync()
    pipeline.assert_equal()
    assert [row[0] for row in pipeline.rows()] == [2, 3]


def test_after_a_move_to_another_cluster_a_new_epoch_continues(
    pipeline: Pipeline,
) -> None:
    """After dump and restore a slot may have the old name, but not the old changes."""
    pipeline.start(_TABLE, "insert into t values (1, 'a')")
    before = pipeline.zone.epochs.latest()
    assert before is not None
    other = replace(before, epoch=2, system_identifier="1", start_lsn=Lsn(1 << 50))
    pipeline.zone.epochs.append(other)
    with pytest.raises(RawZoneError, match=r"on cluster 1, not from .* pgcdc renew"):
        pipeline.copy()

    renewed = _renew(pipeline, adopt_slot=True)
    assert (renewed.epoch, renewed.system_identifier) == (3, before.system_identifier)
    # The LSNs of two clusters cannot be compared.
    assert renewed.shared_through is None
    pipeline.copy()
    pipeline.sync()
    pipeline.assert_equal()


def test_a_slot_that_can_continue_is_not_dropped(pipeline: Pipeline) -> None:
    """A drop of a healthy slot would lose changes, so the renewal is refused."""
    pipeline.start(_TABLE)
    pipeline.database.execute("insert into t values (1, 'a')")
    with pytest.raises(ConfigurationError, match="can continue"):
        _renew(pipeline)
    pipeline.sync()
    pipeline.assert_equal()


def test_a_capture_without_an_epoch_has_nothing_to_renew(pipeline: Pipeline) -> None:
    """The first snapshot starts the first epoch."""
    pipeline.database.execute(_TABLE)
    pipeline.database.execute(f"create publication {PUBLICATION} for all tables")
    with pytest.raises(ConfigurationError, match="no epoch"):
        _renew(pipeline)


@pytest.mark.sampled
def test_tables_without_a_snapshot_in_the_new_epoch_are_not_merged(pipeline: Pipeline) -> None:
    """H11: changes between two epochs are lost, so a merge would corrupt the table."""
    pipeline.start(_TABLE, "insert into t values (1, 'a')")
    pipeline.sync()
    _drop_slot(pipeline)
    renewed = _renew(pipeline)
    pipeline.database.execute("insert into t values (2, 'b')")
    window = pipeline.capture()
    assert window.start == renewed.start_lsn > Lsn(0)
    failure = pipeline.merge()["t"]
    assert isinstance(getattr(failure, "error", None), DefiniteError), failure
    assert [row[0] for row in pipeline.rows()] == [1]


def test_a_captured_window_of_an_older_epoch_is_final(pipeline: Pipeline) -> None:
    """A person runs its partition again in Dagster. The new slot stays as it is."""
    pipeline.start(_TABLE)
    pipeline.database.execute("insert into t values (1, 'a')")
    window = pipeline.capture()
    _drop_slot(pipeline)
    _renew(pipeline)
    pipeline.database.execute("insert into t values (2, 'b')")
    slot = f"from pg_replication_slots where slot_name = '{pipeline.slot}'"
    confirmed = pipeline.database.value(f"select confirmed_flush_lsn {slot}")
    settings = pipeline.database.settings()
    report = capture_window(settings, pipeline.zone, pipeline.slot, PUBLICATION, window)
    assert (report.already_captured, report.counts["public.t"]) == (True, {"I": 1})
    assert pipeline.database.value(f"select confirmed_flush_lsn {slot}") == confirmed
    assert pipeline.capture().epoch == 2
