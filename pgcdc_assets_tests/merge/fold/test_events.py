"""Raw changes as events of keys, in one frame with changes of two relation versions."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.change_stats import ChangeStats
from pgcdc_assets.merge.fold.events import NULL_KEY, Fold, build_bag, build_events
from pgcdc_assets.merge.fold.schema import build_schema
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets_tests.support.merge.history import column, relation

_TABLES = (
    relation(column("id"), column("v", "text")),
    relation(column("id"), column("v", "text"), column("w", "text")),
)


def _fold(*versions: int, **stats: Any) -> Fold:
    described = [RelationVersion(1, n, Lsn(n), table) for n, table in enumerate(_TABLES, 1)]
    seen = dict.fromkeys(versions, 100)
    return Fold(build_schema(described, None), ChangeStats(versions=seen, **stats))


def _changes(spark: SparkSession, rows: list[tuple[Any, ...]]) -> DataFrame:
    """Return raw changes of operation, version, kind and texts of the old tuple, texts, unchanged.

    The ordinals are the indexes of the list.
    """
    return spark.createDataFrame(
        [(*row, 100, n, f"at {n}") for n, row in enumerate(rows)],
        "op STRING, relation_version INT, old_kind STRING, old ARRAY<STRING>, new ARRAY<STRING>, "
        "unchanged ARRAY<INT>, commit_lsn BIGINT, ordinal BIGINT, commit_ts STRING",
    )


def test_a_fold_knows_the_fields_of_its_changes() -> None:
    both, newest, oldest = _fold(1, 2), _fold(2), _fold(1)
    assert [len(fold.layouts) for fold in (both, newest, oldest)] == [2, 1, 1]
    assert [fold.common_fields for fold in (both, newest, oldest)] == [(0, 1), (0, 1, 2), (0, 1)]
    unchanged = {1: {1}, 2: {2}}
    assert _fold(1, 2, unchanged=unchanged).unknown == (1, 2)
    assert _fold(1, unchanged=unchanged).unknown == (1,)
    full = _fold(1, 2, unchanged=unchanged, old_kinds={"O"})
    assert (full.unchanged, full.unknown) == ((1, 2), ())
    assert _fold(1, 2, unchanged=unchanged, old_kinds={"O", "K"}).unknown == (1, 2)
    assert (both.unchanged, both.kept, both.origin_columns) == ((), (), ())


@pytest.mark.sampled
@pytest.mark.spark
def test_changes_become_contents_and_departures(spark: SparkSession) -> None:
    changes = _changes(
        spark,
        [
            ("I", 2, None, None, ["1", "a", "b"], None),
            # Without the later column.
            ("I", 1, None, None, ["2", "a"], None),
            ("U", 2, None, None, ["3", "a", None], None),
            ("U", 2, "K", ["4", None, None], ["5", "a", "b"], None),
            ("U", 2, "O", ["6", "x", "y"], ["6", "a", "b"], None),
            ("D", 2, "K", ["7", None, None], None, None),
            ("S", 2, None, None, ["8", "a", "b"], None),
            ("T", 2, None, None, None, None),
            ("P", 2, None, None, ["9", "\\x"], None),
        ],
    )
    contents = {
        (0, "I", 1): ["1", "a", "b"],
        (1, "I", 2): ["2", "a", None],
        (2, "U", 3): ["3", "a", None],
        (3, "U", 5): ["5", "a", "b"],
        (4, "U", 6): ["6", "a", "b"],
        (6, "S", 8): ["8", "a", "b"],
    }
    departures = {(3, "U", 4), (5, "D", 7)}

    events = build_events(changes, _fold(1, 2, has_old_tuples=True))

    found = events.collect()
    assert events.columns == [
        *("key_0", "commit_lsn", "ordinal", "commit_ts", "op", "is_content", "tuple"),
    ]
    assert all((r.commit_lsn, r.commit_ts) == (100, f"at {r.ordinal}") for r in found)
    assert {(r.ordinal, r.op, r.key_0): r.tuple for r in found if r.is_content} == contents
    gone = [r for r in found if not r.is_content]
    assert {(r.ordinal, r.op, r.key_0) for r in gone} == departures
    assert len(found) == len(contents) + len(departures)
    assert all(r.tuple is None for r in gone)
    # No update of the range has an old tuple: no key has changed.
    without = build_events(changes.where("ordinal <> 3"), _fold(1, 2)).collect()
    assert {(r.ordinal, r.is_content) for r in without} == {
        *((ordinal, True) for ordinal, _, _ in contents if ordinal != 3),
        (5, False),
    }


@pytest.mark.spark
def test_unchanged_toast_is_taken_from_the_old_tuple_or_unknown(spark: SparkSession) -> None:
    changes = _changes(
        spark,
        [
            ("I", 2, None, None, ["1", "a", "b"], None),
            ("U", 2, None, None, ["2", None, "b"], [1]),
            ("U", 2, None, None, ["3", None, None], [1, 2]),
            ("U", 2, "K", ["4", None, None], ["5", None, "b"], [1]),
            ("U", 2, "K", ["6", None, None], ["6", None, "b"], [1]),
            # A whole old tuple has the value.
            ("U", 2, "O", ["7", "of old", "y"], ["7", None, "b"], [1]),
            ("U", 1, None, None, ["8", None], [1]),
            ("D", 2, "K", ["9", None, None], None, None),
        ],
    )
    fold = _fold(
        1, 2, has_old_tuples=True, old_kinds={"K", "O", None}, unchanged={1: {1}, 2: {1, 2}}
    )

    rows = build_events(changes, fold).collect()

    found = {(r.key_0, r.is_content): (r.unknown, r.is_arrival, r.is_move) for r in rows}
    assert found == {
        (1, True): (None, True, False),
        (2, True): ([1], False, False),
        (3, True): ([1, 2], False, False),
        (5, True): ([1], True, True),
        (4, False): (None, False, False),
        (6, True): ([1], False, False),
        (7, True): (None, False, False),
        (8, True): ([1], False, False),
        (9, False): (None, False, False),
    }
    assert [r.tuple for r in rows if r.key_0 == 7] == [["7", "of old", "b"]]
    assert [r.tuple for r in rows if r.key_0 == 8] == [["8", None, None]]


@pytest.mark.spark
def test_an_unchanged_key_out_of_line_is_taken_from_the_old_tuple(spark: SparkSession) -> None:
    """D5: the old tuple has the key, and no other value."""
    made = relation(column("k", "text"), column("v", "text"), key=("k",))
    schema = build_schema([RelationVersion(1, 1, Lsn(1), made)], None)
    stats = ChangeStats(
        versions={1: 100}, has_old_tuples=True, old_kinds={"K"}, unchanged={1: {0, 1}}
    )
    changes = _changes(
        spark,
        [
            ("U", 1, "K", ["long", None], [None, "new"], [0]),
            ("U", 1, "K", ["long", None], [None, None], [0, 1]),
            ("U", 1, "K", ["before", None], ["after", None], [1]),
        ],
    )
    rows = build_events(changes, Fold(schema, stats)).orderBy("ordinal", "is_content").collect()
    assert [(r.key_0, r.tuple, r.unknown, r.is_move) for r in rows] == [
        ("long", ["long", "new"], None, False),
        ("long", ["long", None], [1], False),
        ("before", None, None, False),
        ("after", ["after", None], [1], True),
    ]


@pytest.mark.spark
def test_a_bag_has_each_row_that_is_added_or_removed(spark: SparkSession) -> None:
    changes = _changes(
        spark,
        [
            ("I", 1, None, None, ["1", "a"], None),
            ("U", 1, "O", ["2", "a"], ["3", "b"], None),
            ("U", 2, "O", ["4", "a", "x"], ["4", None, "y"], [1]),
            ("D", 2, "O", ["5", "a", "x"], None, None),
            ("T", 2, None, None, None, None),
        ],
    )
    fold = _fold(1, 2, has_old_tuples=True, old_kinds={"O"}, unchanged={2: {1}})
    rows = build_bag(changes, fold).collect()
    assert sorted((r.ordinal, r.is_content, r.op, r.key_0, r.tuple) for r in rows) == [
        (0, True, "I", 1, ["1", "a", None]),
        (1, False, "U", 2, ["2", "a", None]),
        (1, True, "U", 3, ["3", "b", None]),
        (2, False, "U", 4, ["4", "a", "x"]),
        (2, True, "U", 4, ["4", "a", "y"]),
        (3, False, "D", 5, ["5", "a", "x"]),
    ]
    oldest = build_bag(changes.where("ordinal = 0"), _fold(1, old_kinds={"O"})).collect()
    assert [(r.is_content, r.tuple) for r in oldest] == [(True, ["1", "a", None])]
    newest = build_bag(changes.where("ordinal = 3"), _fold(2, old_kinds={"O"})).collect()
    assert [(r.is_content, r.tuple) for r in newest] == [(False, ["5", "a", "x"])]


@pytest.mark.spark
def test_a_null_in_the_configured_key_is_an_error_with_the_place_of_its_column(
    spark: SparkSession,
) -> None:
    """Rows with NULL keys are distinct for Postgres, and one row for the table."""
    made = relation(column("id"), column("v", "text"), key=(), identity="f")
    schema = build_schema([RelationVersion(1, 1, Lsn(1), made)], ("v", "id"))
    fold = Fold(schema, ChangeStats(versions={1: 100}, old_kinds={"O"}))
    changes = _changes(
        spark,
        [
            ("I", 1, None, None, ["1", "a"], None),
            ("I", 1, None, None, [None, "a"], None),
            ("I", 1, None, None, ["1", None], None),
            ("D", 1, "O", ["1", None], None, None),
        ],
    )
    for ordinal, number in ((1, 1), (2, 0), (3, 0)):
        with pytest.raises(PySparkException, match=f"{NULL_KEY} {number};"):
            build_bag(changes.where(f"ordinal = {ordinal}"), fold).collect()
    (row,) = build_bag(changes.where("ordinal = 0"), fold).collect()
    assert (row.key_0, row.key_1) == ("a", 1)
