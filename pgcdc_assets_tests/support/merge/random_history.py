"""Random committed transactions on a table with many small and independent histories.

Each history has a number, the first column of the key, and its own keys, which its rows use,
change, swap and reuse. One merge of one table therefore tests hundreds of histories.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import Row as SparkRow
from pyspark.sql import SparkSession

from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.tuning import for_large
from pgcdc_assets_tests.support.merge.history import (
    Change,
    Landing,
    Version,
    Versions,
    column,
    relation,
)
from pgcdc_assets_tests.support.merge.small_tables import forget_rows, merge_by_spark
from pgcdc_assets_tests.support.merge.user_settings import OF_USERS

_KEYS = 5
_DOC, _NUMBER, _NOTE = 2, 3, 4

# numeric(10,2), see make_numeric_typmod.
NUMERIC_10_2 = (10 << 16 | 2) + 4

COLUMNS = (
    column("history"),
    column("id"),
    column("doc", "text"),
    column("number", "numeric", NUMERIC_10_2),
    column("note", "text"),
)
KEY = ("history", "id")

# The changes exceed a broadcast.
AS_LARGE = {
    **OF_USERS,
    "spark.databricks.delta.merge.deletionVectors.persistent": "true",
    # Spark filters keys only before a shuffle.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}

# The share of merges that begin without the rows that the merge before has written.
_OTHER_PROCESS = 0.3

# The rows of a key within a transaction differ in this column, if it belongs to the identity.
_PARTS = 3

# Replica identity d(efault), f(ull) or p (the key is a part of it), with or without TRUNCATE, and
# the size as which tables are merged. A range with a TRUNCATE needs no MERGE, so cases without
# TRUNCATE test more.
_CASES = {
    "default-plain-large": ("d", False, True),
    "default-plain-small": ("d", False, False),
    "default-truncate-large": ("d", True, True),
    "full-plain-large": ("f", False, True),
    "full-plain-small": ("f", False, False),
    "full-truncate-small": ("f", True, False),
    "part-plain-large": ("p", False, True),
    "part-plain-small": ("p", False, False),
    "part-truncate-small": ("p", True, False),
}


# Numbers of windows and runs for twelve transactions.
_CUTS = {"one": (1, 1), "some": (4, 2), "many": (12, 6), "all": (12, 12)}

TRANSACTIONS = 12


def cases(*in_short_run: str) -> pytest.MarkDecorator:
    """Return all cases as parameters; the cases that are not named have the mark `soak`."""
    return _choose(("identity", "truncates", "is_large"), _CASES, in_short_run)


def cuts(*in_short_run: str) -> pytest.MarkDecorator:
    """Return all cuts as parameters; the cuts that are not named have the mark `soak`."""
    return _choose("pieces", _CUTS, in_short_run)


def _choose(
    names: str | tuple[str, ...], values: Mapping[str, tuple[Any, ...]], in_short_run: Sequence[str]
) -> pytest.MarkDecorator:
    unknown = set(in_short_run) - set(values)
    assert not unknown, unknown
    chosen = [
        pytest.param(
            *(value if isinstance(names, tuple) else (value,)),
            id=name,
            marks=() if name in in_short_run else (pytest.mark.soak,),
        )
        for name, value in values.items()
    ]
    return pytest.mark.parametrize(names, chosen)


Row = list[str | None]


def random_relation(identity: str) -> Relation:
    """Return the table with replica identity d(efault), f(ull) or p: the key is a part of it."""
    if identity == "p":
        return relation(*COLUMNS, key=(*KEY, "note"))
    return relation(*COLUMNS, key=KEY, identity=identity)


def identify_rows(
    target: CdcTable, expected: Versions, identity: str, key: Sequence[str] = KEY
) -> CdcTable:
    """Return the settings of a table of an identity, and tell its reference fold about it."""
    if identity != "p":
        return target
    expected.identity = (0, 1, _NOTE)
    return replace(target, key=tuple(key))


@dataclass
class RandomHistory:
    """Generator of transactions that Postgres could have committed.

    With DEFAULT identity, a key always has at most one row. With FULL, and if the key is a part of
    the identity, this applies only at the commit, as with a deferrable constraint.
    """

    rng: random.Random
    identity: str
    histories: int
    rows: dict[int, list[Row]] = field(default_factory=dict)
    _serial: int = 0

    def copied(self) -> list[Row]:
        """Return the rows before the first transaction."""
        for history in range(self.histories):
            keys = self.rng.sample(range(_KEYS), self.rng.randint(0, 3))
            self.rows[history] = [self._row(history, key) for key in keys]
        return [list(row) for rows in self.rows.values() for row in rows]

    def transaction(self, truncates: bool = False) -> list[Change]:
        """Commit one transaction that touches about a third of the histories."""
        changes: list[Change] = []
        if truncates:
            changes.append(Change("T"))
            self.rows = {history: [] for history in range(self.histories)}
        for history in range(self.histories):
            if self.rng.random() < 0.35:
                for _ in range(self.rng.randint(1, 6)):
                    changes += self._change(history)
                changes += self._settle(history)
        return changes

    def passing_row(self) -> list[Change]:
        """Commit one transaction that adds a row and removes it again."""
        row = self._row(0, _KEYS)
        self.rows[0].append(row)
        return [Change("I", tuple(row)), self._delete(row)]

    @property
    def _is_deferred(self) -> bool:
        return self.identity in ("f", "p")

    def _change(self, history: int) -> list[Change]:
        rows = self.rows[history]
        key = self.rng.randrange(_KEYS)
        is_free = all(row[1] != str(key) for row in rows)
        kind = self.rng.choice(["insert", "update", "update", "move", "move", "delete"])
        if kind == "insert" or not rows:
            if not (is_free or self._is_deferred):
                return []
            row = self._row(history, key)
            rows.append(row)
            return [Change("I", tuple(row))]
        row = self.rng.choice(rows)
        if kind == "delete":
            return [self._delete(row)]
        if kind == "move" and not (is_free or self._is_deferred):
            return []
        return [self._update(row, str(key) if kind == "move" else row[1])]

    def _settle(self, history: int) -> list[Change]:
        """Leave one row per key, as a deferred constraint requires at the commit."""
        changes = []
        seen: set[str | None] = set()
        for row in list(self.rows[history]):
            if row[1] in seen:
                changes.append(self._delete(row))
            seen.add(row[1])
        return changes

    def _delete(self, row: Row) -> Change:
        rows = self.rows[int(row[0] or 0)]
        del rows[next(i for i, other in enumerate(rows) if other is row)]
        if self.identity == "f":
            return Change("D", None, tuple(row), "O")
        return Change("D", None, self._identity(row), "K")

    def _update(self, row: Row, key: str | None) -> Change:
        before = list(row)
        unchanged = []
        row[1] = key
        row[_NUMBER] = self._number()
        has_part = self.identity == "p"
        if has_part and (before[1] != key or self.rng.random() < 0.3):
            row[_NOTE] = None
            row[_NOTE] = self._part(int(row[0] or 0), key)
        for i in (_DOC,) if has_part else (_DOC, _NOTE):
            if row[i] is not None and self.rng.random() < 0.6:
                unchanged.append(i)
            else:
                row[i] = self._text()
        left_out = tuple(unchanged) or None
        if self.identity == "f":
            return Change("U", tuple(row), tuple(before), "O", left_out)
        if self._identity(before) == self._identity(row):
            return Change("U", tuple(row), None, None, left_out)
        return Change("U", tuple(row), self._identity(before), "K", left_out)

    def _identity(self, row: Row) -> tuple[str | None, ...]:
        """Return the old tuple of a row: its replica identity."""
        return (row[0], row[1], None, None, row[_NOTE] if self.identity == "p" else None)

    def _row(self, history: int, key: int) -> Row:
        has_part = self.identity == "p"
        note = self._part(history, str(key)) if has_part else self._text()
        return [str(history), str(key), self._text(), self._number(), note]

    def _part(self, history: int, key: str | None) -> str:
        """Return a part of the identity that no row of a key has."""
        taken = {row[_NOTE] for row in self.rows.get(history, ()) if row[1] == key}
        free = [part for part in map(str, range(_PARTS)) if part not in taken]
        self._serial += 1
        return self.rng.choice(free) if free else f"part {self._serial}"

    def _text(self) -> str | None:
        self._serial += 1
        # Few values, so that a row often returns to an earlier value.
        return self.rng.choice([None, "", "a", "b", f"text {self._serial}"])

    def _number(self) -> str | None:
        return self.rng.choice([None, "NaN", "1.00", "-0.01", f"{self._serial}.50"])


def cut(rng: random.Random, count: int, pieces: int) -> list[range]:
    """Return the limits of random, non-empty pieces of `count` items."""
    borders = [0, *sorted(rng.sample(range(1, count), pieces - 1)), count]
    return [range(a, b) for a, b in itertools.pairwise(borders)]


def comparable_row(texts: Sequence[str | None]) -> tuple[Any, ...]:
    """Return a row with the table's types, in a sortable form, with `_rescued` last."""
    history, key, doc, number, note = texts
    is_typed = number not in (None, "NaN")
    value = Decimal(number) if is_typed and number else None
    rescued = {} if is_typed or number is None else {"number": number}
    return int(history or 0), int(key or 0), repr(doc), repr(value), repr(note), repr(rescued)


