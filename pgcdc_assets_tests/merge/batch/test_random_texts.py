"""Random histories of tables whose columns are all texts: their merges need no Spark.

Each merge is compared. The tables are small enough to become empty, and for steps that cancel out.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import (
    CLOCK,
    Change,
    Images,
    Landing,
    Version,
    Versions,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.random_history import (
    COLUMNS,
    KEY,
    TRANSACTIONS,
    RandomHistory,
    cut,
    identify_rows,
)
from pgcdc_assets_tests.support.merge.small_tables import merge_together

_NAMES = [each.name for each in COLUMNS]
_BEGIN = ("_valid_from", "_valid_from_epoch", "_valid_from_lsn", "_ordinal", "_op")
_END = ("_valid_to", "_valid_to_epoch", "_valid_to_lsn", "_is_current")
_IMAGE = ("_lsn", "_ordinal", "_commit_ts", "_rescued")
# Numbers of independent histories: an array of one row, and many rows.
_SIZES = (1, 2, 8, 40)
_NO_SPARK = cast("SparkSession", None)

_Rows = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    merge_together(monkeypatch)


def _time(lsn: int) -> dt.datetime:
    return CLOCK + dt.timedelta(microseconds=lsn)


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
    columns = [column(name, "text") for name in _NAMES]
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
            yield _merge(landing, target)


def _land_each(landing: Landing, expected: Versions, changes: Sequence[Change]) -> None:
    """Land a window with a transaction for each change."""
    for number, change in enumerate(changes):
        expected.apply([change], landing.lsn + 0x10 * number)
    landing.land(*([change] for change in changes))


def _merge(landing: Landing, target: CdcTable) -> MergeReport:
    (report,) = merge_tables(
        _NO_SPARK, landing.zone, [target], landing.windows[-1], sessions=[_NO_SPARK]
    )
    assert isinstance(report, MergeReport), report.error.__cause__ or report.error
    return report


def _check_image(report: MergeReport, expected: Versions, *, has_twins: bool = False) -> None:
    """Compare a table with the newest rows.

    Args:
        has_twins: the changes have whole old rows. A transaction with a deferred constraint may add
            a row equal to the one that is there, and delete one of both: which one is not known.
    """
    rows: _Rows = [
        (*each.row, each.start, each.ordinal, _changed_at(each), None)
        for each in expected.open.values()
    ]
    rows.sort(key=repr)
    stored = _stored(report.path, *_IMAGE)
    if has_twins:
        count = len(_NAMES)
        assert [row[:count] for row in stored] == [row[:count] for row in rows]
        positions = slice(count, count + 2)
        assert all(a[positions] <= b[positions] for a, b in zip(stored, rows, strict=True))
    else:
        assert stored == rows
    assert report.row_count == len(rows)


def _check_history(report: MergeReport, expected: Versions) -> None:
    versions: _Rows = [
        (
            *each.row,
            *(_changed_at(each) or CLOCK, 1, each.start, each.ordinal, each.op),
            *((None, None, None, True) if each.end is None else _ended(each.end)),
        )
        for each in expected.all
    ]
    assert _stored(report.path, *_BEGIN, *_END) == sorted(versions, key=repr)
    assert report.row_count == len(versions)


def _changed_at(version: Version) -> dt.datetime | None:
    """Return the time of a row's last change; None for a row of a snapshot."""
    return None if version.op == "S" else _time(version.start)


def _ended(lsn: int) -> tuple[Any, ...]:
    return _time(lsn), 1, lsn, False


def _stored(path: str, *system: str) -> _Rows:
    rows = pa.RecordBatchReader.from_stream(DeltaTable(path).scan()).read_all().to_pylist()
    return sorted((tuple(row[name] for name in (*_NAMES, *system)) for row in rows), key=repr)


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
        _check_image(report, expected, has_twins=identity == "f")
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
        _check_history(report, expected)
        if count:
            assert report.rows_inserted == len(expected.all) - count
            assert report.rows_updated == len(was_open - set(map(id, expected.open.values())))
        count, was_open = len(expected.all), set(map(id, expected.open.values()))


