"""Random changes of one table as frames of a fold, without a lake, and the rows that remain."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.change_stats import ChangeStats, Truncation
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.schema import build_schema
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.tables.columns import SystemColumns
from pgcdc_assets_tests.support.merge.history import (
    CLOCK,
    Change,
    Version,
    Versions,
    column,
    relation,
)
from pgcdc_assets_tests.support.merge.random_history import NUMERIC_10_2, RandomHistory

# Two numerics, because a numeric holds no NaN and no text.
COLUMNS = (
    column("history"),
    column("id", "numeric", NUMERIC_10_2),
    column("doc", "text"),
    column("number", "numeric", NUMERIC_10_2),
    column("note", "numeric", NUMERIC_10_2),
)
KEY = ("history", "id")
NUMBER, NOTE = 3, 4
_NUMERIC = {1, NUMBER, NOTE}
_HISTORIES, _EARLIER, _TRANSACTIONS = 30, 3, 6
_TIME = pa.timestamp("us", tz="UTC")
_RAW = pa.schema(
    {
        "op": pa.string(),
        "relation_version": pa.int32(),
        "old_kind": pa.string(),
        "old": pa.list_(pa.string()),
        "new": pa.list_(pa.string()),
        "unchanged": pa.list_(pa.int32()),
        "commit_lsn": pa.int64(),
        "ordinal": pa.int64(),
        "commit_ts": _TIME,
    }
)
# The columns of tables beside those of the source and `_rescued`.
OF_IMAGE = {"_lsn": pa.int64(), "_ordinal": pa.int64(), "_commit_ts": _TIME}
OF_HISTORY = {
    "_valid_from": _TIME,
    "_valid_from_lsn": pa.int64(),
    "_valid_from_epoch": pa.int32(),
    "_ordinal": pa.int64(),
    "_op": pa.string(),
}
_TYPES = {"INT": pa.int32(), "STRING": pa.string(), "DECIMAL(10,2)": pa.decimal128(10, 2)}

Texts = Sequence[str | None]


class VersionsOfDrop(Versions):
    """Versions of a table that keeps the past of `number`, which the source has dropped."""

    is_dropped = False

    def _put(
        self, key: tuple[str | None, ...], row: list[str | None], lsn: int, ordinal: int, op: str
    ) -> None:
        if self.is_dropped:
            compared = set(range(len(row)) if self.tracked is None else self.tracked) - {NUMBER}
            known = self.open[key].row if key in self.open else None
            is_same = known is not None and all(known[i] == row[i] for i in compared)
            row = [*row[:NUMBER], known[NUMBER] if known and is_same else None, row[NOTE]]
        super()._put(key, row, lsn, ordinal, op)

    def _find(self, rows: list[list[str | None]], old: Texts, old_kind: str | None) -> int:
        compared = range(len(old)) if old_kind == "O" else self.identity
        return next(
            place
            for place, row in enumerate(rows)
            if all(row[i] == old[i] for i in compared if not (self.is_dropped and i == NUMBER))
        )


@dataclass
class Frames:
    """The changes of a range, and the rows of the table before and after them.

    Attributes:
        before: the open versions before the range.
        expected: the reference fold, after the range.
        rows: the raw changes.
    """

    relations: Sequence[Relation]
    expected: Versions
    before: list[Version] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def changes(self, spark: SparkSession, after: tuple[int, int] = (0, 0)) -> DataFrame:
        """Return the raw changes after a position."""
        rows = [row for row in self.rows if (row["commit_lsn"], row["ordinal"]) > after]
        return spark.createDataFrame(pa.Table.from_pylist(rows, schema=_RAW))

    @property
    def changed_keys(self) -> set[tuple[str | None, ...]]:
        """The texts of the keys of the old and new rows."""
        tuples = (row[which] for row in self.rows for which in ("old", "new"))
        return {tuple(each[: len(KEY)]) for each in tuples if each is not None}

    def fold(self, system: SystemColumns, *, shows_the_past: bool) -> Fold:
        """Return the fold of the changes."""
        versions = [
            RelationVersion(1, number, Lsn(number), each)
            for number, each in enumerate(self.relations, 1)
        ]
        schema = build_schema(
            versions, KEY, system=system, known=versions, past=() if shows_the_past else None
        )
        return Fold(schema, self._stats())

    def _stats(self) -> ChangeStats:
        stats = ChangeStats()
        for row in self.rows:
            op, version, lsn = row["op"], row["relation_version"], row["commit_lsn"]
            stats.counts[op] = stats.counts.get(op, 0) + 1
            if op == "T":
                stats.truncates.append(Truncation(lsn, row["ordinal"], row["commit_ts"]))
                continue
            stats.versions[version] = lsn
            stats.first_lsns.setdefault(version, lsn)
            stats.has_old_tuples |= op == "U" and row["old_kind"] is not None
            if op in "UD":
                stats.old_kinds.add(row["old_kind"])
            for position in row["unchanged"] or ():
                stats.unchanged.setdefault(version, set()).add(position)
        return stats


def draw_frames(
    rng: random.Random,
    identity: str,
    expected: Versions,
    *,
    truncates: bool = False,
    drops_at: int | None = None,
    is_new: bool = False,
    is_whole: bool = False,
) -> Frames:
    """Draw a random history, whose last transactions are the changes of a range.

    Args:
        expected: the reference fold, which gets the transactions.
        truncates: one of the transactions begins with a TRUNCATE.
        drops_at: before this transaction of the range, the source drops `number`.
        is_new: the table has no rows before the range.
        is_whole: no change leaves a value out.
    """
    history = RandomHistory(rng, identity, histories=_HISTORIES)
    copied = history.copied()
    if is_new:
        history.rows, copied = {number: [] for number in history.rows}, []
    made = relation(
        *COLUMNS,
        key=(*KEY, "note") if identity == "p" else KEY,
        identity=identity.replace("p", "d"),
    )
    if identity == "p":
        expected.identity = (0, 1, NOTE)
    narrow = replace(made, columns=(*made.columns[:NUMBER], *made.columns[NOTE:]))
    found = Frames((made,) if drops_at is None else (made, narrow), expected)
    lsn = 0x1000
    expected.copy([_with_nan(row) for row in copied], lsn)
    for number in range(0 if is_new else -_EARLIER, _TRANSACTIONS):
        lsn += 0x10
        if number == 0:
            found.before = [replace(each) for each in expected.open.values()]
        if number == drops_at:
            assert isinstance(expected, VersionsOfDrop)
            expected.is_dropped = True
        changes = history.transaction(truncates and number == 2)
        if truncates and number == 3 and identity == "d":
            # Also the rows of the same transaction go.
            changes.append(Change("T"))
            history.rows = {each: [] for each in history.rows}
        is_narrow = drops_at is not None and number >= drops_at
        changes = [_texts_of(change, is_narrow) for change in changes]
        if is_whole:
            changes = [replace(change, unchanged=None) for change in changes]
        expected.apply(changes, lsn)
        if number >= 0:
            found.rows += [
                raw_row(_layout_of(_rekeyed(rng, change, identity), is_narrow), lsn, ordinal)
                for ordinal, change in enumerate(changes)
            ]
    return found


def _with_nan(row: Texts) -> list[str | None]:
    """Return a row whose key is a text that its type cannot hold, if it is 4."""
    return ["NaN" if i == 1 and text == "4" else text for i, text in enumerate(row)]


def _texts_of(change: Change, is_narrow: bool) -> Change:
    def changed(row: Texts | None) -> Texts | None:
        if row is None:
            return None
        return [
            None if is_narrow and i == NUMBER else text for i, text in enumerate(_with_nan(row))
        ]

    return replace(change, new=changed(change.new), old=changed(change.old))


def _rekeyed(rng: random.Random, change: Change, identity: str) -> Change:
    """Give some updates another text of the same key, such as 3.00 for 3."""
    if change.op != "U" or change.new is None or change.old is not None or rng.random() > 0.2:
        return change
    history, key, *others = change.new
    if key == "NaN":
        return change
    old = (history, key, None, None, others[-1] if identity == "p" else None)
    return replace(change, new=(history, f"{key}.00", *others), old=old, old_kind="K")


def _layout_of(change: Change, is_narrow: bool) -> Change:
    if not is_narrow:
        return change

    def cut(row: Texts | None) -> Texts | None:
        return None if row is None else [text for i, text in enumerate(row) if i != NUMBER]

    unchanged = tuple(i - (i > NUMBER) for i in change.unchanged or ()) or None
    return replace(change, new=cut(change.new), old=cut(change.old), unchanged=unchanged, version=2)


def raw_row(change: Change, lsn: int, ordinal: int) -> dict[str, Any]:
    """Return one row of the raw changes."""
    new = change.new
    if new is not None:
        new = [None if i in (change.unchanged or ()) else text for i, text in enumerate(new)]
    return {
        "op": change.op,
        "relation_version": change.version,
        "old_kind": change.old_kind,
        "old": None if change.old is None else list(change.old),
        "new": new,
        "unchanged": None if change.unchanged is None else list(change.unchanged),
        "commit_lsn": lsn,
        "ordinal": ordinal,
        "commit_ts": time_of(lsn),
    }


def time_of(lsn: int) -> dt.datetime:
    """Return the commit time of the transaction at an LSN."""
    return CLOCK + dt.timedelta(microseconds=lsn)


def typed_row(texts: Texts) -> dict[str, Any]:
    """Return the values of a row by column, with `_rescued`."""
    rescued = {}
    values: dict[str, Any] = {}
    for i, (each, text) in enumerate(zip(COLUMNS, texts, strict=True)):
        values[each.name] = text
        if i == 0:
            values[each.name] = int(text or 0)
        elif i in _NUMERIC:
            values[each.name] = number = _number(text)
            if number is None and text is not None:
                rescued[each.name] = text
    return {**values, "_rescued": rescued or None}


def _number(text: str | None) -> Decimal | None:
    try:
        number = None if text is None else Decimal(text)
    except InvalidOperation:
        return None
    return number if number is not None and number.is_finite() else None


def stored_frame(
    spark: SparkSession, fold: Fold, rows: Iterable[dict[str, Any]], system: dict[str, pa.DataType]
) -> DataFrame:
    """Return rows of a table as a frame.

    Args:
        system: the system columns other than `_rescued`.
    """
    types = {field.name: _TYPES[field.type.ddl] for field in fold.schema.fields}
    types |= {**system, "_rescued": pa.map_(pa.string(), pa.string())}
    found = [{**row, "_rescued": list((row["_rescued"] or {}).items()) or None} for row in rows]
    return spark.createDataFrame(pa.Table.from_pylist(found, schema=pa.schema(types)))


def comparable(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return a row in a form that can be compared and sorted."""
    return tuple((name, _comparable(value)) for name, value in sorted(row.items()))


def _comparable(value: Any) -> str:
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return repr(sorted(value.items()) if isinstance(value, dict) else value)
