"""Tables without a key from a real server, as `bag` and as `log`, and soft deletes."""

from __future__ import annotations

from collections import Counter

import pytest

from pgcdc_assets.merge import MergeReport
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

LOG = CdcTable("public", "log", without_key="log")

_COLUMNS = "n int, f float8, a numeric, note text"


def _source(pipeline: Pipeline, table: str) -> Counter[tuple[object, ...]]:
    query = f"select n, f::text, a::text, note from {table}"
    return Counter(pipeline.database.query(query))


def _target(pipeline: Pipeline, table: str) -> Counter[tuple[object, ...]]:
    names = ["n", "f", "a", "note"]
    rows = pipeline.frame(table).select(*names).collect()
    return Counter((r.n, _float(r.f), r.a, r.note) for r in rows)


def _float(value: float | None) -> str | None:
    return (
        None if value is None else {"nan": "NaN", "inf": "Infinity"}.get(str(value), f"{value:g}")
    )


@pytest.mark.sampled
def test_equal_rows_occur_as_often_as_in_the_source(pipeline: Pipeline) -> None:
    """D11: one of several equal rows, also with TOAST, is deleted, updated or inserted."""
    pipeline.tables = ("t",)
    pipeline.start(
        f"create table t ({_COLUMNS})",
        "alter table t replica identity full",
        "insert into t select 1, 'NaN', 1.50, 'same' from generate_series(1, 5)",
        "insert into t values (2, '-0', null, null), (2, '0', null, null)",
    )
    database = pipeline.database
    pipeline.sync()
    assert _target(pipeline, "t") == _source(pipeline, "t")
    one = "(select min(ctid) from t where n = 1)"
    database.execute(f"delete from t where ctid = {one}")
    database.execute(f"update t set note = 'other' where ctid = {one}")
    database.execute("insert into t select 1, 'NaN', 1.50, 'same' from generate_series(1, 2)")
    database.execute("delete from t where f::text = '-0'")
    pipeline.sync()
    assert _target(pipeline, "t") == _source(pipeline, "t")
    database.execute("alter table t alter note set storage external")
    database.execute("insert into t values (3, 1.5, 1, repeat('x', 5000))")
    database.execute("update t set n = 4 where n = 3")
    database.transaction("truncate t", "insert into t values (9, 1, 1, null), (9, 1, 1, null)")
    database.execute("delete from t where ctid = (select min(ctid) from t)")
    pipeline.sync()
    assert _target(pipeline, "t") == _source(pipeline, "t")
    assert sum(_source(pipeline, "t").values()) == 1


@pytest.mark.sampled
def test_a_log_has_every_change(pipeline: Pipeline) -> None:
    """D11, with the setting `log`."""
    pipeline.start(
        f"create table log ({_COLUMNS})",
        "alter table log replica identity full",
        "insert into log values (1, 1, 1, 'a')",
    )
    database = pipeline.database
    database.execute("update log set note = 'b'")
    pipeline.capture()
    database.execute("delete from log")
    pipeline.capture()
    for _ in range(2):
        report = pipeline.merge(None, LOG)["log"]
        assert isinstance(report, MergeReport), report.error
    rows = pipeline.frame("log").orderBy("_lsn", "_ordinal").collect()
    assert [(r._op, r.n, r.note) for r in rows] == [("S", 1, "a"), ("U", 1, "b"), ("D", 1, "b")]


@pytest.mark.sampled
def test_deleted_rows_keep_their_values(pipeline: Pipeline) -> None:
    """D1, D2, D5, D14 with soft deletes: rows that are not deleted equal the source."""
    soft = CdcTable("public", "t", soft_deletes=True)
    pipeline.start(
        "create table t (id int primary key, v text)",
        "alter table t alter v set storage external",
        "insert into t select n, repeat(n::text, 4000) from generate_series(1, 4) n",
    )
    database = pipeline.database
    database.transaction("insert into t values (5, 'x')", "delete from t where id = 5")
    database.execute("update t set id = 10 where id = 1")
    database.execute("delete from t where id = 2")
    pipeline.capture()
    assert isinstance(pipeline.merge(None, soft)["t"], MergeReport)
    database.execute("insert into t values (2, 'again')")
    pipeline.capture()
    assert isinstance(pipeline.merge(None, soft)["t"], MergeReport)
    pipeline.assert_equal()
    rows = pipeline.frame().orderBy("id").collect()
    assert [(r.id, r.v[:2], r._deleted) for r in rows] == [
        (1, "11", True),
        (2, "ag", False),
        (3, "33", False),
        (4, "44", False),
        (5, "x", True),
        (10, "11", False),
    ]
    assert all((r._deleted_at_lsn is not None) == r._deleted for r in rows)
    database.execute("truncate t")
    pipeline.capture()
    assert isinstance(pipeline.merge(None, soft)["t"], MergeReport)
    pipeline.assert_equal()
    assert pipeline.frame().where("NOT _deleted").count() == 0
