"""Copied tables whose newest snapshot has no materialisation of the snapshot asset.

A run of snapshots materialises its tables at its end. If it is killed, its successor copies only
the other tables, so the sensor records the tables that were copied completely. A killed
re-snapshot, and one of another Dagster instance, replace the record of an older snapshot.
"""

from __future__ import annotations

import time
from typing import Any

import dagster as dg

from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.runs.records import find_unfinished
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture

# Dagster returns at most this number of records at a time.
_MOST_RECORDS = 1000
# Records that a person wipes in the UI are made again after this time.
SECONDS = 60.0


class UnrecordedSnapshots:
    """The copied tables that Dagster does not show.

    A raw zone whose tables were all shown is examined again after its next snapshot, and after a
    while.
    """

    def __init__(self, capture: CdcCapture, snapshot: dg.AssetKey) -> None:
        """Create the answer for all evaluations of a sensor.

        Args:
            snapshot: the snapshot asset, whose partitions are the tables.
        """
        self._capture = capture
        self._snapshot = snapshot
        self._shown: tuple[str, int, int | None] | None = None
        self._examined_at = 0.0

    def find(
        self, instance: dg.DagsterInstance, zone: RawZone, epoch: Epoch
    ) -> list[dg.AssetMaterialization]:
        """Return the missing materialisations; none while a run takes snapshots."""
        table = zone.snapshots.table.newest()
        seen = zone.uri, epoch.epoch, None if table is None else table.version()
        now = time.monotonic()
        if self._shown == seen and now < self._examined_at + SECONDS:
            return []
        work = Names.of(self._capture).snapshot_work
        if find_unfinished(instance, work, {self._snapshot}) is not None:
            return []
        newest = self._newest(zone, epoch)
        shown = self._shown_positions(instance)
        missing = [
            copied
            for key, copied in newest.items()
            if key not in shown or (shown[key] or copied.position) < copied.position
        ]
        if not missing:
            self._shown, self._examined_at = seen, now
        return [
            dg.AssetMaterialization(
                self._snapshot, partition=copied.name.partition_key, metadata=_metadata(copied)
            )
            for copied in missing
        ]

    def _shown_positions(self, instance: dg.DagsterInstance) -> dict[str, Position | None]:
        """Return the position of the newest recorded snapshot of each table; None if unknown."""
        storage = instance.event_log_storage
        newest = storage.get_latest_storage_id_by_partition(
            self._snapshot, dg.DagsterEventType.ASSET_MATERIALIZATION
        )
        shown: dict[str, Position | None] = dict.fromkeys(newest)
        ids = list(newest.values())
        for first in range(0, len(ids), _MOST_RECORDS):
            some = ids[first : first + _MOST_RECORDS]
            wanted = dg.AssetRecordsFilter(self._snapshot, storage_ids=some)
            for record in instance.fetch_materializations(wanted, limit=_MOST_RECORDS).records:
                if record.partition_key is not None and record.asset_materialization is not None:
                    shown[record.partition_key] = _position(record.asset_materialization)
        return shown

    def _newest(self, zone: RawZone, epoch: Epoch) -> dict[str, Snapshot]:
        """Return the newest complete snapshot of each declared table."""
        declared = {table.partition_key for table in self._capture.tables}
        copied = zone.snapshots.complete_snapshots(epoch.epoch)
        return {s.name.partition_key: s for s in copied if s.name.partition_key in declared}


def _position(recorded: dg.AssetMaterialization) -> Position | None:
    epoch, lsn = (recorded.metadata.get(name) for name in ("epoch", "snapshot_lsn"))
    if epoch is None or lsn is None:
        return None
    return Position(int(str(epoch.value)), Lsn.parse(str(lsn.value)))


def _metadata(copied: Snapshot) -> dict[str, Any]:
    return {
        "dagster/partition_row_count": copied.row_count,
        "snapshot_lsn": str(copied.snapshot_lsn),
        "epoch": str(copied.epoch),
    }
