"""The key range of a MERGE's join contains the changes, and is often the same."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.merge.fold.key_range import ColumnRange, KeyRange, widen_range

_BITS = {"SMALLINT": 16, "INT": 32, "BIGINT": 64}


@given(st.data(), st.sampled_from(sorted(_BITS)))
def test_a_widened_range_contains_the_range_and_fits_the_type(
    data: st.DataObject, ddl: str
) -> None:
    limit = 1 << (_BITS[ddl] - 1)
    values = st.integers(-limit, limit - 1)
    least, most = sorted((data.draw(values), data.draw(values)))
    low, high = widen_range(least, most, ddl)
    assert -limit <= low <= least <= most <= high < limit
    length = most - least + 1
    assert least - low <= length / 4 and high - most <= length


def test_new_keys_at_the_upper_end_seldom_change_the_range() -> None:
    ranges = [widen_range(9_000_000, 10_000_000 + 20_000 * step, "BIGINT") for step in range(20)]
    assert len(set(ranges)) <= 3


@pytest.mark.parametrize(
    ("least", "most", "rows"),
    [(0, 999, 1000), (0, 499, 500), (250, 1249, 750), (1000, 2000, 0), (-10, -1, 0)],
)
def test_rows_in_a_range_are_estimated_from_the_files_statistics(
    least: int, most: int, rows: int
) -> None:
    files = pa.table(
        {
            "num_records": [1000, 1000],
            "min.id": pa.array([0, None], pa.int64()),
            "max.id": pa.array([999, None], pa.int64()),
        }
    )
    # All rows of a file without statistics may be in the range.
    known, unknown = files.slice(0, 1), files.slice(1)
    key_range = KeyRange((ColumnRange("id", "BIGINT", least, most),))
    assert key_range.estimate_rows(unknown) == 1000
    assert key_range.estimate_rows(known) == rows
    assert key_range.estimate_rows(known.drop_columns(["min.id"])) is None
    counted = known.set_column(0, "num_records", pa.array([None], pa.int64()))
    assert key_range.estimate_rows(counted) is None
