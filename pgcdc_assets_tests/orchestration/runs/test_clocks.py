"""Ages of records if the clock was ahead and is set back."""

from __future__ import annotations

import datetime as dt
import math
import time

import dagster as dg
import pytest

from pgcdc_assets.orchestration.runs.records import seconds_since, seconds_since_end


def ended(at: float) -> dg.RunRecord:
    """Return the record of a run that ended at a time."""
    now = dt.datetime.now(dt.UTC)
    run = dg.DagsterRun(job_name="t_capture")
    return dg.RunRecord(1, run, create_timestamp=now, update_timestamp=now, end_time=at)


def test_a_timestamp_in_the_future_is_old_beyond_the_difference_of_two_clocks() -> None:
    now = time.time()
    assert seconds_since(now - 100) == pytest.approx(100, abs=5)
    assert seconds_since(now + 20) == 0
    assert seconds_since(now + 3600) == math.inf


def test_a_failure_after_the_clock_was_set_back_has_its_pause() -> None:
    now = time.time()
    assert seconds_since_end([]) is None
    assert seconds_since_end([ended(now + 3600)]) == math.inf
    found = seconds_since_end([ended(now - 100), ended(now + 3600)])
    assert found == pytest.approx(100, abs=5)
