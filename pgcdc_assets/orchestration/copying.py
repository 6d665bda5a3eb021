"""Tables that are being copied anew: they are not merged meanwhile.

A copy is the table at an LSN that is taken after its run has begun. A merge that went past it would
leave nothing to do for the copy, and what it was taken for (a column's default, the rows of an
attached partition, a difference that was found) would stay as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg
from dagster import DagsterRun, DagsterRunStatus, RunsFilter

from pgcdc_assets.merge.watermark import read_watermark
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.settings import CdcCapture, CdcTable
from pgcdc_assets.raw.zone import RawZone

_STARTED = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]

_PARTITION = "dagster/partition"
_FIRST = "dagster/asset_partition_range_start"
_LAST = "dagster/asset_partition_range_end"

SNAPSHOT_LSN_PASSED = (
    "it was merged past the copy's LSN while it was copied, so the copy is not applied. Copy it "
    "again, or rebuild it with `pgcdc rebuild`, which begins with the newest copy."
)


@dataclass(frozen=True)
class Copying:
    """Finds the tables of a capture that are being copied.

    Attributes:
        snapshot: the key of the snapshot asset, whose partitions are the tables.
    """

    capture: CdcCapture
    snapshot: dg.AssetKey

    def find(self, instance: dg.DagsterInstance, zone: RawZone) -> frozenset[str]:
        """Name the tables that have contents and are being copied anew.

        Whoever chose through which LSN to merge before it asked here is safe: a copy that begins
        later is above that LSN.
        """
        job = Names.of(self.capture).snapshot_job
        order = [table.qualified_name for table in self.capture.tables]
        copied: set[str] = set()
        for run in instance.get_runs(RunsFilter(statuses=_STARTED)):
            if run.job_name == job or self.snapshot in (run.asset_selection or ()):
                copied |= _partitions(run, order)
        return frozenset(
            table.qualified_name
            for table in self.capture.tables
            if table.qualified_name in copied and is_merged(zone, table)
        )


def is_merged(zone: RawZone, table: CdcTable) -> bool:
    """Say whether something was merged into a table before."""
    marks = (
        read_watermark(zone.lake, zone.name, table.schema, table.table, scd) for scd in table.scd
    )
    return any(mark is not None for mark in marks)


def _partitions(run: DagsterRun, order: Sequence[str]) -> set[str]:
    """Name the partitions of a run: one, a range, or all where it does not say."""
    one = run.tags.get(_PARTITION)
    if one is not None:
        return {one}
    first, last = run.tags.get(_FIRST), run.tags.get(_LAST)
    if first in order and last in order:
        return set(order[order.index(first) : order.index(last) + 1])
    return set(order)
