"""Column changes at the source that need a new snapshot or not (F2, F5)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import DataFrame

from pgcdc_assets.merge import MergeReport
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


def _frame(pipeline: Pipeline, scd: int) -> DataFrame:
    return pipeline.frame("t", scd)


@pytest.mark.parametrize("scd", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_deleted_row_from_before_a_default_is_removed(pipeline: Pipeline, scd: int) -> None:
    """F2: with REPLICA IDENTITY FULL the old tuple has the default that the insert did not have."""
    pipeline.start(
        "create table t (id int primary key, v text)", "alter table t replica identity full"
    )
    database = pipeline.database
    database.execute("insert into t select i, 'a' from generate_series(1, 4) i")
    database.execute("alter table t add column n int not null default 5")
    database.execute("delete from t where id = 1")
    database.execute("update t set id = 20 where id = 2")
    database.execute("update t set n = 6 where id = 3")
    pipeline.sync(CdcTable("public", "t", scd=(scd,)))
    found = _frame(pipeline, scd).where("true" if scd == 1 else "_is_current").orderBy("id")
    assert [(r.id, r.n) for r in found.collect()] == [(3, 6), (4, 5), (20, 5)]


@pytest.mark.sampled
def test_a_column_of_a_type_that_the_table_has_not_had_is_added(pipeline: Pipeline) -> None:
    """F1: Delta has a table feature for timestamps without a time zone."""
    pipeline.start("create table t (id int primary key)", "insert into t values (1)")
    pipeline.sync()
    pipeline.database.execute("alter table t add column at timestamp")
    pipeline.database.execute("insert into t values (2, '2024-01-02 03:04:05')")
    pipeline.sync()
    pipeline.assert_equal()


_TYPES = "i int, n numeric(5,2), f real, t varchar(5), b bytea, ts timestamptz, a int[]"
_VALUES = "7, 1.25, 0.5, 'x', '\\x00ff', '2024-01-02 03:04:05.5+00', '{1,NULL}'"
_RETYPED = (
    "alter table t alter i type bigint, alter n type numeric(12,1), alter f type float8,"
    " alter t type text, alter b type text using 'b', alter ts type timestamp,"
    " alter a type bigint[]"
)
_LATER = "i = 5000000000, n = 12345678901.5, f = 1e300, a = '{5000000000}'"
_COLUMNS = ("i", "n", "f", "t", "b", "ts", "a", "_rescued")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(CdcTable("public", "t", scd=(2,)), id="history"),
        pytest.param(
            CdcTable("public", "t", soft_deletes=True),
            id="soft deletes",
            marks=pytest.mark.soak,
        ),
        pytest.param(CdcTable("public", "t", without_key="log"), id="log", marks=pytest.mark.soak),
    ],
)
def test_kept_values_get_a_new_type(pipeline: Pipeline, target: CdcTable) -> None:
    """F5: exactly, or as text in `_rescued`. Later values are neither rounded nor refused."""
    is_log = target.without_key == "log"
    pipeline.start(
        f"create table t (id int {'' if is_log else 'primary key'}, {_TYPES})",
        "alter table t replica identity full",
        f"insert into t values (1, {_VALUES}), (2, {_VALUES})",
    )
    database = pipeline.database
    database.execute("update t set n = 'NaN' where id = 1")
    database.execute("delete from t where id = 1")
    pipeline.sync(target)
    database.execute(_RETYPED)
    database.execute(f"update t set {_LATER}")
    pipeline.capture()
    (waiting,) = pipeline.merge(None, target).values()
    assert isinstance(waiting, MergeReport)
    assert "The type of column ts was changed" in waiting.waits_for
    pipeline.copy("t")
    pipeline.sync(target)
    database.execute("update t set f = 2 where id = 2")
    pipeline.sync(target)
    rows: list[tuple[Any, ...]] = [
        tuple(row) for row in _frame(pipeline, target.scd[0]).select(*_COLUMNS).collect()
    ]
    if not target.soft_deletes:
        # The change between ALTER TABLE and the snapshot is folded as a version.
        folded = _frame(pipeline, target.scd[0]).where("i = 5000000000 AND f = 1e300")
        assert "U" in [row._op for row in folded.collect()]
    before = [row for row in rows if row[0] == 7]
    assert before
    for i, n, f, t, b, ts, a, rescued in before:
        assert (i, n, f, t, b, a) == (7, None, 0.5, "x", "\\x00ff", [1, None])
        assert str(ts) == "2024-01-02 03:04:05.500000"
        assert rescued in ({"n": "1.25"}, {"n": "NaN"})
    newest = max(rows, key=lambda row: (row[0] == 5_000_000_000, row[2] == 2.0))
    assert newest[:3] == (5_000_000_000, Decimal("12345678901.5"), 2.0)
    assert newest[6:] == ([5_000_000_000], None)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("varchar(9)", "varchar(3) using left(v, 3)"),
        pytest.param("timestamp", "timestamp(0)", marks=pytest.mark.soak),
        pytest.param("char(3)", "char(9)", marks=pytest.mark.soak),
        pytest.param("numeric(50,20)", "numeric(50,3)", marks=pytest.mark.soak),
    ],
)
def test_fewer_digits_or_characters_need_a_new_snapshot(
    pipeline: Pipeline, before: str, after: str
) -> None:
    """F5: Postgres rewrites the rows, which the stream does not contain."""
    value = "'2024-01-02 03:04:05.678'" if "timestamp" in before else "'1.23456'"
    if before == "char(3)":
        value = "'1.2'"
    pipeline.start(f"create table t (id int primary key, v {before})")
    database = pipeline.database
    database.execute(f"insert into t values (1, {value}), (2, {value})")
    pipeline.sync()
    database.execute(f"alter table t alter v type {after}")
    database.execute("update t set id = 3 where id = 2")
    pipeline.capture()
    (waiting,) = pipeline.merge().values()
    assert isinstance(waiting, MergeReport)
    assert "The type of column v was changed" in waiting.waits_for
    pipeline.copy()
    pipeline.copy("t")
    pipeline.sync()
    pipeline.assert_equal()
