"""Histories of a real server: the versions that its transactions create."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

TARGET = CdcTable("public", "t", scd=(1, 2))


def sync(pipeline: Pipeline) -> None:
    pipeline.capture()
    for report in merge_tables(pipeline.spark, pipeline.zone, [TARGET], pipeline.windows[-1]):
        assert isinstance(report, MergeReport), report.error.__cause__ or report.error


def versions(pipeline: Pipeline, columns: str = "id, v") -> list[tuple[Any, ...]]:
    """Return key, values, operation and is_current, in the order of keys and positions."""
    names = [name.strip() for name in columns.split(",")]
    rows = pipeline.frame("t", 2).collect()
    rows.sort(key=lambda r: (r[names[0]], r._valid_from_lsn, r._ordinal))
    check_intervals([(r[names[0]], r) for r in rows])
    return [(*(r[name] for name in names), r._op, r._is_current) for r in rows]


def check_intervals(rows: list[tuple[Any, Any]]) -> None:
    """Check that versions of a key do not overlap, and that ended versions have an end."""
    for key, row in rows:
        assert row._is_current == (row._valid_to_lsn is None), key
        assert row._valid_to_lsn is None or row._valid_from_lsn <= row._valid_to_lsn, key
    for (key, row), (next_key, following) in pairwise(rows):
        if key == next_key:
            assert row._valid_to_lsn is not None, key
            assert row._valid_to_lsn <= following._valid_from_lsn, key


@pytest.mark.sampled
def test_each_commit_creates_its_versions(pipeline: Pipeline) -> None:
    """D1, D2, D3, D12, H1, H3."""
    pipeline.start(
        "create table t (id int primary key, v text)", "insert into t values (1, 'a'), (2, 'a')"
    )
    database = pipeline.database
    database.transaction(
        "insert into t values (3, 'a')",
        "update t set v = 'b' where id = 3",
        "delete from t where id = 3",
    )
    database.execute("update t set v = 'b' where id = 1")
    database.execute("update t set v = 'b' where id = 1")
    sync(pipeline)
    database.execute("update t set v = 'c' where id = 1")
    database.execute("delete from t where id = 2")
    database.execute("insert into t values (2, 'a')")
    sync(pipeline)
    expected = [
        (1, "a", "S", False),
        (1, "b", "U", False),
        (1, "c", "U", True),
        (2, "a", "S", False),
        (2, "a", "I", True),
        (3, "a", "I", False),
        (3, "b", "U", False),
    ]
    assert versions(pipeline) == expected
    for window in pipeline.windows:
        pipeline.merge(window, TARGET)
    assert versions(pipeline) == expected
    pipeline.assert_equal("t")


@pytest.mark.sampled
def test_moved_keys_and_a_truncate_end_versions(pipeline: Pipeline) -> None:
    """D4, D14."""
    pipeline.start(
        "create table t (id int primary key, v text)", "insert into t values (1, 'a'), (2, 'b')"
    )
    database = pipeline.database
    database.execute("update t set id = 10 where id = 1")
    database.transaction("truncate t", "insert into t values (2, 'c')")
    database.transaction(
        "insert into t values (5, 'x')", "truncate t", "insert into t values (6, 'y')"
    )
    sync(pipeline)
    assert versions(pipeline) == [
        (1, "a", "S", False),
        (2, "b", "S", False),
        (2, "c", "I", False),
        (5, "x", "I", False),
        (6, "y", "I", True),
        (10, "a", "U", False),
    ]
    database.execute("truncate t")
    sync(pipeline)
    assert not any(is_current for *_, is_current in versions(pipeline))
    pipeline.assert_equal("t")


@pytest.mark.sampled
def test_a_toasted_value_is_kept_in_each_version(pipeline: Pipeline) -> None:
    """D5, D6, D8: the value is from the batch, from the table, or from before an added column."""
    pipeline.start(
        "create table t (id int primary key, v text, doc text)",
        "alter table t alter doc set storage external",
        "insert into t values (1, 'a', repeat('x', 5000))",
    )
    database = pipeline.database
    database.execute("update t set v = 'b'")
    sync(pipeline)
    database.execute("alter table t add column more int")
    database.execute("update t set v = 'c', more = 1")
    database.execute("update t set id = 2")
    sync(pipeline)
    found = versions(pipeline, "id, v, doc, more")
    assert [(key, v, len(doc), more) for key, v, doc, more, *_ in found] == [
        (1, "a", 5000, None),
        (1, "b", 5000, None),
        (1, "c", 5000, 1),
        (2, "c", 5000, 1),
    ]
    pipeline.assert_equal("t")


@pytest.mark.sampled
def test_versions_end_and_begin_at_the_publications_filter(
    pipeline: Pipeline,
) -> None:
    """D13: Postgres sends a delete or an insert, and the snapshot has the same filter."""
    database = pipeline.database
    database.execute(
        """
        create table t (id int primary key, v text);
        alter table t replica identity full;
        create publication pub for table t where (v <> 'hidden');
        insert into t values (1, 'a'), (2, 'hidden'), (3, 'hidden')
        """
    )
    pipeline.copy()
    database.execute("update t set v = 'hidden' where id = 1")
    database.execute("update t set v = 'b' where id = 2")
    database.execute("delete from t where id = 3")
    sync(pipeline)
    assert versions(pipeline) == [(1, "a", "S", False), (2, "b", "I", True)]
    assert pipeline.rows() == [(2, "b")]
    pipeline.assert_equal("t")
