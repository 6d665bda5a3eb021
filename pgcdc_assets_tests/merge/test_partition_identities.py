"""Partitions with another replica identity than the root, whose old rows Postgres calls whole."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ReplicaIdentityError
from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

# ALTER TABLE of the root does not change its partitions, and p1 keeps DEFAULT.
_TABLES = """
create table p (id int primary key, v text, big text) partition by range (id);
alter table p alter big set storage external;
create table p1 partition of p for values from (0) to (100);
create table p2 partition of p default;
alter table p replica identity full; alter table p2 replica identity full;
insert into p select i, 'old', repeat(md5(i::text), 200)
  from unnest(array[1, 2, 3, 101, 102, 103]) i;
create publication pub for table p with (publish_via_partition_root = true)
"""
_TARGET = CdcTable("public", "p", scd=(1, 2))


@pytest.mark.sampled
def test_changes_of_partitions_with_the_default_identity_are_complete(
    pipeline: Pipeline, spark: SparkSession
) -> None:
    """D4, D5, D9: deletes, and keys that change beside an unchanged TOAST value."""
    database = pipeline.database
    database.execute(_TABLES)
    pipeline.copy()
    for base in (0, 100):
        database.execute(f"insert into p values ({base + 10}, 'new', 'small')")
        database.execute(f"delete from p where id in ({base + 2}, {base + 10})")
        database.execute(f"update p set id = {base + 11} where id = {base + 1}")
        for report in pipeline.merge(pipeline.capture(), _TARGET).values():
            assert isinstance(report, MergeReport), report.error
        source = sorted(database.query("select id, v, big from p"))
        for scd in (1, 2):
            path = pipeline.path("p", scd)
            frame = spark.read.format("delta").load(path)
            current = frame.where("_is_current") if scd == 2 else frame
            found = sorted(tuple(row) for row in current.select("id", "v", "big").collect())
            assert found == source, (base, scd)
    for scd in (1, 2):
        findings = check_all(spark, pipeline.zone, _TARGET, scd)
        assert findings.is_sound, findings


@pytest.mark.parametrize("identity", ["default", "full"])
def test_a_partition_whose_identity_lacks_the_key_stops_the_table(
    pipeline: Pipeline, identity: str
) -> None:
    """D9: its updates and deletes do not identify their row. The changes before are merged."""
    database = pipeline.database
    database.execute(
        "create table t (id int primary key, o int not null, v text) partition by range (id);"
        f"alter table t replica identity {identity};"
        "create table low partition of t for values from (0) to (100);"
        "create table high partition of t default; create unique index on low (o);"
        "insert into t values (1, 1, 'a'), (2, 2, 'b'), (3, 3, 'c'), (101, 1, 'd');"
        "create publication pub for table t with (publish_via_partition_root = true)"
    )
    pipeline.copy()
    target = CdcTable("public", "t", scd=(1, 2))
    database.execute("update t set v = 'new' where id = 101; delete from t where id = 2")
    database.execute("alter table low replica identity using index low_o_idx")
    for statement in (
        "update t set v = 'newer' where id = 101; insert into t values (4, 4, 'e')",
        "delete from t where id = 3",
    ):
        database.execute(statement)
    pipeline.capture()
    for _ in range(2):
        (failure,) = pipeline.merge(None, target).values()
        assert isinstance(failure, MergeFailure)
        assert isinstance(failure.error, ReplicaIdentityError)
        assert "without the key (id)" in str(failure.error)
    assert {row[0] for row in pipeline.rows()} == {1, 3, 4, 101}
    database.execute("alter table low replica identity default")
    pipeline.copy("t")
    database.execute("delete from t where id = 1")
    pipeline.capture()
    for report in pipeline.merge(None, target).values():
        assert isinstance(report, MergeReport), report.error
    pipeline.assert_equal()
    history = pipeline.frame("t", 2)
    assert {row.id for row in history.where("_is_current").collect()} == {4, 101}
