"""The daily job on a lake in an S3 store: retention, compaction, and deletion of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgcdc_assets.demo.object_store import ObjectStore
from pgcdc_assets.raw.delta.compaction import MINIMUM_FILES
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation, update
from pgcdc_assets_tests.support.object_store import StoreProxy, check_commits

_WINDOWS = MINIMUM_FILES + 6
_WEEKS = 15 * 24 * 3600


@pytest.mark.spark
@pytest.mark.soak
def test_the_daily_job_deletes_what_expired_and_compacts_the_rest(
    s3_lake: Lake, object_store: ObjectStore, store_proxy: StoreProxy
) -> None:
    zone = RawZone(s3_lake, "test")
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"], ["2", "b"]])
    landing.land([])
    for number in range(_WINDOWS):
        landing.land([insert(str(number + 10), "new"), update("1", f"{number}")])
    changes = zone.changes.table.load()
    assert changes is not None
    files = len(changes.file_uris())
    folder = object_store.folder / "objects" / s3_lake.uri.removeprefix("s3://")
    history = table_path(s3_lake, "test", "shop", "items", 2).removeprefix(f"{s3_lake.uri}/")
    orphans = [folder / history / "part-orphan.parquet", folder / "test/raw/changes/orphan.parquet"]
    for orphan in orphans:
        orphan.parent.mkdir(parents=True, exist_ok=True)
        orphan.write_bytes(b"half a file")
    _make_old(folder)

    keys = [window.key for window in landing.windows]
    program = "pgcdc_assets_tests.support.orchestration.daily_job"
    done = subprocess.run(
        [sys.executable, "-m", program, s3_lake.uri, *keys],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["merged"] == found["maintained"]
    assert len(found["merged"]["scd1"]) == _WINDOWS + 2
    assert len(found["merged"]["scd2"]) == 2 * _WINDOWS + 2
    # A window holds the last change of its files; whole files before it are deleted.
    assert len(found["keys"]) < len(keys)
    assert found["rebuilt"] == "RawExpired"
    after = zone.changes.table.load()
    assert after is not None
    assert len(after.file_uris()) < files - MINIMUM_FILES
    assert [orphan.exists() for orphan in orphans] == [False, False]
    log = folder / history / "_delta_log"
    entries = [int(entry.stem) for entry in log.glob("0*.json")]
    opened = DeltaTable(s3_lake.path(*history.split("/")), storage_options=s3_lake.delta_options)
    assert opened.version() == max(entries)
    check_commits(store_proxy, s3_lake, s3_lake.path(*history.split("/")), "OPTIMIZE")
    assert store_proxy.log_entries()


def _make_old(folder: Path) -> None:
    """Give all objects of the store an earlier time."""
    then = time.time() - _WEEKS
    for path in folder.rglob("*"):
        os.utime(path, (then, then))
