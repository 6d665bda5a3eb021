"""Tables with a running re-snapshot; they are not merged until the re-snapshot ends.

The LSN of a snapshot is later than the start of its run. If a merge passed this LSN, the snapshot
would not be applied, and its reason (a column's default, the rows of an attached partition, a
difference that was found) would remain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import dagster as dg
from dagster import DagsterRunStatus, RunsFilter

from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.partitions import covered_keys
from pgcdc_assets.orchestration.runs.records import is_materialising
from pgcdc_assets.orchestration.state import newest_snapshots, watermarks
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture

# The snapshots for which the sensor has chosen the tables of a merge.
SNAPSHOTS_TAG = "pgcdc/snapshots"

_STARTED = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]


@dataclass(frozen=True)
class RunningSnapshots:
    """Finds the tables of a capture with a running re-snapshot.

    Attributes:
        snapshot: the key of the snapshot asset, whose partitions are the tables.
    """

    capture: CdcCapture
    snapshot: dg.AssetKey

    def find(self, instance: dg.DagsterInstance, zone: RawZone) -> frozenset[str]:
        """List the partitions of the merged tables with a running re-snapshot.

        Choose the LSN to merge through before this call. A snapshot that begins later then has a
        higher LSN.
        """
        work, keys = Names.of(self.capture).snapshot_work, {self.snapshot}
        order = [table.partition_key for table in self.capture.tables]
        copied: set[str] = set()
        for run in instance.get_runs(RunsFilter(statuses=_STARTED)):
            if is_materialising(instance, run, work, keys):
                copied.update(covered_keys(run.tags, order))
        return frozenset(
            table.partition_key
            for table in self.capture.tables
            if table.partition_key in copied and watermarks(zone, table)
        )

    def digest(self, zone: RawZone, running: Collection[str]) -> str:
        """Return a short text that changes when other tables can be merged after a snapshot.

        The complete snapshots of a run that still takes others do not count, because its tables
        wait for its end. Tables that are not declared do, because newer code may declare them.

        Args:
            running: the result of `find`.
        """
        epoch = zone.epochs.latest()
        newest = {} if epoch is None else newest_snapshots(zone, epoch)
        known = sorted(
            (name.partition_key, str(position))
            for name, position in newest.items()
            if name.partition_key not in running
        )
        text = repr((0 if epoch is None else epoch.epoch, known, sorted(running)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
