"""The number of small files at which a table is compacted."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pgcdc_assets.tables.compaction import (
    MOST_SMALL_FILES,
    SMALL_FILE_BYTES,
    has_many_small_files,
    needs_compaction,
)


def _files(ended: int, size_bytes: int = 1_000) -> pa.Table:
    """Return the files of a history: one of current versions, and some of ended versions."""
    return pa.table(
        {
            "size_bytes": [1_000, *[size_bytes] * ended],
            "partition._is_current": [True, *[False] * ended],
        }
    )


def _limit(path: str) -> int:
    return next(number for number in range(1_000) if needs_compaction(path, _files(number)))


@pytest.mark.sampled
def test_tables_that_are_merged_together_are_compacted_at_different_merges() -> None:
    limits = [_limit(f"/lake/shop/scd2/public/t{number}") for number in range(100)]
    assert min(limits) >= MOST_SMALL_FILES
    assert max(limits) < 2 * MOST_SMALL_FILES
    assert max(limits.count(limit) for limit in limits) < 10
    assert limits[0] == _limit("/lake/shop/scd2/public/t0")


def test_only_small_files_of_one_partition_count() -> None:
    assert has_many_small_files(_files(MOST_SMALL_FILES))
    assert not has_many_small_files(_files(MOST_SMALL_FILES - 1))
    assert not has_many_small_files(_files(MOST_SMALL_FILES), further=1)
    assert not has_many_small_files(_files(MOST_SMALL_FILES, SMALL_FILE_BYTES))
