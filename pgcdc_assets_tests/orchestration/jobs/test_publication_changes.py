"""Changes of the publication: the tables heal by automatic re-snapshots, in SCD1 and SCD2."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.merge import rebuild_table
from pgcdc_assets.orchestration.state import read_gates
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.slow,
]

_ALL = "insert, update, delete, truncate"

# Statements, the published columns and the condition of the published rows.
_CHANGES = {
    "row filter": (
        (
            "alter publication pub set table a where (id > 3), b",
            "insert into a values (0, 'hidden'), (20, 'shown')",
            "update a set v = 'changed' where id in (2, 5); delete from a where id = 6",
        ),
        "id, v",
        "id > 3",
    ),
    "another row filter": (
        (
            "update a set v = 'before' where id = 9",
            "alter publication pub set table a where (id < 8), b",
            "update a set v = 'after' where id in (1, 9)",
        ),
        "id, v",
        "id < 8",
    ),
    "no row filter": (("alter publication pub set table a, b",), "id, v", "true"),
    "column list": (
        (
            "alter publication pub set table a (id), b",
            "insert into a values (21, 'without'); delete from a where id = 7",
        ),
        "id",
        "true",
    ),
    "no column list": (
        ("alter publication pub set table a, b", "update a set v = 'seen' where id = 1"),
        "id, v",
        "true",
    ),
    "publish": (
        (
            "alter publication pub set (publish = 'insert')",
            "update a set v = 'unseen' where id = 2; delete from a where id = 3",
            f"alter publication pub set (publish = '{_ALL}')",
        ),
        "id, v",
        "true",
    ),
    "created again": (
        (
            "insert into a values (22, 'before')",
            "drop publication pub; create publication pub for table a, b",
            "insert into a values (23, 'after')",
        ),
        "id, v",
        "true",
    ),
    "left and returned": (
        (
            "alter publication pub drop table a",
            "update a set v = 'unseen' where id = 4; insert into a values (24, 'unseen')",
            "alter publication pub add table a",
        ),
        "id, v",
        "true",
    ),
}

_BOTH = CdcTable("public", "a", (1, 2))


def declared(orchestrated: Orchestrated, *tables: CdcTable) -> Orchestrated:
    return replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))


def stored(
    orchestrated: Orchestrated, spark: SparkSession, table: str, scd: int, *columns: str
) -> list[tuple[str, ...]]:
    path = table_path(orchestrated.lake, NAME, "public", table, scd)
    rows = spark.read.format("delta").load(path)
    if scd == 2 and columns:
        rows = rows.where("_is_current")
    chosen = rows.select(*(columns or sorted(rows.columns))).collect()
    return sorted(tuple(map(str, row)) for row in chosen)


def published(
    orchestrated: Orchestrated, table: str, columns: str, condition: str = "true"
) -> list[tuple[str, ...]]:
    rows = orchestrated.database.query(f"select {columns} from {table} where {condition}")
    return sorted(tuple(map(str, row)) for row in rows)


def snapshots_of(orchestrated: Orchestrated, table: str) -> int:
    found = orchestrated.zone.snapshots.complete_snapshots()
    return sum(snapshot.table == table for snapshot in found)


def assert_sound(orchestrated: Orchestrated, spark: SparkSession, target: CdcTable) -> None:
    """Check the history's rules, and that a rebuild from raw has the same rows."""
    assert read_gates(orchestrated.zone, orchestrated.capture) == {}
    taken = snapshots_of(orchestrated, target.table)
    assert orchestrated.sync().merge_count == 0
    assert snapshots_of(orchestrated, target.table) == taken
    for scd in (1, 2):
        findings = check_all(spark, orchestrated.zone, target, scd)
        assert findings.is_sound, (scd, findings)
        before = stored(orchestrated, spark, target.table, scd)
        rebuild_table(spark, orchestrated.zone, target, scd)
        assert stored(orchestrated, spark, target.table, scd) == before, scd


@pytest.mark.sampled
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("row filter", "column list", "left and returned"), id="some"),
        pytest.param(tuple(_CHANGES), id="all", marks=pytest.mark.soak),
    ],
)
def test_one_sync_heals_each_change_of_the_publication(
    orchestrated: Orchestrated, spark: SparkSession, names: tuple[str, ...]
) -> None:
    """C11, D13, B9: the target equals the published rows, without a person."""
    orchestrated = declared(orchestrated, _BOTH, CdcTable("public", "b"))
    orchestrated.sync()
    for name in names:
        statements, columns, condition = _CHANGES[name]
        taken = snapshots_of(orchestrated, "a")
        for statement in statements:
            orchestrated.commit(statement)
        orchestrated.sync()
        assert snapshots_of(orchestrated, "a") > taken, name
        rows = published(orchestrated, "a", columns, condition)
        for scd in (1, 2):
            shown = stored(orchestrated, spark, "a", scd, *columns.split(", "))
            assert shown == rows, (name, scd)
        assert orchestrated.equals_source("a"), name
        assert orchestrated.equals_source("b"), name
    assert_sound(orchestrated, spark, _BOTH)


@pytest.mark.soak
def test_a_root_that_is_published_again_heals(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """E1, E6: the leaves, one of them with another order of columns, were published by name."""
    database = orchestrated.database
    database.execute("drop publication pub")
    database.execute(
        "create table p (id int, region int, v text, primary key (id, region)) "
        "partition by list (region)"
    )
    database.execute("create table p1 partition of p for values in (1)")
    database.execute(
        "create table p2 (x int, v text, region int not null, id int not null); "
        "alter table p2 drop x; alter table p attach partition p2 for values in (2)"
    )
    database.execute("insert into p select i, 1 + i % 2, 'row ' || i from generate_series(1, 6) i")
    database.execute(
        "create publication pub for table p, b with (publish_via_partition_root = true)"
    )
    root = CdcTable("public", "p", (1, 2))
    orchestrated = declared(orchestrated, root, CdcTable("public", "b"))
    orchestrated.sync()
    # By WAL, into the leaf with another order of columns as well.
    orchestrated.commit("insert into p values (7, 2, 'seven'), (8, 1, 'eight')")
    orchestrated.commit("insert into p2 (id, region, v) values (9, 2, 'nine')")
    orchestrated.commit("update p set region = 2 where id = 2; delete from p where id = 1")
    orchestrated.sync()
    taken = snapshots_of(orchestrated, "p")
    assert taken == 1

    def assert_equal() -> None:
        rows = published(orchestrated, "p", "id, region, v")
        for scd in (1, 2):
            assert stored(orchestrated, spark, "p", scd, "id", "region", "v") == rows, scd
        assert orchestrated.equals_source("p")

    assert_equal()
    orchestrated.commit("alter publication pub set (publish_via_partition_root = false)")
    orchestrated.commit("update p set v = 'unseen' where id = 3; insert into b values (1, 1)")
    with pytest.raises(PgcdcError, match=r"public\.p\b"):
        orchestrated.sync()
    assert orchestrated.equals_source("b"), "other tables continue"
    orchestrated.commit("alter publication pub set (publish_via_partition_root = true)")
    orchestrated.commit("update p set v = 'seen' where id = 4")
    orchestrated.sync()
    assert_equal()
    assert snapshots_of(orchestrated, "p") == taken + 1

    # Both changes between two syncs.
    orchestrated.commit("alter publication pub set (publish_via_partition_root = false)")
    orchestrated.commit("delete from p where id = 5; insert into p values (10, 1, 'ten')")
    orchestrated.commit("alter publication pub set (publish_via_partition_root = true)")
    orchestrated.sync()
    assert_equal()
    assert_sound(orchestrated, spark, root)
