"""The files of the raw zone with changes of a range."""

from __future__ import annotations

import pytest

from pgcdc_assets.raw.delta.scan import change_files
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw.rows import transaction, window


@pytest.mark.parametrize(
    ("start", "end", "file_count", "are_inside"),
    [
        pytest.param(100, 300, 2, True, id="both windows"),
        pytest.param(100, 200, 1, True, id="one window"),
        pytest.param(110, 151, 1, True, id="all commits of a window"),
        pytest.param(111, 200, 1, False, id="without the first commit"),
        pytest.param(100, 150, 1, False, id="without the last commit"),
        pytest.param(120, 300, 2, False, id="from the middle of a window on"),
        pytest.param(300, 400, 0, True, id="after all of them"),
    ],
)
def test_files_inside_the_range_are_distinguished_from_files_beyond_it(
    zone: RawZone, start: int, end: int, file_count: int, are_inside: bool
) -> None:
    zone.changes.land(window(100, 200), [transaction(110, 3), transaction(150, 2)])
    zone.changes.land(window(200, 300), [transaction(250, 2)])
    files = change_files(zone.changes.table, 1, start, end)
    assert (len(files.addresses), files.are_inside) == (file_count, are_inside)
