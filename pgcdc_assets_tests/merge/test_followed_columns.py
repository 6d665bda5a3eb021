"""Columns that are renamed, dropped, swapped and widened are followed by the merge (F4, F5, F6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import DataFrame

from pgcdc_assets import failpoints
from pgcdc_assets.merge import MergeFailure, MergeReport, rebuild_table
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.support.merge.pipeline import EACH_KIND, Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

_NAMES = [target.table for target in EACH_KIND]
_COLUMNS = (
    "a int, b text, s smallint, f real, n numeric(4,1), d date, w varchar(3), x int, y text, "
    "gone int"
)
_ROWS = (
    "(1, 10, 'one', 1, 0.1, 1.5, '2024-01-02', 'abc', 1, 'y1', 7),"
    "(2, 20, 'two', 2, 'NaN', 'NaN', 'infinity', '', 2, 'y2', 8),"
    "(3, 30, null, 3, 1e30, -999.9, '0044-03-15 BC', null, 3, null, null),"
    "(4, 40, 'four', 4, null, null, '20000-01-01', 'x', 4, 'y4', 9)"
)
# Each step is captured separately, and merged later.
_FIRST_HALF = (
    ("update {0} set a = 11, gone = 70 where id = 1",),
    ("insert into {0} (id, a, n, d, gone) values (5, 50, 5.5, '2024-05-05', 5)",),
    ("alter table {0} rename a to a2", "update {0} set a2 = 12 where id = 1"),
    # The names of two columns of different types are swapped between two rows of a transaction.
    (
        "insert into {0} (id, x, y) values (6, 6, 'y6')",
        "alter table {0} rename x to z",
        "alter table {0} rename y to x",
        "alter table {0} rename z to y",
        "insert into {0} (id, x, y) values (7, 'y7', 7)",
    ),
    (
        "alter table {0} alter s type int, alter f type float8, alter n type numeric(8,3),"
        " alter d type timestamp, alter w type varchar(5), drop gone",
        "update {0} set a2 = a2 where id in (1, 2)",
    ),
)
_SECOND_HALF = (
    (
        "alter table {0} alter s type bigint, alter w type text",
        # A separate statement, because the rewrite for the types clears the default's value.
        "alter table {0} add gone text default 'new'",
        "update {0} set s = 5000000000, f = 0.1, n = 12345.678, w = 'longer', "
        "d = '2024-01-02 03:04:05' where id = 4",
    ),
    ("update {0} set id = 30 where id = 3", "delete from {0} where id = 5"),
    ("alter table {0} rename b to b2", "update {0} set gone = 'newer' where id = 2"),
)


def _frame(pipeline: Pipeline, table: str, scd: int = 1) -> DataFrame:
    return pipeline.frame(table, scd)


def _rows(pipeline: Pipeline, table: str, *columns: str, scd: int = 1) -> list[tuple[Any, ...]]:
    rows = _frame(pipeline, table, scd).selectExpr(*columns).collect()
    # NaN is not equal to itself.
    return sorted((tuple("NaN" if v != v else v for v in row) for row in rows), key=repr)


def _merge(pipeline: Pipeline, *targets: CdcTable) -> None:
    for report in pipeline.merge(None, *targets).values():
        assert isinstance(report, MergeReport), str(report.error.__cause__ or report.error)


def _start(pipeline: Pipeline) -> None:
    pipeline.start(
        *(
            f"create table {t} (id int {'primary key' if t in ('t', 'kept') else ''}, {_COLUMNS});"
            f"alter table {t} replica identity {'default' if t == 't' else 'full'};"
            f"insert into {t} values {_ROWS}"
            for t in _NAMES
        )
    )


def _change(pipeline: Pipeline, steps: Sequence[Sequence[str]]) -> None:
    for step in steps:
        for t in _NAMES:
            pipeline.database.transaction(*(statement.format(t) for statement in step))
        pipeline.capture()


def _assert_equal(pipeline: Pipeline) -> None:
    """Compare with the source's own SELECT."""
    pipeline.assert_equal("t", "kept")
    columns = pipeline.database.value(
        "select string_agg(attname, ',' order by attnum) from pg_attribute "
        "where attrelid = 'bag'::regclass and attnum > 0 and not attisdropped"
    ).split(",")
    for table in ("t", "bag"):
        assert set(_frame(pipeline, table).columns) == {
            *columns,
            "_lsn",
            "_ordinal",
            "_commit_ts",
            "_rescued",
        }
    columns.remove("d")
    assert _rows(pipeline, "bag", *columns) == _rows(pipeline, "t", *columns)


