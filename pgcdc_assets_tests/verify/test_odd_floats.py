"""Floats that Postgres computes, with bits that no text has."""

from __future__ import annotations

import pytest

from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


def test_a_computed_nan_equals_every_other_nan(pipeline: Pipeline) -> None:
    """Processors set the sign of NaN in `infinity - infinity`; the text has no sign."""
    pipeline.start(
        "create domain d as float8",
        "create table t (id int primary key, f float8, g float4, h d, a float8[], b float4[])",
        "insert into t select 1, n, n, n, array[n, 1, null], array[n] "
        "from (select 'inf'::float8 - 'inf'::float8 as n) s",
        "insert into t values (2, 'NaN', 'NaN', 'NaN', '{NaN}', '{NaN}')",
        "insert into t values (3, '-0', 1, 0, '{}', null)",
    )
    pipeline.sync()
    assert verify(pipeline).is_equal
    pipeline.database.execute("update t set f = -f, a = array[-a[1]] where id = 2")
    pipeline.database.execute("update t set f = '-inf', g = null where id = 1")
    assert verify(pipeline).is_equal
