"""A column whose name is that of a system column is added while the table is captured."""

from __future__ import annotations

import re

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.sampled
def test_a_table_whose_new_column_has_the_name_of_a_system_column_waits_for_another_name(
    database: Database, spark: SparkSession, zone: RawZone
) -> None:
    pipeline = Pipeline(database, zone, spark, ("t", "u"))
    pipeline.start(
        "create table t (id int primary key, v text)",
        "create table u (id int primary key, v text)",
        "insert into t values (1, 'a')",
    )
    pipeline.sync()
    database.execute("insert into t values (2, 'before')")
    database.execute('alter table t add "_lsn" bigint default 7')
    database.execute("insert into t values (3, 'c', 8); insert into u values (1, 'a')")
    pipeline.capture()
    for _ in range(2):
        reports = pipeline.merge()
        failed = reports["t"]
        assert isinstance(failed, MergeFailure)
        assert re.search(r'public\.t .*"_lsn"', failed.error.args[0])
        assert isinstance(reports["u"], MergeReport)
    pipeline.assert_equal("u")
    database.execute('alter table t rename "_lsn" to position')
    database.execute("update t set position = 9 where id = 1; insert into t values (4, 'd')")
    pipeline.sync()
    pipeline.assert_equal()
    rows = pipeline.rows(columns="id, v, position")
    assert rows == [(1, "a", 9), (2, "before", 7), (3, "c", 8), (4, "d", 7)]