_A, _B, _C = (("1", number, "text", "1", None) for number in "abc")
_D = ("1", "d", "", None, "note")


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("scd", "identity"), [(1, "d"), (1, "f"), (2, "d")])
def test_each_step_of_few_changes_is_exact(
    zone: RawZone, scd: int, identity: str, size: int
) -> None:
    """The events of a step are among the first and the last ones. Each change is a transaction."""
    is_full = identity == "f"
    kind = "O" if is_full else None

    def old(row: tuple[str | None, ...]) -> tuple[str | None, ...]:
        return row if is_full else (*row[:2], None, None, None)

    changed = (*_A[:4], "changed")
    steps = [
        insert(*_C),
        update(*changed, old=_A if is_full else None, old_kind=kind, unchanged=(2,)),
        update(*_D, old=old(_B), old_kind="O" if is_full else "K"),
        delete(*old(_C), old_kind="O" if is_full else "K"),
        insert(*_B),
        delete(*old(_B), old_kind="O" if is_full else "K"),
        delete(*old(changed), old_kind="O" if is_full else "K"),
        delete(*old(_D), old_kind="O" if is_full else "K"),
        insert(*_A),
    ]
    columns = [column(name, "text") for name in _NAMES]
    landing = Landing(zone, [relation(*columns, key=KEY, identity=identity)])
    landing.begin([_A, _B])
    expected = Images(key=(0, 1)) if scd == 1 else Versions(key=(0, 1))
    expected.copy([_A, _B], landing.lsn)
    landing.land()
    _merge(landing, CdcTable("shop", "items", scd=(scd,)))
    for start in range(0, len(steps), size):
        _land_each(landing, expected, steps[start : start + size])
        report = _merge(landing, CdcTable("shop", "items", scd=(scd,)))
        (_check_image if scd == 1 else _check_history)(report, expected)


def test_whole_old_rows_of_two_versions_of_a_table_are_merged_together(zone: RawZone) -> None:
    """D9: REPLICA IDENTITY DEFAULT for a while, in which the table has inserts only."""
    columns = [column(name, "text") for name in _NAMES]
    landing = Landing(zone, [relation(*columns, key=KEY, identity=each) for each in "fd"])
    landing.begin([_A, _B])
    expected = Images(key=(0, 1))
    expected.copy([_A, _B], landing.lsn)
    landing.land()
    _merge(landing, CdcTable("shop", "items"))
    steps = [
        delete(*_A, old_kind="O"),
        insert(*_A, version=2),
        insert(*_C, version=2),
        delete(*_A, old_kind="O"),
        update(*_D, old=_C, old_kind="O"),
    ]
    _land_each(landing, expected, steps)
    _check_image(_merge(landing, CdcTable("shop", "items")), expected)


@pytest.mark.parametrize("scd", [1, 2])
def test_changes_of_two_versions_of_a_table_are_merged_together(zone: RawZone, scd: int) -> None:
    """D9: REPLICA IDENTITY FULL for a while. The step ends with the version that is recorded."""
    columns = [column(name, "text") for name in _NAMES]
    landing = Landing(zone, [relation(*columns, key=KEY, identity=each) for each in "df"])
    landing.begin([_A, _B, _C])
    expected = Images(key=(0, 1)) if scd == 1 else Versions(key=(0, 1))
    expected.copy([_A, _B, _C], landing.lsn)
    landing.land()
    target = CdcTable("shop", "items", scd=(scd,))
    _merge(landing, target)
    whole: dict[str, Any] = {"old_kind": "O", "version": 2}
    changed = (*_A[:4], "changed")
    steps = [
        update(*changed, unchanged=(2,)),
        update(*_B[:4], "changed", old=_B, unchanged=(2, 3), **whole),
        update(*_D, old=changed, **whole),
        delete(*_C, **whole),
        insert(*_C, version=2),
        update(*_A, old=(*_D[:2], None, None, None)),
        update(*changed),
    ]
    _land_each(landing, expected, steps)
    report = _merge(landing, target)
    (_check_image if scd == 1 else _check_history)(report, expected)


def test_a_row_with_a_later_position_is_neither_replaced_nor_deleted(zone: RawZone) -> None:
    """Another program has given the rows these positions, as a copy of a later state would."""
    columns = [column(name, "text") for name in _NAMES]
    landing = Landing(zone, [relation(*columns, key=KEY)])
    landing.begin([_A, _B])
    landing.land()
    target = CdcTable("shop", "items")
    path = _merge(landing, target).path
    later = landing.lsn + 0x1000000
    DeltaTable(path).update(updates={"_lsn": f"CAST({later} AS BIGINT)"})
    landing.land([update(*_A[:4], "older")], [delete(*_B[:2], None, None, None)], [insert(*_C)])
    report = _merge(landing, target)
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (1, 0, 0)
    stored = _stored(path, "_lsn")
    assert [row[: len(_NAMES)] for row in stored] == sorted([_A, _B, _C], key=repr)
    assert [row[-1] == later for row in stored] == [True, True, False]
