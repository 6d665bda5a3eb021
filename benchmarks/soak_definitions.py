"""The code location of the soak: 20 tables, windows of 0.1 s, and retention times of minutes.

Half of the tables have a history (SCD2) beside the current image.

The settings and the package keep replaced files, log entries and runs for an hour, a day or a week.
In a soak of an hour nothing would reach these ages. So the code location sets all of them to
`KEEP_SECONDS`: a minute of the soak ages the lake as hours of production do.

A merge of the soak folds fifty windows or more, a merge with the default settings a few. So a merge
of the soak materialises five windows of each table.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from deltalake import DeltaTable

from benchmarks.freshness_source import PUBLICATION, table_names
from benchmarks.scale import SCALE, scaled
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions
from pgcdc_assets.orchestration import partitions
from pgcdc_assets.raw import changes
from pgcdc_assets.raw.delta import table, vacuum
from pgcdc_assets.settings.policies import RetentionPolicy, WindowPolicy
from pgcdc_assets.tables import maintenance
from pgcdc_assets.tables.properties import LOG_RETENTION

NAME = "soak"
TABLES = 20
KEPT_KEYS = scaled(1_000, least=100)
KEEP_SECONDS = scaled(180, least=30)
MAINTENANCE_MINUTES = 5 if SCALE >= 0.5 else 2
RUN_SECONDS = scaled(180, least=60)

INTERVAL = f"interval {KEEP_SECONDS} seconds"

_SEEN = "_pgcdc_seen.json"


class _Minutes(RetentionPolicy):
    """A retention below the minimum of the settings."""

    def __post_init__(self) -> None:
        pass


def _list_old(loaded: DeltaTable, hours: int, *, is_full: bool) -> set[str]:
    """List the files that were replaced `KEEP_SECONDS` ago; delta-rs knows only whole hours.

    The age of a file counts from the first call that lists it. The lake of the soak has no orphans.
    """
    if is_full:
        return set()
    listed = loaded.vacuum(retention_hours=0, dry_run=True, enforce_retention_duration=False)
    file = Path(loaded.table_uri.removeprefix("file://")) / _SEEN
    known = json.loads(file.read_text()) if file.exists() else {}
    now = time.time()
    seen = {path: known.get(path, now) for path in listed}
    file.write_text(json.dumps(seen))
    return {path for path, since in seen.items() if since < now - KEEP_SECONDS}


vacuum._list_old = _list_old
table._PROPERTIES[LOG_RETENTION] = INTERVAL
# The maintenance of the raw zone, each 256 windows, sees a replaced file once more before the log
# forgets the file.
changes.FILE_RETENTION = f"interval {KEEP_SECONDS + 180} seconds"
# At least an hour, because VACUUM counts whole hours. With less it would delete the files that a
# running merge has written.
maintenance._LEAST_HOURS = KEEP_SECONDS / 3600

DECLARED = tuple(
    CdcTable("public", name, scd=(1, 2) if number % 2 else (1,))
    for number, name in enumerate(table_names(TABLES))
)
partitions.MAX_MATERIALIZATIONS = 5 * sum(len(table.scd) for table in DECLARED)

CAPTURE = CdcCapture(
    NAME,
    PUBLICATION,
    DECLARED,
    windows=WindowPolicy(max_age_seconds=0.1, keep=KEPT_KEYS, run_seconds=RUN_SECONDS),
    # The second core is for the capture.
    merge_parallelism=1,
    retention=_Minutes(
        raw_days=KEEP_SECONDS / 86_400,
        old_version_hours=KEEP_SECONDS / 3_600,
        record_days=KEEP_SECONDS / 86_400,
        schedule=f"*/{MAINTENANCE_MINUTES} * * * *",
    ),
)
defs = build_cdc_definitions(CAPTURE)
