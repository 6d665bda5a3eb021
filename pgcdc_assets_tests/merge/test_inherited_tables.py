"""A parent and a table that inherits from it are two tables, by copy, WAL and merge."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_TABLES = """
create table parent (id int primary key, v text);
create table child (extra int, primary key (id)) inherits (parent);
insert into parent values (1, 'a'), (2, 'b');
insert into child values (1, 'child a', 10), (3, 'c', 30);
create publication pub for table parent
"""
# A statement on the parent changes the rows of both tables.
_CHANGES = (
    "insert into parent values (5, 'e'); insert into child values (5, 'ee', 50), (6, 'f', null)",
    "update parent set v = v || '!' where id in (1, 3)",
    "delete from parent where id = 2",
    "update only parent set v = 'only' where id = 5",
)


def _rows(pipeline: Pipeline, table: str, scd: int, columns: str) -> list[tuple[Any, ...]]:
    frame = pipeline.frame(table, scd)
    found = frame.where("_is_current") if scd == 2 else frame
    return sorted(tuple(row) for row in found.select(*columns.split(", ")).collect())


@pytest.mark.sampled
def test_rows_of_parent_and_child_stay_in_their_tables(
    pipeline: Pipeline, spark: SparkSession
) -> None:
    """E7: with equal keys in both tables, a further column of the child, and TRUNCATE."""
    database = pipeline.database
    database.execute(_TABLES)
    pipeline.copy()
    tables = {"parent": "id, v", "child": "id, v, extra"}
    targets = [CdcTable("public", name, scd=(1, 2)) for name in tables]
    for statements in (*_CHANGES, "truncate only parent", "truncate parent"):
        database.execute(statements)
        for report in pipeline.merge(pipeline.capture(), *targets).values():
            assert isinstance(report, MergeReport), report.error
        for name, columns in tables.items():
            source = sorted(database.query(f"select {columns} from only {name}"))
            for scd in (1, 2):
                assert _rows(pipeline, name, scd, columns) == source, (statements, name, scd)
    for target in targets:
        for scd in target.scd:
            assert check_all(spark, pipeline.zone, target, scd).is_sound
