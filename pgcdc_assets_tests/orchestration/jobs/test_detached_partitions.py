"""Partitions that the source detaches or drops, in each kind of table in the lake."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.raw.relations.schema_events import MERGE, SchemaChange
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

_TABLES = "; ".join(
    f"create table {root} (id int primary key, v text) partition by range (id);"
    f"create table {root}_old partition of {root} for values from (0) to (10);"
    f"create table {root}_older partition of {root} for values from (10) to (20);"
    f"create table {root}_new partition of {root} for values from (20) to (30);"
    f"insert into {root} values (1, 'a'), (11, 'b'), (21, 'c')"
    for root in ("p", "kept", "all_kept")
)


@pytest.mark.sampled
def test_rows_of_a_detached_partition_are_removed_or_kept_by_the_kind_of_table(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """E3: SCD1 removes them, soft deletes keep and mark them, and SCD2 keeps ended versions.

    With `on_detached_partition: keep`, they stay until a person takes a snapshot.
    """
    database = orchestrated.database
    database.execute(_TABLES)
    database.execute(
        "drop publication pub;"
        "create publication pub for table p, kept, all_kept with (publish_via_partition_root)"
    )
    tables = (
        CdcTable("public", "p", scd=(1, 2)),
        CdcTable("public", "kept", soft_deletes=True),
        CdcTable("public", "all_kept", on_detached_partition="keep"),
    )
    capture = replace(orchestrated.capture, tables=tables)
    pipeline = Orchestrated(database, orchestrated.lake, orchestrated.instance, capture)
    pipeline.sync()

    def ids(table: str, scd: int, where: str = "true") -> list[int]:
        path = table_path(orchestrated.lake, NAME, "public", table, scd)
        found = spark.read.format("delta").load(path).where(where).select("id").collect()
        return sorted(row.id for row in found)

    assert ids("p", 1) == ids("p", 2, "_is_current") == ids("kept", 1) == [1, 11, 21]
    for root in ("p", "kept", "all_kept"):
        pipeline.commit(f"alter table {root} detach partition {root}_old")
        pipeline.commit(f"drop table {root}_older")
        pipeline.commit(f"update {root} set v = 'd' where id = 21")
    # Nothing of the detached partition is read any more.
    pipeline.commit("delete from p_old; delete from kept_old")
    pipeline.sync()

    assert ids("p", 1) == [21]
    assert ids("p", 2, "_is_current") == [21]
    assert ids("p", 2, "not _is_current and v in ('a', 'b')") == [1, 11]
    assert ids("kept", 1, "not _deleted") == [21]
    assert ids("kept", 1, "_deleted") == [1, 11]
    assert pipeline.equals_source("p")
    details = [
        event.detail
        for event in pipeline.zone.schema_events.read()
        if event.change.value == "partition_detached"
    ]
    assert len(details) == 3
    assert ids("all_kept", 1) == [1, 11, 21]
    copied = [snapshot.table for snapshot in pipeline.zone.snapshots.complete_snapshots()]
    assert (copied.count("p"), copied.count("kept"), copied.count("all_kept")) == (2, 2, 1)

    # The error of a table that waits for a person is reported, and is no event of its own.
    pipeline.commit("alter table all_kept alter v type int using 5")
    pipeline.commit("insert into all_kept values (22, 7)")
    with pytest.raises(PgcdcError, match=r"all_kept.*removes these rows"):
        pipeline.sync()
    changes = [e.change for e in pipeline.zone.schema_events.read() if e.found_by == MERGE]
    assert changes in ([], [SchemaChange.TYPE_CHANGED])
    assert ids("all_kept", 1) == [1, 11, 21]
    assert all("_old" in detail and "_older" in detail for detail in details)
