"""Requests of windows that retention has deleted: an error names the floor."""

from __future__ import annotations

import datetime as dt
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.errors import DefiniteError, RawExpired
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.raw.retention import remove_snapshots, remove_windows
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.maintenance import maintain_table
from pgcdc_assets.tables.properties import BEGINS_WITH
from pgcdc_assets.tables.state import read_watermark
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_TOMORROW = dt.timedelta(days=1)


def expire(pipeline: Pipeline, merged_through: Lsn | None) -> Lsn:
    """Delete all windows of the first epoch below a watermark, of any age."""
    older_than = dt.datetime.now(dt.UTC) + _TOMORROW
    floor = remove_windows(pipeline.zone, 1, merged_through, older_than).floor
    assert floor is not None
    return floor


def three_windows(pipeline: Pipeline) -> list[LsnWindow]:
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t select i, 'v' from generate_series(1, 50) i",
    )
    for turn in range(3):
        pipeline.database.execute("update t set v = v || %s where id <= 10", (str(turn),))
        pipeline.sync()
    return pipeline.windows


def test_a_deleted_window_is_not_captured_again(pipeline: Pipeline) -> None:
    """H5: the raw partition is materialised again."""
    windows = three_windows(pipeline)
    floor = expire(pipeline, windows[1].end)
    assert floor == windows[1].end
    with pytest.raises(RawExpired, match=f"retains is {floor}"):
        capture_window(
            pipeline.database.settings(), pipeline.zone, pipeline.slot, PUBLICATION, windows[0]
        )
    # Merged tables are not affected, and captures and merges continue.
    assert verify(pipeline).is_equal
    pipeline.database.execute("delete from t where id > 40")
    pipeline.sync()
    pipeline.assert_equal()


@pytest.mark.sampled
def test_a_table_whose_watermark_is_below_the_floor_is_not_merged(pipeline: Pipeline) -> None:
    """H5: the merge of a table that was not merged for long is requested too late."""
    windows = three_windows(pipeline)
    rebuild_table(pipeline.spark, pipeline.zone, CdcTable("public", "t"), 1, windows[0].end)
    floor = expire(pipeline, windows[1].end)
    failure = pipeline.merge()["t"]
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, DefiniteError)
    assert str(floor) in str(failure.error)
    pipeline.copy("t")
    report = pipeline.merge()["t"]
    assert isinstance(report, MergeReport), report.error
    assert report.snapshot_lsn is not None
    pipeline.sync()
    pipeline.assert_equal()


@pytest.mark.sampled
def test_a_rebuild_from_below_the_floor_needs_a_later_snapshot(
    pipeline: Pipeline,
) -> None:
    """H5, for rebuilds."""
    windows = three_windows(pipeline)
    target = CdcTable("public", "t")
    floor = expire(pipeline, windows[1].end)
    with pytest.raises(RawExpired, match=f"retains is {floor}"):
        rebuild_table(pipeline.spark, pipeline.zone, target, 1, windows[0].end)
    with pytest.raises(RawExpired, match=f"retains is {floor}"):
        rebuild_table(pipeline.spark, pipeline.zone, target, 1, None)
    pipeline.copy("t")
    pipeline.sync()
    rebuild_table(pipeline.spark, pipeline.zone, target, 1, None)
    assert verify(pipeline).is_equal


HISTORY = CdcTable("public", "t", (2,))


def merge_history(pipeline: Pipeline) -> MergeReport:
    report = pipeline.merge(None, HISTORY)["t"]
    assert isinstance(report, MergeReport), report.error
    return report


@pytest.mark.soak
def test_a_history_is_not_rebuilt_only_from_a_later_epoch(pipeline: Pipeline) -> None:
    """H5: all windows of the history's first epoch are removed, and its versions stay."""
    pipeline.start(
        "create table t (id int primary key, v text)", "insert into t values (1, 'a'), (2, 'a')"
    )
    pipeline.database.execute("update t set v = 'b' where id = 1")
    pipeline.capture()
    merge_history(pipeline)
    pipeline.database.execute("select pg_drop_replication_slot(%s)", (pipeline.slot,))
    renew_epoch(pipeline.database.settings(), pipeline.zone, pipeline.slot, PUBLICATION)
    pipeline.copy()
    pipeline.database.execute("update t set v = 'c' where id = 1")
    pipeline.capture()
    report = merge_history(pipeline)
    assert report.row_count == 4
    rebuild_table(pipeline.spark, pipeline.zone, HISTORY, 2)
    floor = expire(pipeline, None)

    with pytest.raises(
        RawExpired, match=f"retains is {floor}.*move .*scd2/public/t to another folder"
    ):
        rebuild_table(pipeline.spark, pipeline.zone, HISTORY, 2)

    assert pipeline.frame("t", 2).count() == 4


