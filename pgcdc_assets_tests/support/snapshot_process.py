"""A process that takes snapshots, which failpoint tests kill.

Arguments: the connection string, the lake, the slot, the number of connections, the bytes of a
range, and the tables; without tables, all tables without a snapshot. SIGTERM interrupts the
process, as in `pgcdc sync` and in Dagster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database

# Environment variable with the connection string of the standby to read from.
_STANDBY = "PGCDC_TEST_STANDBY"


def run_snapshot_process(
    database: Database,
    zone: RawZone,
    slot: str,
    failpoint: str = "",
    *,
    parallelism: int = 1,
    range_bytes: int = 8192,
    tables: tuple[str, ...] = (),
    standby: Database | None = None,
) -> subprocess.CompletedProcess[str]:
    """Take snapshots in a process, which the failpoint ends."""
    arguments = [database.conninfo, zone.lake.uri, slot, str(parallelism), str(range_bytes)]
    return subprocess.run(
        [sys.executable, "-m", "pgcdc_assets_tests.support.snapshot_process", *arguments, *tables],
        env={
            **os.environ,
            "PGCDC_FAILPOINT": failpoint,
            _STANDBY: "" if standby is None else standby.conninfo,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    conninfo, lake, slot, parallelism, range_bytes, *names = sys.argv[1:]
    snapshot_tables(
        ConnectionSettings(conninfo, "test"),
        RawZone(Lake(lake), "test"),
        slot,
        "pub",
        [TableName.parse(name) for name in names] or None,
        policy=SnapshotPolicy(int(parallelism), int(range_bytes)),
        standby=ConnectionSettings(reached, "test") if (reached := os.environ[_STANDBY]) else None,
    )
