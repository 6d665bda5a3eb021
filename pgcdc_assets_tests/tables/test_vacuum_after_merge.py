"""The checks for replaced files after merges."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables import vacuum
from pgcdc_assets.tables.vacuum import (
    MINIMUM_BYTES,
    is_check_due,
    vacuum_after_merge,
)
from pgcdc_assets_tests.support.rewritten_table import data_files, make_table, write


@pytest.fixture
def path(lake: Lake) -> Path:
    """Return a table at version 10, with ten replaced files as large as its only file."""
    return make_table(lake)


@pytest.fixture
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum, "MINIMUM_BYTES", 0)


@pytest.fixture
def _unshifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a table at versions 0, 3, 6 and so on, whatever its path is."""
    monkeypatch.setattr(vacuum, "has_turn", lambda _, version, interval: version % interval == 0)


@pytest.mark.usefixtures("_nothing_is_small", "_unshifted")
@pytest.mark.parametrize(("ratio", "deleted"), [(11.5, 12), (12.5, 0)])
def test_a_merge_deletes_replaced_files_that_exceed_the_table(
    lake: Lake, path: Path, ratio: float, deleted: int
) -> None:
    write(path, 11)
    write(path, 12)  # Of three versions one is examined.
    report = vacuum_after_merge(lake, str(path), 0, ratio)
    assert report.deleted_files == deleted
    assert len(data_files(path)) == 13 - deleted


@pytest.mark.usefixtures("_unshifted")
def test_a_small_excess_is_not_deleted(lake: Lake, path: Path) -> None:
    write(path, 11)
    write(path, 12)  # Of three versions one is examined.
    report = vacuum_after_merge(lake, str(path), 0, 0)
    assert 0 < report.replaced_bytes < MINIMUM_BYTES
    assert (report.deleted_files, len(data_files(path))) == (0, 13)


@pytest.mark.usefixtures("_nothing_is_small", "_unshifted")
@pytest.mark.parametrize("versions", [1, 2])
def test_one_of_three_merges_examines_the_log(lake: Lake, path: Path, versions: int) -> None:
    """A merge writes one version, or two."""
    looked, expected = [], [0] * 9
    expected[3 - versions :: 3] = [12, 3 * versions, 3 * versions]
    for number in range(9):
        looked.append(vacuum_after_merge(lake, str(path), 0, 0).deleted_files)
        for _ in range(versions):
            write(path, number)
    assert looked == expected


def test_tables_of_one_version_are_examined_at_different_merges() -> None:
    paths = [f"lake/t{number}" for number in range(300)]
    for version in range(9):
        assert 70 < sum(is_check_due(path, version) for path in paths) < 130
    for path in paths:
        assert sum(is_check_due(path, version) for version in range(9)) == 3
