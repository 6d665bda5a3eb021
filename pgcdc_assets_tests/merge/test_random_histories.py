"""Random histories, cut at random into windows and runs, merged by Spark and folded by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Change, Fold, Landing
from pgcdc_assets_tests.support.merge.random_history import (
    KEY,
    RandomHistory,
    cases,
    comparable_row,
    land_in_pieces,
    merge_as_if_large,
    merge_in_pieces,
    random_relation,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_TRANSACTIONS = 12


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((1, 1), id="one", marks=pytest.mark.soak),
        pytest.param((4, 2), id="some"),
        pytest.param((12, 6), id="many", marks=pytest.mark.soak),
    ],
)
@cases("default-plain-large", "full-plain-small", "full-truncate-small")
def test_any_cut_of_a_history_into_windows_and_runs_gives_the_table_that_postgres_had(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    identity: str,
    truncates: bool,
    is_large: bool,
    pieces: tuple[int, int],
) -> None:
    """D1, D2, D3, D4, D5, D6, D9, D14, H1: hundreds of histories against the fold by hand."""
    merge_as_if_large(monkeypatch, is_large)
    seed = f"{identity} {truncates}"
    rng = random.Random(seed)
    history = RandomHistory(rng, identity, histories=150)
    copied = history.copied()
    expected = Fold(key=(0, 1))
    expected.copy(copied)
    transactions: list[list[Change]] = [
        history.transaction(truncates and number in (3, 8)) for number in range(_TRANSACTIONS)
    ]
    landing = Landing(zone, [random_relation(identity)])
    landing.begin(copied)
    windows, runs = pieces
    land_in_pieces(landing, rng, transactions, windows, lambda changes, _: expected.apply(changes))
    target = CdcTable("shop", "items")
    report = merge_in_pieces(spark, landing, rng, target, runs)

    assert _rows(spark, report.path) == sorted(map(comparable_row, expected.rows.values()))
    assert report.row_count == len(expected.rows)


def _rows(spark: SparkSession, path: str) -> list[tuple[Any, ...]]:
    names = [*KEY, "doc", "number", "note", "_rescued"]
    rows = spark.read.format("delta").load(path).select(*names).collect()
    return sorted(
        (r.history, r.id, repr(r.doc), repr(r.number), repr(r.note), repr(r._rescued or {}))
        for r in rows
    )
