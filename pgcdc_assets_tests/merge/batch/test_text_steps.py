"""Chosen steps of tables whose columns are all texts: their merges need no Spark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltalake import DeltaTable

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.history import (
    Images,
    Landing,
    Versions,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.random_history import KEY
from pgcdc_assets_tests.support.merge.small_tables import merge_together
from pgcdc_assets_tests.support.merge.text_tables import (
    NAMES,
    check_history,
    check_image,
    land_each,
    merge,
    stored_rows,
)


@pytest.fixture(autouse=True)
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    merge_together(monkeypatch)


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
        update(*_A, old=_A if is_full else None, old_kind=kind),
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
    columns = [column(name, "text") for name in NAMES]
    landing = Landing(zone, [relation(*columns, key=KEY, identity=identity)])
    landing.begin([_A, _B])
    expected = Images(key=(0, 1)) if scd == 1 else Versions(key=(0, 1))
    expected.copy([_A, _B], landing.lsn)
    landing.land()
    merge(landing, CdcTable("shop", "items", scd=(scd,)))
    for start in range(0, len(steps), size):
        land_each(landing, expected, steps[start : start + size])
        report = merge(landing, CdcTable("shop", "items", scd=(scd,)))
        (check_image if scd == 1 else check_history)(report, expected)


def test_whole_old_rows_of_two_versions_of_a_table_are_merged_together(zone: RawZone) -> None:
    """D9: REPLICA IDENTITY DEFAULT for a while, in which the table has inserts only."""
    columns = [column(name, "text") for name in NAMES]
    landing = Landing(zone, [relation(*columns, key=KEY, identity=each) for each in "fd"])
    landing.begin([_A, _B])
    expected = Images(key=(0, 1))
    expected.copy([_A, _B], landing.lsn)
    landing.land()
    merge(landing, CdcTable("shop", "items"))
    steps = [
        delete(*_A, old_kind="O"),
        insert(*_A, version=2),
        insert(*_C, version=2),
        delete(*_A, old_kind="O"),
        update(*_D, old=_C, old_kind="O"),
    ]
    land_each(landing, expected, steps)
    check_image(merge(landing, CdcTable("shop", "items")), expected)


@pytest.mark.parametrize("scd", [1, 2])
def test_changes_of_two_versions_of_a_table_are_merged_together(zone: RawZone, scd: int) -> None:
    """D9: REPLICA IDENTITY FULL for a while. The step ends with the version that is recorded."""
    columns = [column(name, "text") for name in NAMES]
    landing = Landing(zone, [relation(*columns, key=KEY, identity=each) for each in "df"])
    landing.begin([_A, _B, _C])
    expected = Images(key=(0, 1)) if scd == 1 else Versions(key=(0, 1))
    expected.copy([_A, _B, _C], landing.lsn)
    landing.land()
    target = CdcTable("shop", "items", scd=(scd,))
    merge(landing, target)
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
    land_each(landing, expected, steps)
    report = merge(landing, target)
    (check_image if scd == 1 else check_history)(report, expected)


@pytest.mark.parametrize("scd", [1, 2])
def test_a_key_of_one_column_and_a_column_that_earlier_rows_lack(zone: RawZone, scd: int) -> None:
    """F2: a process with an earlier definition landed the last window. Its rows get the default."""
    columns = [column("id", "text"), column("v", "text")]
    added = column("added", "text", missing="it")
    landing = Landing(zone, [relation(*columns), relation(*columns, added)])
    copied = [["a", "1", "x"], ["b", "1", "y"]]
    landing.begin(copied, version=2)
    expected = Images(key=(0,)) if scd == 1 else Versions(key=(0,))
    expected.copy(copied, landing.lsn)
    landing.land()
    target = CdcTable("shop", "items", scd=(scd,))
    merge(landing, target)
    later: dict[str, Any] = {"version": 2}
    changes = [
        update("a", "2", "z", **later),
        update("b", "2"),
        insert("c", "1"),
        delete("c", None),
        insert("d", "1"),
        insert("c", "2", None, **later),
        update("e", "3", "w", old=("c", None, None), **later),
    ]
    for number, change in enumerate(changes):
        new = change.new
        if new is not None and change.version == 1:
            new = (*new, "it")
        old = None if change.old is None else (*change.old, None)
        expected.apply([replace(change, new=new, old=old)], landing.lsn + 0x10 * number)
    landing.land(*([change] for change in changes))
    report = merge(landing, target)
    (check_image if scd == 1 else check_history)(report, expected, ["id", "v", "added"])


def test_a_transaction_adds_a_row_twice_and_deletes_one_of_both(zone: RawZone) -> None:
    """D9: whole old rows, and a key whose constraint is deferred."""
    landing, expected = _started(zone, identity="f")
    merge(landing, CdcTable("shop", "items"))
    changes = [insert(*_C), insert(*_C), delete(*_C, old_kind="O")]
    expected.apply(changes, landing.lsn)
    landing.land(changes)
    check_image(merge(landing, CdcTable("shop", "items")), expected, has_twins=True)


def _started(zone: RawZone, identity: str) -> tuple[Landing, Images]:
    """Land a snapshot of two rows and an empty window."""
    columns = [column(name, "text") for name in NAMES]
    landing = Landing(zone, [relation(*columns, key=KEY, identity=identity)])
    landing.begin([_A, _B])
    expected = Images(key=(0, 1))
    expected.copy([_A, _B], landing.lsn)
    landing.land()
    return landing, expected


@pytest.mark.parametrize(
    ("lsn_ahead", "ordinal", "is_applied"),
    [(0x1000000, 0, False), (0, 1, False), (0, 0, False), (0, -1, True), (-0x10, 1, True)],
)
def test_a_change_counts_if_its_position_is_later_than_that_of_the_row(
    zone: RawZone, lsn_ahead: int, ordinal: int, is_applied: bool
) -> None:
    """Another program has given the rows their positions, as a copy of another state would."""
    landing, _ = _started(zone, identity="d")
    target = CdcTable("shop", "items")
    path = merge(landing, target).path
    lsn = landing.lsn + lsn_ahead
    position = {"_lsn": f"CAST({lsn} AS BIGINT)", "_ordinal": f"CAST({ordinal} AS BIGINT)"}
    DeltaTable(path).update(updates=position)
    landing.land([update(*_A[:4], "changed"), delete(*_B[:2], None, None, None), insert(*_C)])
    # The delete has ordinal 1, so it is later than a row with ordinal 0.
    is_deleted = lsn_ahead < 0 or (lsn_ahead == 0 and ordinal < 1)
    report = merge(landing, target)
    counts = (report.rows_inserted, report.rows_updated, report.rows_deleted)
    assert counts == (1, int(is_applied), int(is_deleted))
    first = (*_A[:4], "changed") if is_applied else _A
    rows = [first, _C] if is_deleted else [first, _B, _C]
    assert stored_rows(path, *NAMES) == sorted(rows, key=repr)


def test_each_change_is_later_than_a_row_without_a_position(zone: RawZone) -> None:
    """Another program has added the row."""
    landing, _ = _started(zone, identity="d")
    target = CdcTable("shop", "items")
    path = merge(landing, target).path
    DeltaTable(path).update(updates={"_lsn": "NULL", "_ordinal": "NULL"})
    landing.land([update(*_A[:4], "changed"), delete(*_B[:2], None, None, None)])
    report = merge(landing, target)
    assert (report.rows_inserted, report.rows_updated, report.rows_deleted) == (0, 1, 1)
    assert stored_rows(path, *NAMES) == [(*_A[:4], "changed")]
