"""Planted rows in merged tables. Each row violates one invariant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pgcdc_assets.verify import Rule
from pgcdc_assets_tests.support.merge.random_history import KEY
from pgcdc_assets_tests.support.verify.merged_tables import BOTH, HISTORY, IMAGE, Merged

# SQL conditions on rows of SCD2.
IS_ALONE = "history * 10 + id in (select history * 10 + id from t group by 1 having count(*) = 1)"
GOES_ON = (
    "exists (select 1 from t n where n.history = t.history and n.id = t.id "
    "and n._valid_from_lsn = t._valid_to_lsn)"
)

# The planted errors, the histories that they affect, and the first LSN of the last merge.
Plant = Callable[[Merged, str, int], None]


def same_key_again(t: Merged, where: str, since: int) -> None:
    t.add(1, t.one(1, f"_lsn >= {since} and {where}"))


def same_key_on_an_older_row(t: Merged, where: str, since: int) -> None:
    t.add(1, t.one(1, f"_lsn >= {since} and {where}"), _lsn=since - 1)


def same_key_on_rows_not_touched(t: Merged, where: str, since: int) -> None:
    t.add(1, t.one(1, f"_lsn < {since} and {where}"))


def version_begun(t: Merged, where: str, since: int, *more: str) -> dict[str, Any]:
    return t.one(2, " and ".join([f"_valid_from_lsn >= {since}", where, *more]))


def second_current_row(t: Merged, where: str, since: int) -> None:
    row = version_begun(t, where, since, "_is_current")
    t.add(2, row, _ordinal=row["_ordinal"] + 1)


def older_current_row(t: Merged, where: str, since: int) -> None:
    row = version_begun(t, where, since, "_is_current", IS_ALONE)
    t.add(2, row, _valid_from_lsn=since - 1)


def end_after_the_next_beginning(t: Merged, where: str, since: int) -> None:
    row = version_begun(t, where, since, "_valid_to_lsn > _valid_from_lsn", GOES_ON)
    t.change(2, row, _valid_to_lsn="_valid_to_lsn + 1")


def older_row_that_never_ended(t: Merged, where: str, since: int) -> None:
    row = version_begun(t, where, since, "not _is_current", IS_ALONE)
    open_end = {"_valid_to": None, "_valid_to_lsn": None, "_is_current": True}
    t.add(2, row, _valid_from_lsn=since - 1, **open_end)


def end_before_its_beginning(t: Merged, where: str, since: int) -> None:
    row = version_begun(t, where, since, "not _is_current", IS_ALONE)
    t.change(2, row, _valid_to_lsn="_valid_from_lsn - 1")


def end_without_a_time(t: Merged, where: str, since: int) -> None:
    t.change(2, version_begun(t, where, since, "not _is_current"), _valid_to="null")


def past_row_without_an_end(t: Merged, where: str, since: int) -> None:
    t.change(2, version_begun(t, where, since, "_is_current"), _is_current="false")


def end_where_nothing_happened(t: Merged, where: str, since: int) -> None:
    row = version_begun(t, where, since, "_is_current")
    end = {"_valid_to": "_valid_from", "_valid_to_lsn": "_valid_from_lsn + 1"}
    t.change(2, row, _is_current="false", **end)


def other_value(t: Merged, where: str, since: int) -> None:
    row = version_begun(t, where, since, "_is_current")
    t.change(1, {name: row[name] for name in KEY}, note="'changed'")


def other_rescued_text(t: Merged, where: str, since: int) -> None:
    row = version_begun(t, where, since, "_is_current", "_rescued is not null")
    image = t.one(1, " and ".join(f"{name} = {row[name]}" for name in KEY))
    t.remove(1, image)
    t.add(1, image, _rescued=None)


def row_too_few(t: Merged, where: str, since: int) -> None:
    t.remove(1, t.one(1, f"_lsn < {since} and {where}"))


IN_IMAGE: dict[Plant, Rule] = {
    same_key_again: Rule.DUPLICATE_KEYS,
    same_key_on_an_older_row: Rule.DUPLICATE_KEYS,
}
IN_HISTORY: dict[Plant, Rule] = {
    second_current_row: Rule.SEVERAL_CURRENT,
    older_current_row: Rule.SEVERAL_CURRENT,
    end_after_the_next_beginning: Rule.OVERLAPPING,
    older_row_that_never_ended: Rule.OVERLAPPING,
    end_before_its_beginning: Rule.REVERSED,
    end_without_a_time: Rule.WRONG_FLAG,
    past_row_without_an_end: Rule.WRONG_FLAG,
    end_where_nothing_happened: Rule.UNEXPLAINED_ENDS,
}
IN_ONE_OF_BOTH: dict[Plant, Rule] = {
    other_value: Rule.NOT_IN_SCD1,
    other_rescued_text: Rule.NOT_IN_SCD1,
}
PLANTS = [(IN_IMAGE, IMAGE), (IN_HISTORY, HISTORY), (IN_ONE_OF_BOTH, BOTH)]
