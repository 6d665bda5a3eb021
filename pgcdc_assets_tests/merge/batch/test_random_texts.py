"""Random histories of tables whose columns are all texts: their merges need no Spark.

Each merge is compared. The tables are small enough to become empty, and for steps that cancel out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pgcdc_assets.merge import MergeReport
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import Images, Landing, Versions, column, relation
from pgcdc_assets_tests.support.merge.random_history import (
    KEY,
    TRANSACTIONS,
    RandomHistory,
    cut,
    identify_rows,
)
from pgcdc_assets_tests.support.merge.small_tables import merge_together
from pgcdc_assets_tests.support.merge.text_tables import NAMES, check_history, check_image, merge

# Numbers of independent histories: an array of one row, and many rows.
_SIZES = (1, 2, 8, 40)


@pytest.fixture(autouse=True)
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    merge_together(monkeypatch)


def _merges(
    zone: RawZone,
    rng: random.Random,
    target: CdcTable,
    expected: Versions,
    number: int,
    identity: str,
    truncates: bool = False,
) -> Iterator[MergeReport]:
    """Land a history in windows cut at random, and yield the report of each merge."""
    history = RandomHistory(rng, identity, histories=_SIZES[number % len(_SIZES)])
    copied = history.copied()
    columns = [column(name, "text") for name in NAMES]
    key = rng.choice([KEY, KEY[::-1]])
    target = identify_rows(target, expected, identity, key)
    if identity == "p":
        described = relation(*columns, key=("note", *key))
    else:
        described = relation(*columns, key=key, identity=identity)
    landing = Landing(zone, [described])
    landing.begin(copied)
    expected.copy(copied, landing.lsn)
    for piece in cut(rng, TRANSACTIONS, rng.randint(1, TRANSACTIONS)):
        transactions = []
        for number, i in enumerate(piece):
            is_passing = rng.random() < 0.2
            transactions.append(
                history.passing_row()
                if is_passing
                else history.transaction(truncates and i in (3, 8))
            )
            expected.apply(transactions[-1], landing.lsn + 0x10 * number)
        landing.land(*transactions)
        if rng.random() < 0.6 or piece[-1] == TRANSACTIONS - 1:
            yield merge(landing, target)


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("truncates", [False, True], ids=["plain", "truncate"])
@pytest.mark.parametrize("identity", ["d", "f", "p"], ids=["default", "full", "part"])
def test_each_image_is_exact(
    zone: RawZone, rng: random.Random, identity: str, truncates: bool, number: int
) -> None:
    """D1 to D9, and the counts of the reports."""
    rng.seed(rng.random() + number)
    expected = Images(key=(0, 1))
    before: dict[tuple[str | None, ...], tuple[int, int]] | None = None
    for report in _merges(
        zone, rng, CdcTable("shop", "items"), expected, number, identity, truncates
    ):
        check_image(report, expected, has_twins=identity == "f")
        places = {key: (each.start, each.ordinal) for key, each in expected.open.items()}
        if not truncates:
            there = before or {}
            assert report.rows_inserted - report.rows_deleted == len(places) - len(there)
        if before is not None and not truncates:
            assert report.rows_deleted == len(before.keys() - places.keys())
            changed = (places[key] != before[key] for key in before.keys() & places.keys())
            count = sum(changed)
            assert report.rows_updated == count or (identity == "f" and report.rows_updated < count)
        before = places


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("identity", ["d", "p"], ids=["default", "part"])
def test_each_history_is_exact(
    zone: RawZone, rng: random.Random, identity: str, number: int
) -> None:
    """D1 to D6, D9, and the counts of the reports."""
    rng.seed(rng.random() + number)
    expected = Versions(key=(0, 1))
    count, was_open = 0, set[int]()
    target = CdcTable("shop", "items", scd=(2,))
    for report in _merges(zone, rng, target, expected, number, identity):
        check_history(report, expected)
        if count:
            assert report.rows_inserted == len(expected.all) - count
            assert report.rows_updated == len(was_open - set(map(id, expected.open.values())))
        count, was_open = len(expected.all), set(map(id, expected.open.values()))
