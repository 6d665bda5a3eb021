"""A table of logical messages whose owner brings back an earlier version."""

from __future__ import annotations

import shutil

import pytest
from deltalake import DeltaTable

from pgcdc_assets import failpoints
from pgcdc_assets.errors import DefiniteError
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.messages import MessageTable
from pgcdc_assets_tests.tables.test_messages import contents_of, land


def _restore(zone: RawZone, version: int) -> None:
    DeltaTable(MessageTable(zone).table.uri).restore(version)


def _appended(zone: RawZone) -> tuple[int, int]:
    """Append the messages of two windows, and return the versions of their commits."""
    versions = []
    for number in range(2):
        MessageTable(zone).append(land(zone, 99 + 100 * number, str(number).encode()))
        versions.append(DeltaTable(MessageTable(zone).table.uri).version())
    first, second = versions
    return first, second


def test_a_restore_of_older_rows_is_refused_until_it_is_undone(zone: RawZone) -> None:
    """RESTORE does not reset the watermark: no append would read the window again."""
    first, second = _appended(zone)
    _restore(zone, first)
    through = land(zone, 299, b"2")
    with pytest.raises(DefiniteError, match=f"version {second + 1} is a RESTORE") as raised:
        MessageTable(zone).append(through)
    assert str(raised.value).rstrip(".").endswith(f"TO VERSION AS OF {second}")
    assert contents_of(zone) == [b"0"]
    _restore(zone, second)
    MessageTable(zone).append(through)
    assert contents_of(zone) == [b"0", b"1", b"2"]


def test_retention_removes_no_window_that_a_restored_table_lacks(zone: RawZone) -> None:
    first, _ = _appended(zone)
    _restore(zone, first)
    mark = MessageTable(zone).watermark()
    assert mark is not None
    with pytest.raises(DefiniteError, match="RESTORE"):
        MessageTable(zone).append_merged(mark)
    shutil.rmtree(MessageTable(zone).table.uri)
    MessageTable(zone).append_merged(mark)
    assert contents_of(zone) == [b"0", b"1"]


def test_a_restore_beside_an_append_refuses_its_commit(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _appended(zone)
    restored = [first]

    def reach(name: str) -> None:
        if name == failpoints.BEFORE_MESSAGES_COMMIT and restored:
            _restore(zone, restored.pop())

    monkeypatch.setattr(failpoints, "reach", reach)
    through = land(zone, 299, b"2")
    with pytest.raises(DefiniteError, match="RESTORE"):
        MessageTable(zone).append(through)
    _restore(zone, second)
    MessageTable(zone).append(through)
    assert contents_of(zone) == [b"0", b"1", b"2"]


def test_a_restore_of_the_newest_append_is_no_obstacle(zone: RawZone) -> None:
    """The compaction of the maintenance moves rows only."""
    _, second = _appended(zone)
    MessageTable(zone).maintain(minimum_files=2)
    _restore(zone, second)
    assert contents_of(zone) == [b"0", b"1"]
    MessageTable(zone).append(land(zone, 299, b"2"))
    assert contents_of(zone) == [b"0", b"1", b"2"]
