"""The range of keys beside a MERGE's join: it holds the changes, and seldom moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.merge.bounds import widened

_BITS = {"SMALLINT": 16, "INT": 32, "BIGINT": 64}


@given(st.data(), st.sampled_from(sorted(_BITS)))
def test_a_widened_range_holds_the_range_and_fits_the_type(data: st.DataObject, ddl: str) -> None:
    limit = 1 << (_BITS[ddl] - 1)
    values = st.integers(-limit, limit - 1)
    least, most = sorted((data.draw(values), data.draw(values)))
    low, high = widened(least, most, ddl)
    assert -limit <= low <= least <= most <= high < limit
    length = most - least + 1
    assert least - low <= length / 4 and high - most <= length


def test_while_new_keys_come_at_the_upper_end_the_range_is_mostly_the_same() -> None:
    ranges = [widened(9_000_000, 10_000_000 + 20_000 * step, "BIGINT") for step in range(20)]
    assert len(set(ranges)) <= 3
