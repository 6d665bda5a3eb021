"""Tables without a key: random histories of bags and logs against a reference fold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import MergeConflict, ReplicaIdentityError
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.merge.history import (
    Change,
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from pgcdc_assets_tests.support.merge.random_history import (
    NUMERIC_10_2,
    TRANSACTIONS,
    cuts,
    land_in_pieces,
    merge_in_pieces,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_BAG = CdcTable("shop", "items")
_LOG = CdcTable("shop", "items", without_key="log")

# Few values, so that rows are equal. A float has two zeros and NaN, and a numeric has NaN.
_NUMBERS = (None, "0", "-0", "NaN", "1.5")
_AMOUNTS = (None, "NaN", "1.00", "2.50")
_NOTES = (None, "", "a")

Row = tuple[str | None, ...]


def _bag_relation(identity: str = "f") -> Relation:
    return relation(
        column("number", "float8"),
        column("amount", "numeric", NUMERIC_10_2),
        column("note", "text"),
        key=(),
        identity=identity,
    )


@dataclass
class _Stacks:
    """Rows as stacks of equal rows. A removal takes the newest row."""

    rows: dict[Row, list[tuple[int, int]]] = field(default_factory=dict)

    def put(self, row: Row, lsn: int, ordinal: int) -> None:
        self.rows.setdefault(row, []).append((lsn, ordinal))

    def apply(self, changes: list[Change], lsn: int) -> None:
        for ordinal, change in enumerate(changes):
            if change.op == "T":
                self.rows = {}
            if change.op in "UD":
                assert change.old is not None
                self.rows[tuple(change.old)].pop()
            if change.op in "IU":
                assert change.new is not None
                self.put(tuple(change.new), lsn, ordinal)

    def described(self) -> list[tuple[Any, ...]]:
        return sorted(
            (*map(_text, row), lsn, ordinal)
            for row, places in self.rows.items()
            for lsn, ordinal in places
        )


@dataclass
class _RandomBag:
    rng: random.Random
    rows: list[Row] = field(default_factory=list)

    def row(self) -> Row:
        return tuple(self.rng.choice(values) for values in (_NUMBERS, _AMOUNTS, _NOTES))

    def transaction(self, truncates: bool) -> list[Change]:
        changes = [self._change() for _ in range(self.rng.randrange(1, 40))]
        if truncates:
            self.rows = []
            changes += [truncate(), *(self._change() for _ in range(5))]
        return changes

    def _change(self) -> Change:
        kind = self.rng.choice("IIUUD") if self.rows else "I"
        if kind == "I":
            self.rows.append(self.row())
            return insert(*self.rows[-1])
        old = self.rows.pop(self.rng.randrange(len(self.rows)))
        if kind == "D":
            return delete(*old, old_kind="O")
        self.rows.append(old if self.rng.random() < 0.1 else self.row())
        return update(*self.rows[-1], old=old, old_kind="O")


@pytest.mark.sampled
@cuts("some")
@pytest.mark.parametrize("truncates", [False, True], ids=["plain", "truncate"])
def test_each_row_occurs_as_often_as_in_the_source_for_any_cut(
    spark: SparkSession,
    zone: RawZone,
    rng: random.Random,
    pieces: tuple[int, int],
    truncates: bool,
) -> None:
    """D11: the same rows remain for each cut."""
    bag = _RandomBag(rng)
    bag.rows = [bag.row() for _ in range(60)]
    landing = Landing(zone, [_bag_relation()])
    landing.begin(bag.rows)
    expected = _Stacks()
    for row in bag.rows:
        expected.put(row, landing.lsn, -1)
    transactions = [bag.transaction(truncates and n in (3, 8)) for n in range(TRANSACTIONS)]
    windows, runs = pieces
    land_in_pieces(landing, rng, transactions, windows, expected.apply)
    report = merge_in_pieces(spark, landing, rng, _BAG, runs)
    assert _found(spark, report.path) == expected.described()
    assert report.row_count == len(bag.rows)
    list(merge_tables(spark, zone, [_BAG], landing.windows[0]))
    assert _found(spark, report.path) == expected.described()


@pytest.mark.sampled
def test_a_new_snapshot_replaces_a_multiset(spark: SparkSession, zone: RawZone) -> None:
    landing = Landing(zone, [_bag_relation()])
    landing.begin([("0", None, "a"), ("0", None, "a")])
    landing.land([delete("0", None, "a", old_kind="O")])
    landing.copy([("0", None, "a")] * 3)
    landing.land([delete("0", None, "a", old_kind="O")])
    (report,) = merge_tables(spark, zone, [_BAG], landing.windows[-1])
    assert isinstance(report, MergeReport), report.error
    assert report.row_count == 2


def test_a_missing_row_is_an_error_with_a_remedy(spark: SparkSession, zone: RawZone) -> None:
    landing = Landing(zone, [_bag_relation()])
    landing.begin([("0", None, "a")])
    landing.land([delete("0", None, "a", old_kind="O"), delete("0", None, "a", old_kind="O")])
    (failure,) = merge_tables(spark, zone, [_BAG], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, MergeConflict)
    assert "new snapshot" in str(failure.error)


@pytest.mark.parametrize("target", [_BAG, _LOG], ids=["bag", "log"])
def test_changes_without_complete_old_rows_are_refused(
    spark: SparkSession, zone: RawZone, target: CdcTable
) -> None:
    landing = Landing(zone, [_bag_relation()])
    landing.begin([("0", None, "a")])
    landing.land([update("1.5", None, "a")])
    (failure,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, ReplicaIdentityError)
    assert "REPLICA IDENTITY FULL" in str(failure.error)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (CdcTable("shop", "items", scd=(2,)), "scd: "),
        (CdcTable("shop", "items", soft_deletes=True), "deleted row"),
    ],
)
def test_settings_that_need_a_key_are_refused(
    spark: SparkSession, zone: RawZone, target: CdcTable, sentence: str
) -> None:
    landing = Landing(zone, [_bag_relation()])
    landing.begin([("0", None, "a")])
    landing.land([insert("1.5", None, "a")])
    (failure,) = merge_tables(spark, zone, [target], landing.windows[-1])
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, ReplicaIdentityError)
    assert sentence in str(failure.error)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([2], id="one run", marks=pytest.mark.soak),
        pytest.param([0, 1, 2], id="three runs"),
    ],
)
def test_a_log_has_every_change_and_snapshot_row_once(
    spark: SparkSession, zone: RawZone, runs: list[int]
) -> None:
    landing = Landing(zone, [_bag_relation()])
    landing.begin([("0", None, "a"), ("0", None, "a")])
    landing.land(
        [insert("1.5", "NaN", None)],
        [update("1.5", "1.00", "b", old=("0", None, "a"), old_kind="O")],
    )
    landing.land([truncate()])
    landing.copy([("0", None, "c")])
    landing.land([delete("0", None, "c", old_kind="O"), insert("-0", None, "d")])
    path = table_path(zone.lake, zone.name, _LOG.schema, _LOG.table, 1)
    for number in runs:
        (report,) = merge_tables(spark, zone, [_LOG], landing.windows[number])
        assert isinstance(report, MergeReport), report.error.__cause__ or report.error
        assert report.path == path
    list(merge_tables(spark, zone, [_LOG], landing.windows[-1]))
    rows = spark.read.format("delta").load(path).collect()
    start, (first, second, third) = 0x1000, (int(w.start) for w in landing.windows)
    logged = [(r._lsn, max(r._ordinal, -1), r._op, repr(r.note), repr(r._rescued)) for r in rows]
    assert sorted(logged) == [
        (start, -1, "S", "'a'", "None"),
        (start, -1, "S", "'a'", "None"),
        (first, 0, "I", "None", "{'amount': 'NaN'}"),
        (first + 0x10, 0, "U", "'b'", "None"),
        (second, 0, "T", "None", "None"),
        (third, -1, "S", "'c'", "None"),
        (third, 0, "D", "'c'", "None"),
        (third, 1, "I", "'d'", "None"),
    ]


def _text(value: str | None) -> str:
    return repr(value)


def _found(spark: SparkSession, path: str) -> list[tuple[Any, ...]]:
    found = []
    for r in spark.read.format("delta").load(path).collect():
        number = None if r.number is None else {"nan": "NaN"}.get(str(r.number), f"{r.number:g}")
        amount = (r._rescued or {}).get("amount") or (None if r.amount is None else str(r.amount))
        place = (r._lsn, max(r._ordinal, -1))
        found.append((*map(repr, (number, amount, r.note)), *place))
    return sorted(found)