def stored_row(row: SparkRow) -> tuple[Any, ...]:
    """Return a row of the merged table in the form of `comparable_row`."""
    texts = (row["doc"], row["number"], row["note"], row["_rescued"] or {})
    return (*(row[name] for name in KEY), *map(repr, texts))


def described_version(version: Version) -> tuple[Any, ...]:
    """Return a version of the reference fold in a sortable form."""
    place = (version.start, version.end or 0, version.end is None)
    return (*comparable_row(version.row), *place, version.ordinal, version.op)


def stored_versions(spark: SparkSession, path: str) -> list[tuple[Any, ...]]:
    """Return the versions of a merged table in the form of `described_version`, in order."""
    return sorted(
        (
            *stored_row(r),
            *(r._valid_from_lsn, r._valid_to_lsn or 0, r._is_current),
            *(r._ordinal, r._op),
        )
        for r in spark.read.format("delta").load(path).collect()
    )


def merge_as_if_large(monkeypatch: pytest.MonkeyPatch, is_wanted: bool) -> None:
    """Merge small tables like large tables, with code generation and the changes' key range."""
    if is_wanted:
        bound_merges(monkeypatch)
        monkeypatch.setattr("pgcdc_assets.spark.tuning.SMALL_BYTES", -1)
        monkeypatch.setattr(
            "pgcdc_assets.spark.tuning.for_large", lambda n: {**AS_LARGE, **for_large(n)}
        )


