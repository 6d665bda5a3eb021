"""Merges into SCD1 that are repeated, late, out of order, or fail for one table."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

from pgcdc_assets.errors import MergeConflict
from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import read_watermark
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.sampled
def test_a_window_merged_again_changes_nothing(pipeline: Pipeline) -> None:
    """H1: no row changes, and the table gets no new version."""
    pipeline.start("create table t (id int primary key, v int)", "insert into t values (1, 0)")
    pipeline.database.execute("update t set v = v + 1")
    pipeline.sync()
    version = DeltaTable(pipeline.path()).version()
    for _ in range(2):
        report = pipeline.merge()["t"]
        assert isinstance(report, MergeReport)
        assert (report.windows_folded, report.changes_read) == (0, 0)
    assert DeltaTable(pipeline.path()).version() == version
    assert pipeline.rows() == [(1, 1)]


@pytest.mark.sampled
def test_an_older_window_merged_after_a_newer_one_does_not_regress(pipeline: Pipeline) -> None:
    """H2: a merge of the newest window folds all earlier windows. Their merges have no effect."""
    pipeline.start("create table t (id int primary key, v int)", "insert into t values (1, 0)")
    windows = []
    for _ in range(3):
        pipeline.database.execute("update t set v = v + 1")
        windows.append(pipeline.capture())
    newest = pipeline.merge(windows[2])["t"]
    assert isinstance(newest, MergeReport)
    assert newest.windows_folded == 3
    for window in (windows[0], windows[1]):
        pipeline.merge(window)
        assert pipeline.rows() == [(1, 3)]
    mark = read_watermark(pipeline.zone.lake, pipeline.zone.name, "public", "t", 1)
    assert mark == (1, windows[2].end)


def test_a_table_that_cannot_be_merged_does_not_delay_the_others(pipeline: Pipeline) -> None:
    """H8: the broken table fails alone, and is merged from the raw zone after a correction."""
    pipeline.tables = ("t", "broken")
    pipeline.start(
        "create table t (id int primary key, v text)",
        'create table broken (id int primary key, v text, "V" text)',
    )
    pipeline.database.execute("insert into t values (1, 'a')")
    pipeline.database.execute("insert into broken values (1, 'a', 'b')")
    pipeline.capture()
    reports = pipeline.merge()
    failure = reports["broken"]
    assert isinstance(reports["t"], MergeReport)
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, MergeConflict)
    assert '"V"' in str(failure.error) and '"v"' in str(failure.error)
    pipeline.database.execute('alter table broken rename "V" to w')
    pipeline.copy("broken")
    pipeline.sync()
    pipeline.assert_equal()


def test_a_window_without_changes_of_a_table_needs_no_commit(pipeline: Pipeline) -> None:
    pipeline.tables = ("t", "idle")
    pipeline.start(
        "create table t (id int primary key, v text)",
        "create table idle (id int primary key, v text)",
    )
    pipeline.sync()
    version = DeltaTable(pipeline.path("idle")).version()
    pipeline.database.execute("insert into t values (1, 'a')")
    report = pipeline.sync()["idle"]
    assert report.watermark_after == pipeline.windows[-1].end
    assert DeltaTable(pipeline.path("idle")).version() == version


def test_the_watermark_of_an_idle_table_does_not_fall_behind_without_limit(
    pipeline: Pipeline,
) -> None:
    pipeline.start("create table t (id int primary key, v text)")
    pipeline.sync()
    for _ in range(12):
        pipeline.capture()
    pipeline.merge()
    mark = read_watermark(pipeline.zone.lake, pipeline.zone.name, "public", "t", 1)
    assert mark == (1, pipeline.windows[-1].end)


@pytest.mark.sampled
def test_a_new_snapshot_replaces_the_contents(pipeline: Pipeline) -> None:
    """Rows that the snapshot lacks are deleted, and later commits come from the stream."""
    pipeline.start(
        "create table t (id int primary key, v text)", "insert into t values (1, 'a'), (2, 'b')"
    )
    pipeline.sync()
    pipeline.database.execute("set session_replication_role = replica; delete from t where id = 1")
    pipeline.database.execute("alter publication pub set (publish = 'insert')")
    pipeline.database.execute("delete from t where id = 2")
    pipeline.database.execute("alter publication pub set (publish = 'insert,update,delete')")
    pipeline.database.execute("insert into t values (3, 'c')")
    pipeline.capture()
    pipeline.copy("t")
    pipeline.database.execute("update t set v = 'after the copy' where id = 3")
    report = pipeline.sync()["t"]
    assert report.snapshot_lsn is not None
    assert pipeline.rows() == [(3, "after the copy")]


def test_a_table_without_a_snapshot_is_refused(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key)")
    pipeline.capture()
    failure = pipeline.merge(None, CdcTable("public", "nothing"))["nothing"]
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, MergeConflict)
    assert "snapshot" in str(failure.error)
