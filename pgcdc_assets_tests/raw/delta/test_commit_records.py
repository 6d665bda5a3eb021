"""The records in log entries: each entry is read once, and again after a restore."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.delta import commit_records
from pgcdc_assets.raw.delta.log_entries import commit_path, read_commit
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.zone import RawZone


@pytest.fixture
def zone(tmp_path: Path) -> RawZone:
    """Land five windows without rows."""
    zone = RawZone(Lake(str(tmp_path)), "shop")
    for number in range(5):
        zone.changes.land(LsnWindow.of(1, Lsn(number * 100), Lsn(number * 100 + 100)), [])
    return zone


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the versions of the log entries that are read."""
    versions: list[int] = []
    real = read_commit

    def read(files: Any, version: int) -> list[dict[str, Any]]:
        versions.append(version)
        return real(files, version)

    monkeypatch.setattr(commit_records, "read_commit", read)
    return versions


def test_a_window_costs_the_reading_of_its_own_log_entry(zone: RawZone, reads: list[int]) -> None:
    """Otherwise each window would read all entries since the last maintenance."""
    assert len(zone.changes.windows(1)) == 5
    reads.clear()
    window = LsnWindow.of(1, Lsn(500), Lsn(600))
    zone.changes.land(window, [])
    assert zone.changes.recount(window).is_complete
    assert len(zone.changes.windows(1)) == 6
    assert len(reads) == 1


def test_an_entry_is_read_again_after_a_restore(zone: RawZone) -> None:
    assert zone.changes.windows(1)[-1].row_count == 0
    table = zone.changes.table.newest()
    assert table is not None
    entry = Path(zone.changes.table.uri, commit_path(table.version()))
    before = entry.stat()
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if "commitInfo" in action:
            action["commitInfo"]["pgcdc"]["row_count"] = 7
    entry.write_text("\n".join(map(json.dumps, actions)))
    os.utime(entry, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert zone.changes.windows(1)[-1].row_count == 7


def test_entries_from_before_a_maintenance_are_forgotten(zone: RawZone, reads: list[int]) -> None:
    """A process that reads the lake for weeks would keep the record of each window."""
    assert len(zone.changes.windows(1)) == 5
    maintain_raw_zone(zone, minimum_log_entries=1)
    for number in range(5, 8):
        zone.changes.land(LsnWindow.of(1, Lsn(number * 100), Lsn(number * 100 + 100)), [])
        assert len(zone.changes.windows(1)) == number + 1
    reads.clear()
    (kept,) = [
        known for (uri, _), known in commit_records._KNOWN.items() if uri == zone.changes.table.uri
    ]
    # The last saved entry shows that `raw/windows` belongs to this log.
    assert sum(len(entry.records) for entry in kept.values()) == 4
    assert len(zone.changes.windows(1)) == 8
    assert reads == []


def test_a_removed_entry_is_an_error(zone: RawZone) -> None:
    table = zone.changes.table.newest()
    assert table is not None
    Path(zone.changes.table.uri, commit_path(table.version())).unlink()
    with pytest.raises(FileNotFoundError):
        zone.changes.table.entries(table, 1)