_PAST = (
    "id",
    "a2",
    "gone_dropped_11",
    "x",
    "y",
    "s",
    "f",
    "n",
    "coalesce(CAST(d AS STRING), _rescued['d'])",
    "_op",
    "_is_current",
)


@pytest.mark.sampled
def test_each_kind_of_table_follows_column_changes_in_a_backlog(pipeline: Pipeline) -> None:
    _start(pipeline)
    database = pipeline.database
    pipeline.capture()
    _merge(pipeline, *EACH_KIND)
    _change(pipeline, _FIRST_HALF)
    _merge(pipeline, *EACH_KIND)
    _assert_equal(pipeline)
    halfway = _rows(pipeline, "t", "id", "a2", "gone", "_op", "_is_current", scd=2)
    # The drop, the renames, the wider types and an update without effect open no version.
    assert halfway == sorted(
        [
            (1, 10, 7, "S", False),
            (1, 11, 70, "U", False),
            (1, 12, 70, "U", True),
            (2, 20, 8, "S", True),
            (3, 30, None, "S", True),
            (4, 40, 9, "S", True),
            (5, 50, 5, "I", True),
            (6, None, None, "I", True),
            (7, None, None, "I", True),
        ],
        key=repr,
    )
    _change(pipeline, _SECOND_HALF)
    _merge(pipeline, *EACH_KIND)
    _assert_equal(pipeline)
    past = _rows(pipeline, "t", *_PAST, scd=2)
    assert (1, 10, 7, "y1", 1, 1, 0.10000000149011612) == past[0][:7]
    assert [row[1:3] for row in past if row[0] == 1] == [(10, 7), (11, 70), (12, 70)]
    assert [row[2] for row in past if row[0] == 2] == [8, None]
    assert [row[8] for row in past if row[0] == 30] == ["0044-03-15 00:00:00 BC"]
    assert _rows(pipeline, "t", "gone", scd=2).count(("new",)) == len(past) - 1
    kept = _rows(pipeline, "kept", "id", "gone", "gone_dropped_11", "_deleted")
    assert (5, "new", 5, True) in kept
    assert (2, "newer", None, False) in kept
    assert (1, "new", None, False) in kept
    log = _rows(pipeline, "log", "_op", "id", "a2", "gone_dropped_11", "y", "b2")
    assert ("U", 1, 11, 70, 1, "one") in log
    assert ("U", 1, 12, None, 1, "one") in log
    assert ("I", 7, None, None, 7, None) in log
    for target in EACH_KIND[:2]:
        for scd in target.scd:
            found = check_all(pipeline.spark, pipeline.zone, target, scd)
            assert found.is_sound, found
    # One fold of the whole backlog gives the same rows under the same names.
    for target, scd in ((EACH_KIND[0], 2), (EACH_KIND[1], 1)):
        table = target.table
        rows = _rows(pipeline, table, *_sorted_columns(pipeline, table, scd), scd=scd)
        rebuild_table(pipeline.spark, pipeline.zone, target, scd)
        assert _rows(pipeline, table, *_sorted_columns(pipeline, table, scd), scd=scd) == rows
    database.execute("update t set b2 = 'after' where id = 1")
    pipeline.capture()
    _merge(pipeline, EACH_KIND[0])
    pipeline.assert_equal("t")


