"""The table of logical messages is a function of the raw zone, and has each message once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from pgcdc_assets import failpoints
from pgcdc_assets.errors import RawExpired, RawZoneError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.protocol.utf8 import text_of_bytes
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets.raw.retention import remove_windows
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables import messages
from pgcdc_assets.tables.messages import MessageTable
from pgcdc_assets_tests.support.raw.epochs import EPOCH
from pgcdc_assets_tests.support.raw.rows import COMMIT_TS, batch, change, transaction, window


def message(commit_lsn: int, content: bytes, ordinal: int = 0, **values: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("relation_id", "relation_version", "schema", "table"))
    row["op"] = "M"
    row["new"] = [values.pop("prefix", "audit"), text_of_bytes(content)]
    return change(commit_lsn, ordinal, **row, **values)


def land(zone: RawZone, start: int, *contents: bytes, epoch: int = 1) -> Position:
    """Land a window of 100 with messages and a change, and return its end."""
    if epoch not in [each.epoch for each in zone.epochs.all()]:
        zone.epochs.append(replace(EPOCH, epoch=epoch))
    rows = [message(start + 8, content, number) for number, content in enumerate(contents)]
    zone.changes.land(window(start, start + 100, epoch), [batch(*rows), transaction(start + 16, 1)])
    return Position(epoch, Lsn(start + 100))


def rows_of(zone: RawZone) -> list[dict[str, Any]]:
    table = DeltaTable(zone.lake.path(zone.name, "messages")).to_pyarrow_table()
    rows: list[dict[str, Any]] = table.to_pylist()
    return sorted(rows, key=lambda row: (row["epoch"], row["commit_lsn"], row["ordinal"]))


def contents_of(zone: RawZone) -> list[bytes]:
    return [row["content"] for row in rows_of(zone)]


def test_each_column_has_its_type_and_the_content_keeps_its_bytes(zone: RawZone) -> None:
    zone.epochs.append(EPOCH)
    contents = {
        b"plain": ("plain", False),
        b"": ("", False),
        b'{"a": [1, 2.5e999, null]}': ('{"a": [1, 2.5e999, null]}', True),
        b"1" * 5000: ("1" * 5000, True),
        b'{"a": NaN}': ('{"a": NaN}', False),
        b"[" * 100_000: ("[" * 100_000, False),
        b"\xff\x00": (None, False),
        b"\x00text": ("\x00text", False),
        "\N{SNOWMAN}".encode(): ("\N{SNOWMAN}", False),
    }
    rows = [message(100 + 8 * number, content) for number, content in enumerate(contents)]
    rows.append(message(190, b"", xid=0, prefix='a "b"', origin="elsewhere"))
    zone.changes.land(window(99, 200), [batch(*rows), transaction(192, 3)])
    report = MessageTable(zone).append(Position(1, Lsn(200)))

    assert (report.row_count, report.watermark) == (len(contents) + 1, Position(1, Lsn(200)))
    found = rows_of(zone)
    assert [row["content"] for row in found[:-1]] == list(contents)
    assert [(row["text"], row["is_json"]) for row in found[:-1]] == list(contents.values())
    assert found[0] == {
        "epoch": 1,
        "commit_lsn": 100,
        "ordinal": 0,
        "xid": 800,
        "commit_ts": COMMIT_TS,
        "origin": None,
        "transactional": True,
        "prefix": "audit",
        "content": b"plain",
        "text": "plain",
        "is_json": False,
    }
    last = found[-1]
    assert (last["xid"], last["transactional"], last["prefix"]) == (None, False, 'a "b"')
    assert last["origin"] == "elsewhere"


def test_a_long_text_is_not_parsed(zone: RawZone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "LONGEST_JSON", 10)
    through = land(zone, 99, b"[1, 2, 3]", b"[1, 2, 3, 4]")
    MessageTable(zone).append(through)
    assert [row["is_json"] for row in rows_of(zone)] == [True, None]


def test_an_append_that_is_repeated_or_late_changes_nothing(zone: RawZone) -> None:
    table = MessageTable(zone)
    first = land(zone, 99, b"1")
    assert table.append(first).row_count == 1
    second, third = land(zone, 199, b"2", b"3"), land(zone, 299, b"4")
    assert table.append(third).row_count == 3
    for again in (first, second, third):
        assert (table.append(again).row_count, table.watermark()) == (0, third)
    assert contents_of(zone) == [b"1", b"2", b"3", b"4"]


def test_windows_that_are_not_landed_are_refused(zone: RawZone) -> None:
    table = MessageTable(zone)
    end = land(zone, 99, b"1")
    with pytest.raises(RawZoneError, match="not landed yet"):
        table.append(Position(1, Lsn(end.lsn + 1)))
    with pytest.raises(RawZoneError, match="not landed yet"):
        table.append(Position(2, Lsn(1)))
    assert table.watermark() is None


@pytest.mark.parametrize("epoch", [1, 2])
def test_of_two_appends_at_the_same_time_one_wins(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """The faster append may know a later epoch."""
    first = land(zone, 99, b"1")
    later = land(zone, 199, b"2", epoch=epoch)
    reach = failpoints.reach
    inner: list[Any] = []

    def append_meanwhile(name: str) -> None:
        reach(name)
        if name == failpoints.BEFORE_MESSAGES_COMMIT and not inner:
            inner.append(None)
            inner[0] = MessageTable(RawZone(zone.lake, zone.name)).append(later)

    monkeypatch.setattr(failpoints, "reach", append_meanwhile)
    outer = MessageTable(zone).append(first)
    assert (outer.row_count, inner[0].row_count) == (0, 2)
    assert contents_of(zone) == [b"1", b"2"]
    assert len(list(Path(zone.lake.path(zone.name, "messages")).glob("*.parquet"))) == 1


@pytest.mark.parametrize(
    "failpoint", [failpoints.BEFORE_MESSAGES_COMMIT, failpoints.AFTER_MESSAGES_COMMIT]
)
def test_after_a_kill_each_message_is_there_once(zone: RawZone, failpoint: str) -> None:
    through = land(zone, 99, b"1", b"2")
    program = f"""
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.messages import MessageTable
MessageTable(RawZone(Lake({zone.lake.uri!r}), {zone.name!r})).append(Position(1, Lsn(199)))
"""
    killed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PGCDC_FAILPOINT": failpoint},
        check=False,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    MessageTable(zone).append(through)
    assert contents_of(zone) == [b"1", b"2"]


def test_a_new_or_deleted_table_is_filled_from_all_epochs_of_the_raw_zone(zone: RawZone) -> None:
    land(zone, 99, b"1")
    land(zone, 199)
    land(zone, 299, b"2")
    through = land(zone, 99, b"3", epoch=2)
    assert MessageTable(zone).append(through).row_count == 3
    before = rows_of(zone)
    assert [(row["epoch"], row["content"]) for row in before] == [(1, b"1"), (1, b"2"), (2, b"3")]

    shutil.rmtree(zone.lake.path(zone.name, "messages"))
    MessageTable(zone).append(through)
    assert rows_of(zone) == before


def test_heartbeats_are_no_rows_and_do_not_wait(zone: RawZone) -> None:
    zone.epochs.append(EPOCH)
    heartbeat = batch(message(120, b"", prefix="pgcdc"))
    zone.changes.land(window(99, 200), [heartbeat])
    table, end = MessageTable(zone), Position(1, Lsn(200))
    assert table.find_waiting(None, end) is None
    assert table.append(end).row_count == 0
    assert table.watermark() is None
    end = land(zone, 200, b"1")
    assert table.find_waiting(None, end) == end
    assert table.find_waiting(end, end) is None


def test_windows_that_retention_has_removed_above_the_watermark_are_an_error(
    zone: RawZone,
) -> None:
    table = MessageTable(zone)
    table.append(land(zone, 99, b"1"))
    land(zone, 199, b"2")
    through = land(zone, 299, b"3")
    late = COMMIT_TS.replace(year=2027)
    remove_windows(zone, 1, Lsn(299), late)
    with pytest.raises(RawExpired, match="logical messages") as raised:
        table.append(through)
    assert "Move the table's folder away" in str(raised.value)
    shutil.rmtree(zone.lake.path(zone.name, "messages"))
    assert MessageTable(zone).append(through).row_count == 1


def test_an_empty_append_moves_the_watermark_for_retention(zone: RawZone) -> None:
    table = MessageTable(zone)
    table.append(land(zone, 99, b"1"))
    quiet = land(zone, 199)
    assert table.append(quiet).watermark == Position(1, Lsn(199))
    assert table.append(quiet, commits_empty=True).watermark == quiet
    remove_windows(zone, 1, quiet.lsn, COMMIT_TS.replace(year=2027))
    table.append(land(zone, 299, b"2"))
    assert contents_of(zone) == [b"1", b"2"]


def test_a_table_that_is_merged_above_the_landed_windows_does_not_stop_retention(
    zone: RawZone,
) -> None:
    """A new snapshot may be above the landed windows, and a new epoch has no window at first."""
    table = MessageTable(zone)
    end = land(zone, 99, b"1")
    assert table.append_merged(Position(1, Lsn(end.lsn + 1000))).watermark == end
    remove_windows(zone, 1, end.lsn, COMMIT_TS.replace(year=2027))
    land(zone, 199, b"2")
    zone.epochs.append(replace(EPOCH, epoch=2))
    assert table.append_merged(Position(2, Lsn(1000))).row_count == 1
    remove_windows(zone, 1, None, COMMIT_TS.replace(year=2027))
    table.append(land(zone, 99, b"3", epoch=2))
    assert contents_of(zone) == [b"1", b"2", b"3"]


def test_maintenance_compacts_small_files_and_keeps_rows_and_watermark(zone: RawZone) -> None:
    table = MessageTable(zone)
    for number in range(5):
        table.append(land(zone, 99 + 100 * number, str(number).encode()))
    before, mark = rows_of(zone), table.watermark()
    table.maintain(minimum_files=2)
    maintain_raw_zone(zone, minimum_files=2, minimum_log_entries=1)
    assert len(DeltaTable(zone.lake.path(zone.name, "messages")).file_uris()) == 1
    assert (rows_of(zone), table.watermark()) == (before, mark)
    table.append(land(zone, 599, json.dumps([1]).encode()))
    assert len(rows_of(zone)) == len(before) + 1


def test_a_damaged_file_is_an_error_of_the_maintenance_that_names_the_table(zone: RawZone) -> None:
    table = MessageTable(zone)
    for number in range(2):
        table.append(land(zone, 99 + 100 * number, str(number).encode()))
    next(Path(table.table.uri).rglob("*.parquet")).write_bytes(b"PAR1")
    with pytest.raises(RawZoneError, match=f"{table.table.uri}: a file of its log is damaged"):
        table.maintain(minimum_files=2)
