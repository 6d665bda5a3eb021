"""Equal rows of a table without a key are compared with their number, and read once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from deltalake import DeltaTable

from pgcdc_assets.postgres.copy.digests import RowDetail
from pgcdc_assets.verify import compare_digests
from pgcdc_assets.verify.differing_keys import find_differing_keys
from pgcdc_assets.verify.report import DifferenceKind
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_ROWS = 1_000


def test_equal_rows_that_the_table_lacks_are_counted_and_read_once(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.start(
        "create table t (id int, v text)",
        "alter table t replica identity full",
        f"insert into t select 1, 'a' from generate_series(1, {_ROWS})",
    )
    pipeline.sync()
    ordinals = sorted(row[0] for row in pipeline.frame().select("_ordinal").collect())
    DeltaTable(pipeline.path()).delete(f"_ordinal < {ordinals[10]}")
    digests: list[list[int]] = []
    compare = find_differing_keys
    read: list[int] = []
    group = compare_digests._by_key

    def find(
        source: Iterable[Any], target: Iterable[Any]
    ) -> Iterator[tuple[DifferenceKind, str, int]]:
        ours, theirs = list(source), list(target)
        digests.append([row[2] for row in [*ours, *theirs]])
        return compare(ours, theirs)

    def count(details: Iterable[RowDetail]) -> dict[str, RowDetail]:
        found = list(details)
        read.append(len(found))
        return group(found)

    monkeypatch.setattr(compare_digests, "find_differing_keys", find)
    monkeypatch.setattr(compare_digests, "_by_key", count)
    found = verify(pipeline)
    assert (found.source_rows, found.target_rows, found.missing) == (_ROWS, _ROWS - 10, 10)
    assert digests == [[_ROWS, _ROWS - 10]]
    assert read == [1, 1]
