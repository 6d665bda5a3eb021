"""A command notices that the merges have not applied its new snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc_assets.errors import TransientError
from pgcdc_assets.orchestration.runs.applied_snapshots import check_new_applied, find_merged
from pgcdc_assets.raw.snapshots import SnapshotStore
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

T = CdcTable("public", "t", (1, 2))


@pytest.mark.sampled
def test_a_merge_that_passed_a_snapshot_unseen_is_noticed(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge of another Dagster instance was planned before the snapshot was landed."""
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    assert find_merged(pipeline.zone, [T]) == {}
    pipeline.sync(T)
    before = find_merged(pipeline.zone, [T])
    pipeline.copy("t")
    pipeline.database.execute("update t set v = 'b'")
    real = SnapshotStore.complete_snapshots

    def without_newest(store: SnapshotStore, epoch: int | None = None) -> Any:
        return real(store, epoch)[:1]

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotStore, "complete_snapshots", without_newest)
        pipeline.sync(T)
    with pytest.raises(TransientError, match=r"public\.t past the LSN .*Run it again"):
        check_new_applied(pipeline.zone, before)

    before = find_merged(pipeline.zone, [T])
    pipeline.copy("t")
    pipeline.database.execute("update t set v = 'c'")
    pipeline.sync(T)
    check_new_applied(pipeline.zone, before)
    pipeline.assert_equal("t")
