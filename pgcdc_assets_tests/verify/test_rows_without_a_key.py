"""Tables without a key are compared by all values of their rows, including rescued values."""

from __future__ import annotations

import pytest

from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_COLUMNS = (
    "n numeric, m numeric(60, 3), s numeric(3, 3), f float8, a text[], d date, ts timestamptz, "
    "b bytea, j json, na numeric[], fa float8[]"
)
_ODD = (
    "('NaN', 'NaN', 0, 'NaN', array['a\"b', 'c,d', null, 'NULL', ''], 'infinity', '-infinity', "
    "'\\x00', '{\"a\": 1}', '{NaN,1.5}', '{NaN,1.5}')"
)
_WIDE = (
    "(1e60, 12345678901234567890123456789012345678901234567890.123, 0.5, '-0', '{{a,b},{c,d}}', "
    "'4000-01-01 BC', '4000-01-01 BC', null, null, '{{1,2}}', '{{1,2}}')"
)


@pytest.mark.sampled
def test_rescued_values_are_equal_to_their_source(pipeline: Pipeline) -> None:
    pipeline.start(
        f"create table t ({_COLUMNS})",
        "alter table t replica identity full",
        f"insert into t values {_ODD}, {_WIDE}, {_ODD}",
    )
    pipeline.sync()
    assert verify(pipeline).is_equal
    pipeline.database.execute("update t set n = n + 1, f = f + 1")
    pipeline.database.execute("delete from t where ctid = (select min(ctid) from t)")
    pipeline.sync()
    assert verify(pipeline).is_equal
    pipeline.assert_equal("t")
    pipeline.database.execute("update t set d = '-infinity' where d = 'infinity'")
    assert not pipeline.compare().is_equal


@pytest.mark.sampled
def test_the_rows_of_a_table_without_columns_are_counted(pipeline: Pipeline) -> None:
    pipeline.start(
        "create table t ()",
        "alter table t replica identity full",
        "insert into t default values",
    )
    pipeline.sync()
    assert verify(pipeline).is_equal
    for _ in range(2):
        pipeline.database.execute("insert into t default values")
    pipeline.database.execute("delete from t where ctid = (select min(ctid) from t)")
    pipeline.sync()
    found = verify(pipeline)
    assert (found.is_equal, found.source_rows, found.target_rows) == (True, 2, 2)
    pipeline.spark.sql(f"DELETE FROM {delta_table(pipeline.path())} WHERE _ordinal = 0")
    found = verify(pipeline)
    assert 0 < found.missing == 2 - found.target_rows
    pipeline.database.execute("alter table t add column v text")
    pipeline.database.execute("insert into t values ('a')")
    pipeline.copy("t")
    pipeline.sync()
    assert verify(pipeline).is_equal
