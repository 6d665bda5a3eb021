"""The event of a key that determines the row of the key after a range."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.change_stats import ChangeStats
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.latest import keep_bag_remainder, keep_newest_per_key
from pgcdc_assets.merge.fold.schema import build_schema
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets_tests.support.merge.history import column, relation

pytestmark = pytest.mark.spark

_TABLES = (
    relation(column("id"), column("v", "text")),
    relation(column("id"), column("v", "text"), column("w", "text")),
)
# Position, whether the event is a content, and the tuple's texts after the key.
Events = list[tuple[tuple[int, int], bool, tuple[str, ...]]]


def _fold(*versions: int) -> Fold:
    described = [RelationVersion(1, n, Lsn(n), _TABLES[n - 1]) for n in versions]
    stats = ChangeStats(versions=dict.fromkeys(versions, 100), old_kinds={"O"})
    return Fold(build_schema(described, None), stats)


def _events(spark: SparkSession, keys: list[Events]) -> DataFrame:
    rows = [
        (key, *at, f"{op}{at[0]}.{at[1]}", op, is_content, [str(key), *texts])
        for key, events in enumerate(keys)
        for at, is_content, texts in events
        for op in ("IU"[at[1] % 2] if is_content else "D")
    ]
    return spark.createDataFrame(
        rows,
        "key_0 INT, commit_lsn BIGINT, ordinal BIGINT, commit_ts STRING, op STRING, "
        "is_content BOOLEAN, tuple ARRAY<STRING>",
    )


def _found(rows: DataFrame) -> dict[int, tuple[Any, ...]]:
    found = {}
    for row in rows.collect():
        assert row.commit_ts == f"{row.op}{row.commit_lsn}.{row.ordinal}"
        texts = tuple(row.tuple[1:]) if row.is_content else row.tuple
        assert row.key_0 not in found
        found[row.key_0] = ((row.commit_lsn, row.ordinal), row.is_content, texts)
    return found


A, B, C = ("a",), ("b",), ("c",)
# The events of a key, and the position of the deciding event with its tuple: None for a departure.
# The key is unchanged without a position.
CASES: list[tuple[Events, Any, Any]] = [
    ([((1, 0), True, A)], (1, 0), A),
    ([((1, 0), False, A)], (1, 0), None),
    ([((2, 0), False, A), ((2, 0), True, B)], (2, 0), B),
    # Another row takes the key before its row leaves the key, as in a swap of two keys.
    ([((5, 0), True, B), ((5, 1), False, A)], (5, 0), B),
    ([((1, 0), True, A), ((2, 0), False, A)], None, None),
    ([((1, 0), False, A), ((2, 0), True, A)], (2, 0), A),
    ([((1, 0), True, A), ((2, 0), False, A), ((3, 0), True, B)], (3, 0), B),
    ([((1, 0), True, B), ((2, 1), True, A)], (2, 1), A),
    # A row is added twice, and removed once.
    ([((1, 0), True, A), ((2, 0), True, A), ((3, 0), False, A)], (2, 0), A),
    ([((1, 5), False, A), ((2, 1), False, B)], (2, 1), None),
    ([((2, 1), False, A), ((1, 5), False, B)], (2, 1), None),
    # An update without a change.
    ([((1, 0), False, A), ((1, 0), True, A)], (1, 0), A),
    ([((1, 0), False, C), ((1, 1), True, A), ((2, 0), False, A)], (2, 0), None),
    ([((3, 2), True, A), ((3, 10), True, B), ((3, 11), False, C)], (3, 10), B),
]


def test_rows_of_a_key_are_counted_as_in_a_multiset(spark: SparkSession) -> None:
    wanted = {
        key: (at, texts is not None, texts)
        for key, (_, at, texts) in enumerate(CASES)
        if at is not None
    }
    events = _events(spark, [events for events, _, _ in CASES])
    assert _found(keep_bag_remainder(events, _fold(1))) == wanted
    # A further column of the group separates the rows of a key.
    two = events.selectExpr("*", "1 AS part").unionAll(events.selectExpr("*", "2 AS part"))
    kept = keep_bag_remainder(two, _fold(1), "part")
    for part in (1, 2):
        assert _found(kept.where(f"part = {part}")) == wanted


def test_a_row_from_before_a_column_is_removed_with_any_value_of_the_column(
    spark: SparkSession,
) -> None:
    old, new = ("a", "of old"), ("a", "of new")
    keys: list[Events] = [
        [((1, 0), True, old), ((2, 0), False, new)],
        [((1, 0), True, old), ((2, 0), False, new), ((2, 0), True, new)],
        [((2, 0), True, new), ((2, 1), True, ("b", "of new"))],
        [((1, 5), True, new), ((2, 0), True, old)],
        [((1, 0), False, old)],
    ]
    assert _found(keep_bag_remainder(_events(spark, keys), _fold(1, 2))) == {
        1: ((2, 0), True, new),
        2: ((2, 1), True, ("b", "of new")),
        3: ((2, 0), True, old),
        4: ((1, 0), False, None),
    }


def test_a_real_from_before_a_wider_type_is_removed_with_its_text_of_a_double(
    spark: SparkSession,
) -> None:
    """Spark prints the older texts as doubles, and Postgres the later ones."""
    tables = (relation(column("id"), column("v", kind)) for kind in ("float4", "float8"))
    described = [RelationVersion(1, n, Lsn(n), table) for n, table in enumerate(tables, 1)]
    stats = ChangeStats(versions={1: 100, 2: 200}, old_kinds={"O"})
    keys: list[Events] = [
        [((1, 0), True, ("5.0",)), ((2, 0), False, ("5",))],
        [((1, 0), True, ("1.0E20",)), ((2, 0), False, ("1e+20",))],
        [((1, 0), True, ("5.0",)), ((2, 0), False, ("6",)), ((2, 0), True, ("7",))],
    ]
    fold = Fold(build_schema(described, None), stats)
    assert _found(keep_bag_remainder(_events(spark, keys), fold)) == {2: ((2, 0), True, ("7",))}


def test_a_date_from_before_a_wider_type_is_removed_with_its_text_of_a_timestamp(
    spark: SparkSession,
) -> None:
    """Other texts than those of doubles are compared as they are."""
    tables = (relation(column("id"), column("v", kind)) for kind in ("date", "timestamp"))
    described = [RelationVersion(1, n, Lsn(n), table) for n, table in enumerate(tables, 1)]
    stats = ChangeStats(versions={1: 100, 2: 200}, old_kinds={"O"})
    first, other = ("2024-01-02 00:00:00",), ("2024-01-03 00:00:00",)
    keys: list[Events] = [
        [((1, 0), True, first), ((2, 0), False, first)],
        [((1, 0), True, first), ((2, 0), True, other), ((2, 1), False, first)],
        [((1, 0), True, first), ((2, 0), False, other)],
    ]
    fold = Fold(build_schema(described, None), stats)
    assert _found(keep_bag_remainder(_events(spark, keys), fold)) == {
        1: ((2, 0), True, other),
        2: ((1, 0), True, first),
    }


def test_the_newest_event_of_a_key_is_kept(spark: SparkSession) -> None:
    keys: list[Events] = [
        [((1, 9), True, A), ((2, 0), True, B)],
        [((2, 0), True, A), ((1, 9), False, B)],
        [((1, 9), True, A), ((1, 10), True, B)],
        # Two texts of one value: the content of the position is kept.
        [((1, 0), False, A), ((1, 0), True, B)],
        [((1, 0), True, B), ((1, 0), False, A)],
    ]
    kept = keep_newest_per_key(_events(spark, keys), _fold(1))
    assert kept.columns == _events(spark, []).columns
    assert _found(kept) == {
        0: ((2, 0), True, B),
        1: ((2, 0), True, A),
        2: ((1, 10), True, B),
        3: ((1, 0), True, B),
        4: ((1, 0), True, B),
    }
