"""Partial snapshots of the tables of a pipeline."""

from __future__ import annotations

from typing import Any

from pgcdc_assets.capture.snapshots.partial import PartialSnapshot
from pgcdc_assets.capture.snapshots.pool import SnapshotReport
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline


def partial_snapshot(
    pipeline: Pipeline, predicate: str, table: str = "t", **settings: Any
) -> PartialSnapshot:
    """Return the request of a partial snapshot of a table in schema public."""
    return PartialSnapshot(
        pipeline.database.settings(),
        pipeline.zone,
        pipeline.slot,
        PUBLICATION,
        TableName("public", table),
        predicate,
        **settings,
    )


def take(pipeline: Pipeline, predicate: str, table: str = "t") -> SnapshotReport:
    """Take a partial snapshot of a table in schema public."""
    return partial_snapshot(pipeline, predicate, table).take()
