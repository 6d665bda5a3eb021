"""Rows of detached and dropped partitions that stay (`on_detached_partition: keep`)."""

from __future__ import annotations

import pytest

from pgcdc_assets.errors import SchemaChangeError
from pgcdc_assets.merge import MergeFailure, rebuild_table
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.verify import Comparison, compare_at
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline
from pgcdc_assets_tests.support.verify.comparison import moment_of

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

P = CdcTable("public", "p", (1, 2), on_detached_partition="keep")
_TABLES = """
create table p (id int primary key, v text) partition by range (id);
create table old partition of p for values from (0) to (10);
create table older partition of p for values from (10) to (20);
create table rest partition of p for values from (20) to (40);
create table emptied partition of p for values from (40) to (50);
insert into p values (1, 'a'), (11, 'b'), (21, 'c'), (22, 'd'), (41, 'e')
"""


def _ids(pipeline: Pipeline, scd: int, where: str = "true") -> list[int]:
    found = pipeline.frame("p", scd).where(where).select("id").collect()
    return sorted(row.id for row in found)


def _compare(pipeline: Pipeline, table: CdcTable) -> Comparison:
    with moment_of(pipeline) as moment:
        pipeline.capture()
        return compare_at(
            pipeline.spark,
            pipeline.database.settings(),
            pipeline.zone,
            PUBLICATION,
            table.of_kinds([1]),
            moment,
        )


@pytest.mark.sampled
def test_rows_of_detached_partitions_stay_until_a_person_takes_a_snapshot(
    pipeline: Pipeline,
) -> None:
    """E3: in SCD1 and SCD2, in a rebuild, and in a comparison with the source."""
    execute = pipeline.database.execute
    execute(_TABLES)
    execute(f"create publication {PUBLICATION} for table p with (publish_via_partition_root)")
    pipeline.copy()
    execute("update p set v = 'b2' where id = 11")
    pipeline.sync(P)
    execute("alter table p detach partition old; drop table older; truncate emptied")
    pipeline.capture()
    execute("update p set v = 'c2' where id = 21; delete from p where id = 22")
    pipeline.sync(P)
    assert _ids(pipeline, 1) == _ids(pipeline, 2, "_is_current") == [1, 11, 21, 41]
    rebuild_table(pipeline.spark, pipeline.zone, P, 1)
    assert _ids(pipeline, 1) == [1, 11, 21, 41]
    found = _compare(pipeline, P)
    assert (found.is_equal, found.kept, found.source_rows, found.target_rows) == (True, 3, 1, 4)
    with pytest.raises(SchemaChangeError, match="partition_detached"):
        _compare(pipeline, CdcTable("public", "p"))
    # A row that is newer than the detachment is none of the kept rows.
    image = delta_table(pipeline.path("p"))
    pipeline.spark.sql(f"UPDATE {image} SET id = 23 WHERE id = 21")
    found = _compare(pipeline, P)
    assert (found.missing, found.extra, found.kept) == (1, 1, 3)
    pipeline.spark.sql(f"UPDATE {image} SET id = 21 WHERE id = 23")

    execute("alter table p alter v type int using 5")
    pipeline.capture()
    execute("insert into p values (24, 7)")
    pipeline.capture()
    for failure in pipeline.merge(None, P).values():
        assert isinstance(failure, MergeFailure)
        assert "has kept rows of detached partitions" in str(failure.error)
    assert _ids(pipeline, 1) == [1, 11, 21, 41]
    pipeline.copy("p")
    pipeline.sync(P)
    assert _ids(pipeline, 1) == _ids(pipeline, 2, "_is_current") == [21, 24]
    assert _compare(pipeline, P).is_equal