def _sorted_columns(pipeline: Pipeline, table: str, scd: int = 1) -> list[str]:
    names = sorted(set(_frame(pipeline, table, scd).columns) - {"_rescued"})
    quoted = [f"`{name}`" for name in names]
    return [*quoted, "CAST(array_sort(map_entries(_rescued)) AS STRING)"]


@pytest.mark.sampled
def test_a_merge_that_is_killed_between_its_commits_is_continued(
    pipeline: Pipeline, kills: list[str]
) -> None:
    target = CdcTable("public", "t", scd=(1, 2))
    pipeline.start(
        "create table t (id int primary key, a text, b text, c int)",
        "insert into t values (1, 'a', 'b', 1)",
    )
    pipeline.capture()
    _merge(pipeline, target)
    database = pipeline.database
    database.execute("update t set c = 2")
    database.execute("alter table t rename a to x; alter table t rename b to a")
    database.execute("alter table t rename x to b; alter table t drop c")
    database.execute("alter table t add c text default 'new', add n int default 5")
    database.execute("alter table t rename id to key")
    database.execute("insert into t values (2, 'a2', 'b2', 'c2', 6)")
    pipeline.capture()
    for scd in (1, 2):
        one = CdcTable("public", "t", scd=(scd,))
        kills += [failpoints.AFTER_COLUMNS_REWRITTEN, failpoints.AFTER_COLUMNS_ADDED]
        while kills:
            (failure,) = pipeline.merge(None, one).values()
            assert isinstance(failure, MergeFailure)
        # The rewrite is not repeated, because it would swap the names back.
        _merge(pipeline, one)
    pipeline.assert_equal("t")
    assert _rows(pipeline, "t", "key", "a", "b", "c_dropped_4", "c", "n", "_op", scd=2) == [
        (1, "b", "a", 1, "new", 5, "S"),
        (1, "b", "a", 2, "new", 5, "U"),
        (2, "b2", "a2", None, "c2", 6, "I"),
    ]
    assert check_all(pipeline.spark, pipeline.zone, target, 2).is_sound


@pytest.mark.soak
def test_renames_that_are_undone_and_settings_with_earlier_names(pipeline: Pipeline) -> None:
    """The settings have earlier names of a key and a tracked column, and a name is reused."""
    target = CdcTable("public", "t", key=("id",), scd=(1, 2), tracked=("a", "gone"))
    pipeline.start(
        "create table t (id int primary key, a int, b text, gone date)",
        "insert into t values (1, 1, 'b', 'infinity'), (2, 2, 'b', '2024-01-02')",
    )
    database = pipeline.database
    pipeline.capture()
    _merge(pipeline, target)
    database.execute("alter table t rename a to z")
    database.execute("update t set z = 10 where id = 1")
    database.execute("alter table t rename z to a")
    database.execute("update t set b = 'c', gone = '2024-01-03' where id = 2")
    database.execute("alter table t drop gone")
    database.execute("update t set b = 'd'")
    database.execute("alter table t rename id to nr; alter table t rename a to aa")
    database.execute("update t set b = 'e' where nr = 1")
    pipeline.capture()
    _merge(pipeline, target)
    pipeline.assert_equal("t")
    found = _rows(pipeline, "t", "nr", "aa", "b", "gone", "_rescued", "_is_current", scd=2)
    assert [(*row[:3], str(row[3]), *row[4:]) for row in found] == [
        (1, 1, "b", "None", {"gone": "infinity"}, False),
        (1, 10, "e", "None", {"gone": "infinity"}, True),
        (2, 2, "b", "2024-01-02", None, False),
        (2, 2, "d", "2024-01-03", None, True),
    ]
    rebuild_table(pipeline.spark, pipeline.zone, target, 2)
    columns = ("nr", "aa", "b", "gone", "_rescued", "_is_current")
    assert _rows(pipeline, "t", *columns, scd=2) == found
