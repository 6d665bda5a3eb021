"""Errors: found by name, with facts of one meaning each, and sent between processes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from pgcdc_assets.capture.window import check_has_wal
from pgcdc_assets.errors import (
    RawZoneError,
    SlotLost,
    TransientError,
    WindowUnavailable,
    error_named,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.stream.errors import stream_failure
from pgcdc_assets_tests.support.captures import Capturing


def test_a_run_whose_table_was_altered_while_it_was_copied_is_to_be_tried_again() -> None:
    """Its event names the class; a sync ends with that class's status."""
    kind = error_named("TableChanged")
    assert kind is not None
    assert kind.exit_status == TransientError.exit_status == 3
    assert error_named("ValueError") is None


def test_a_slot_that_the_stream_calls_lost_has_no_sentence_for_an_lsn() -> None:
    said = 'can no longer get changes from replication slot "s"'
    error = stream_failure("a server", "s", "pub", "55000", said)
    assert isinstance(error, SlotLost)
    assert error.restart_lsn is None
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert "can no longer get changes" in str(each)
        assert "None" not in str(each)


@pytest.mark.postgres
def test_a_window_whose_rows_are_gone_says_how_far_the_slot_was_told(capturing: Capturing) -> None:
    window = capturing.begin_with_one_insert()
    capturing.capture(window)
    table = capturing.zone.changes.table.load()
    assert table is not None
    for uri in table.file_uris():
        Path(uri).unlink()
    with pytest.raises(WindowUnavailable) as raised:
        capturing.capture(window)
    assert isinstance(raised.value.confirmed_flush_lsn, Lsn)


@pytest.mark.postgres
def test_a_standby_that_restarts_is_waited_for_and_a_primary_that_went_back_is_not(
    capturing: Capturing,
) -> None:
    capturing.begin()
    status = capturing.status()
    ahead = Lsn(status.current_lsn + 1)
    check_has_wal(capturing.zone, status, status.current_lsn)
    with pytest.raises(TransientError, match="standby has replayed its WAL through"):
        check_has_wal(capturing.zone, replace(status, in_recovery=True), ahead)
    with pytest.raises(RawZoneError, match="pgcdc renew"):
        check_has_wal(capturing.zone, status, ahead)