@pytest.mark.sampled
def test_a_history_that_was_moved_away_begins_with_a_later_snapshot(
    pipeline: Pipeline,
) -> None:
    """H5: the remedy in the error works, and the table can be rebuilt later."""
    windows = three_windows(pipeline)
    merge_history(pipeline)
    expire(pipeline, windows[1].end)
    path = Path(pipeline.path("t", 2))
    shutil.rmtree(path)
    failure = pipeline.merge(None, HISTORY)["t"]
    assert isinstance(failure, MergeFailure)
    assert "pgcdc resnapshot NAME public.t" in str(failure.error)

    pipeline.copy("t")
    pipeline.database.execute("update t set v = 'new' where id = 1")
    pipeline.capture()
    merge_history(pipeline)

    def versions() -> list[str]:
        return sorted(map(str, pipeline.spark.read.format("delta").load(str(path)).collect()))

    live = versions()
    assert len(live) == 51
    rebuild_table(pipeline.spark, pipeline.zone, HISTORY, 2)
    assert versions() == live


@pytest.mark.soak
def test_a_rebuild_that_is_overtaken_by_retention_does_not_change_the_table(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5: windows and the rebuild's first snapshot are deleted while they are read."""
    windows = three_windows(pipeline)
    pipeline.copy("t")
    pipeline.sync()
    before = pipeline.rows()
    real, expiring = build_tasks, [True]

    def expired(*args: Any, **more: Any) -> Any:
        works = list(real(*args, **more))
        if expiring:
            expiring.pop()
            mark = pipeline.windows[-1].end
            expire(pipeline, mark)
            assert (
                remove_snapshots(pipeline.zone, {TableName("public", "t"): Position(1, mark)}) == 1
            )
        return works

    monkeypatch.setattr("pgcdc_assets.merge.run.build_tasks", expired)
    with pytest.raises(DefiniteError, match=r"gone|removed"):
        rebuild_table(pipeline.spark, pipeline.zone, CdcTable("public", "t"), 1, windows[1].end)
    assert pipeline.rows() == before


@pytest.mark.soak
def test_a_table_can_be_rebuilt_as_another_kind(
    pipeline: Pipeline,
) -> None:
    """H5: a current image that becomes a table with soft deletes cannot lose a history."""
    windows = three_windows(pipeline)
    soft = CdcTable("public", "t", soft_deletes=True)
    rebuild_table(pipeline.spark, pipeline.zone, soft, 1)
    began = DeltaTable(pipeline.path()).metadata().configuration[BEGINS_WITH]
    rebuild_table(pipeline.spark, pipeline.zone, CdcTable("public", "t"), 1)
    assert BEGINS_WITH not in DeltaTable(pipeline.path()).metadata().configuration
    pipeline.copy("t")
    pipeline.sync()
    expire(pipeline, windows[1].end)
    rebuild_table(pipeline.spark, pipeline.zone, soft, 1)
    assert DeltaTable(pipeline.path()).metadata().configuration[BEGINS_WITH] > began
    with pytest.raises(DefiniteError, match="no complete snapshot with all changes after it"):
        rebuild_table(pipeline.spark, pipeline.zone, soft, 1, windows[2].end)


@pytest.mark.soak
@pytest.mark.slow
def test_concurrent_maintenance_and_merges_lose_and_duplicate_no_row(pipeline: Pipeline) -> None:
    """H1 and H5 under load: OPTIMIZE, VACUUM and retention beside captures and merges."""
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t select i, 'v' from generate_series(1, 500) i",
    )
    pipeline.sync()
    stop = threading.Event()
    tidied: list[bool] = []
    errors: list[Exception] = []

    def maintain() -> None:
        while not stop.is_set():
            try:
                report = maintain_table(
                    lambda: pipeline.spark, pipeline.zone.lake, pipeline.path(), 1.0
                )
                tidied.append(report.is_postponed)
                mark = read_watermark(pipeline.zone.lake, pipeline.zone.name, "public", "t", 1)
                assert mark is not None
                remove_windows(pipeline.zone, 1, mark[1], dt.datetime.now(dt.UTC) + _TOMORROW)
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=maintain)
    thread.start()
    try:
        for turn in range(6):
            pipeline.database.execute(
                "update t set v = %s where id %% 7 = %s", (f"turn {turn}", turn)
            )
            pipeline.database.execute("delete from t where id = %s", (turn + 1,))
            pipeline.database.execute("insert into t values (%s, 'new')", (1000 + turn,))
            pipeline.capture()
            for _ in range(20):
                # A merge that conflicts with OPTIMIZE is requested again, as the sensor does.
                if isinstance(pipeline.merge()["t"], MergeReport):
                    break
            else:
                raise AssertionError("no merge succeeded")
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert tidied
    pipeline.sync()
    found = verify(pipeline)
    assert found.is_equal, found
    assert found.target_rows == 500
