"""Checkpoints of SCD tables in an S3 store whose answers are lost."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable, PostCommitHookProperties, write_deltalake

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.checkpoints import keep_checkpoints
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.object_store_proxy import Fault


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["SlowDown after", "cut after", "cut"])
@pytest.mark.parametrize("part", [".checkpoint.parquet", "_last_checkpoint"])
def test_a_checkpoint_whose_answer_is_lost_harms_no_version(
    part: str, what: str, s3_lake: Lake, store_proxy: StoreProxy
) -> None:
    lake = Lake(s3_lake.uri, {"timeout": "5s", "retry_timeout": "10s"})
    path, options = lake.path("t"), lake.delta_options

    def append(row: int) -> None:
        write_deltalake(
            path,
            pa.table({"id": [row]}),
            mode="append",
            configuration={"delta.checkpointInterval": "2"},
            storage_options=options,
            post_commithook_properties=PostCommitHookProperties(create_checkpoint=False),
        )

    append(0)
    for row in range(1, 8):
        before = DeltaTable(path, storage_options=options)
        append(row)
        with store_proxy.making(Fault(what, "PUT", part, times=1)):
            keep_checkpoints(lake, path, before)
        rows = DeltaTable(path, storage_options=options).to_pyarrow_table().column("id")
        assert sorted(rows.to_pylist()) == list(range(row + 1))
    assert store_proxy.faults()[what] >= 3
