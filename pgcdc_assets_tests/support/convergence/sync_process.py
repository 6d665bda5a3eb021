"""A process that tests kill. It takes the missing snapshots, and then captures windows.

The process prints `ready` after its imports, so that a kill at a random time interrupts its work.
With `--merge` the process also merges the tables, in its own Spark session.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.session import CaptureSession
from pgcdc_assets.capture.snapshots.pool import SnapshotFailure
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.postgres.wal.positions import read_barrier
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.convergence.workload import KEYED

# With small batches, a transaction spans several batches and may be cut at any point.
LIMITS = CaptureLimits(
    slot_wait_seconds=2, stream=StreamSettings(wire=WireSettings(batch_bytes=16_384))
)
RETRY_SECONDS = 30
WINDOWS = 4


def copy(settings: ConnectionSettings, zone: RawZone, slot: str, publication: str) -> None:
    copied = {copy.table for copy in zone.snapshots.complete_snapshots()}
    missing = [TableName("public", table) for table in KEYED if table not in copied]
    if missing:
        for report in snapshot_tables(settings, zone, slot, publication, missing):
            if isinstance(report, SnapshotFailure):
                raise report.error


def capture(
    settings: ConnectionSettings,
    zone: RawZone,
    slot: str,
    publication: str,
    decide: random.Random,
    limits: CaptureLimits = LIMITS,
) -> None:
    """Capture all earlier commits by one session, in a few windows of random size and a last."""
    with query_connection(settings, "test") as conn:
        barrier = read_barrier(conn)
    epoch = zone.epochs.latest()
    assert epoch is not None
    with CaptureSession(settings, zone, slot, publication, limits) as session:
        for number in range(WINDOWS):
            start = zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
            if start >= barrier:
                break
            end = min(barrier, Lsn(start + int(10 ** decide.uniform(3, 6.5))))
            end = barrier if number == WINDOWS - 1 else end
            session.land(LsnWindow.of(epoch.epoch, start, end))
            maintain_raw_zone(zone, minimum_files=4, minimum_log_entries=8)
        session.finish()


def merge(zone: RawZone) -> None:
    from pgcdc_assets.merge import MergeFailure, merge_tables
    from pgcdc_assets.settings import CdcTable
    from pgcdc_assets.spark.session import spark_session

    epoch = zone.epochs.latest()
    assert epoch is not None
    conf = {"spark.master": "local[2]", "spark.sql.shuffle.partitions": "2"}
    spark = spark_session("convergence", conf={**conf, "spark.ui.enabled": "false"})
    targets = [CdcTable("public", table) for table in KEYED]
    for report in merge_tables(spark, zone, targets, zone.changes.windows(epoch.epoch)[-1].window):
        if isinstance(report, MergeFailure):
            raise report.error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("facts", type=json.loads)
    options = parser.parse_args()
    facts = options.facts
    settings = ConnectionSettings(conninfo=facts["conninfo"], name="test")
    zone = RawZone(Lake(facts["lake"]), "test")
    decide = random.Random(facts["seed"])
    print("ready", flush=True)
    # The server notices the end of a killed predecessor's sessions after some time.
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            copy(settings, zone, facts["slot"], facts["publication"])
            capture(settings, zone, facts["slot"], facts["publication"], decide)
            break
        except TransientError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    if options.merge:
        merge(zone)


if __name__ == "__main__":
    main()
