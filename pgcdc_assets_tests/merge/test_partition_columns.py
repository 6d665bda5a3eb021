"""Partitions whose columns have another order than those of the root, by copy, WAL and merge."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport, rebuild_table
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

# Leaf p2 has the columns in another order and a gap of a dropped column, so its places differ from
# those of the root. The types would be accepted in the wrong order.
_TABLES = """
create table p (id int, region int, a text, b text, big text, primary key (id, region))
  partition by list (region);
alter table p alter big set storage external;
create table p1 partition of p for values in (1);
create table p2 (gone int, b text, big text, region int not null, a text, id int not null,
  primary key (id, region));
alter table p2 alter big set storage external, drop gone;
alter table p attach partition p2 for values in (2)
"""
_INSERT = (
    "insert into p select i, 1 + i % 2, 'a' || i, 'b' || i, repeat(md5(i::text), 200)"
    " from generate_series({0}, {0} + 5) i"
)
_CHANGES = (
    _INSERT.format(20),
    # The values of `big` are unchanged, so pgoutput sends none.
    "update p set a = 'changed ' || id where id % 3 = 0",
    "update p set id = id + 100 where id in (2, 3, 22)",
    # Rows move to the leaf with the other order, and back.
    "update p set region = 3 - region, b = 'moved' where id in (4, 5, 23)",
    "delete from p where id in (6, 7)",
    # A column is added after the leaves differ, and a leaf is attached with one more order.
    "alter table p add c int default 7",
    "update p set c = id where id % 2 = 0",
    "create table p3 (c int default 7, id int not null, big text, b text, a text,"
    " region int not null, primary key (id, region))",
    "alter table p3 alter big set storage external",
    "alter table p attach partition p3 for values in (3)",
    "update p set region = 3 where id in (20, 21)",
    "insert into p values (300, 3, 'a300', 'b300', null, 30)",
)
_COLUMNS = ("id", "region", "a", "b", "big", "c")


def _rows(pipeline: Pipeline, table: str, scd: int, where: str = "true") -> list[tuple[Any, ...]]:
    frame = pipeline.frame(table, scd).where(where)
    return sorted((tuple(row) for row in frame.select(*_COLUMNS).collect()), key=repr)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("is_root", "names"),
    [
        pytest.param(True, ("p",), id="root"),
        pytest.param(False, ("p1", "p2", "p3"), id="leaves", marks=pytest.mark.soak),
    ],
)
def test_leaves_with_other_orders_of_columns_are_merged_by_name(
    pipeline: Pipeline, spark: SparkSession, is_root: bool, names: tuple[str, ...]
) -> None:
    """E1, E2, E5: the rows come by a copy and by the WAL, into SCD1 and SCD2."""
    database = pipeline.database
    database.execute(_TABLES)
    database.execute(_INSERT.format(2))
    database.execute(
        f"create publication pub for table p with (publish_via_partition_root = {is_root})"
    )
    pipeline.copy()
    first = [CdcTable("public", name, scd=(1, 2)) for name in names if name != "p3"]
    for report in pipeline.merge(pipeline.capture(), *first).values():
        assert isinstance(report, MergeReport), report.error
    for number, statement in enumerate(_CHANGES):
        database.execute(statement)
        if number % 4 == 0:
            pipeline.capture()
    pipeline.capture()
    pipeline.copy("p" if is_root else "p3")
    targets = [CdcTable("public", name, scd=(1, 2)) for name in names]
    for report in pipeline.merge(pipeline.capture(), *targets).values():
        assert isinstance(report, MergeReport), report.error

    for target in targets:
        columns = ", ".join(_COLUMNS)
        source = database.query(f"select {columns} from {target.table}")
        wanted = sorted(source, key=repr)
        assert _rows(pipeline, target.table, 1) == wanted, target.table
        assert _rows(pipeline, target.table, 2, "_is_current") == wanted, target.table
        before = {scd: _rows(pipeline, target.table, scd) for scd in (1, 2)}
        for scd in (1, 2):
            assert check_all(spark, pipeline.zone, target, scd).is_sound
            rebuild_table(spark, pipeline.zone, target, scd)
            assert _rows(pipeline, target.table, scd) == before[scd]
    ended = _rows(pipeline, names[0] if is_root else "p2", 2, "not _is_current")
    assert (4, 1, "a4", "b4") in {row[:4] for row in ended} or not is_root
    # No value of one column is in another.
    for row in (row for name in names for row in _rows(pipeline, name, 2)):
        assert row[2] is None or row[2].startswith(("a", "changed"))
        assert row[3] is None or row[3].startswith(("b", "moved"))