def bound_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make merges compute the key range of their changes for tables of any size."""
    merge_by_spark(monkeypatch)
    monkeypatch.setattr("pgcdc_assets.merge.kinds.base.SMALL_BYTES", -1)
    monkeypatch.setattr("pgcdc_assets.merge.kinds.current_image.is_tiny", lambda *_: False)


def land_in_pieces(
    landing: Landing,
    rng: random.Random,
    transactions: Sequence[list[Change]],
    windows: int,
    apply: Callable[[list[Change], int], None],
) -> None:
    """Land transactions as windows cut at random, and yield each with its commit LSN."""
    for piece in cut(rng, len(transactions), windows):
        for number, i in enumerate(piece):
            apply(transactions[i], landing.lsn + 0x10 * number)
        landing.land(*(transactions[i] for i in piece))


def merge_in_pieces(
    spark: SparkSession,
    landing: Landing,
    rng: random.Random,
    target: CdcTable,
    runs: int,
) -> MergeReport:
    """Merge the landed windows in runs cut at random, and return the last report."""
    windows = len(landing.windows)
    reports = []
    for run in cut(rng, windows, runs) if windows > 1 else [range(1)]:
        if rng.random() < _OTHER_PROCESS:
            forget_rows()
        (report,) = merge_tables(spark, landing.zone, [target], landing.windows[run[-1]])
        assert isinstance(report, MergeReport), report.error.__cause__ or report.error
        reports.append(report)
    return reports[-1]


def merge_random_history(
    spark: SparkSession,
    zone: RawZone,
    rng: random.Random,
    target: CdcTable,
    expected: Versions,
    identity: str,
    pieces: tuple[int, int],
    truncates: bool = False,
) -> MergeReport:
    """Land a random history of many keys in windows cut at random, and merge it in runs.

    Args:
        expected: the reference fold, which gets the transactions.
        pieces: number of windows and runs.
        truncates: truncate the table twice in between.
    """
    history = RandomHistory(rng, identity, histories=120)
    copied = history.copied()
    landing = Landing(zone, [random_relation(identity)])
    landing.begin(copied)
    target = identify_rows(target, expected, identity)
    expected.copy(copied, landing.lsn)
    transactions = [
        history.transaction(truncates and number in (3, 8)) for number in range(TRANSACTIONS)
    ]
    windows, runs = pieces
    land_in_pieces(landing, rng, transactions, windows, expected.apply)
    return merge_in_pieces(spark, landing, rng, target, runs)
