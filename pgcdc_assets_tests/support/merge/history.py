"""Raw changes that tests write, and a simple reference fold.

`Landing` lands committed transactions of a table as windows. `Versions` computes the expected rows
of the table by a loop over the changes.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.raw import schema
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw.epochs import EPOCH

Texts = Sequence[str | None]
CLOCK = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True)
class Change:
    """One row of raw/changes."""

    op: str
    new: Texts | None = None
    old: Texts | None = None
    old_kind: str | None = None
    unchanged: tuple[int, ...] | None = None
    version: int = 1
    relation_id: int = 1000


def insert(*texts: str | None, **more: Any) -> Change:
    """Return an insert of a row."""
    return Change("I", texts, **more)


def update(
    *texts: str | None, old: Texts | None = None, unchanged: tuple[int, ...] = (), **more: Any
) -> Change:
    """Return an update with DEFAULT identity; `old` is the key tuple of a changed key."""
    kind = more.pop("old_kind", "K" if old is not None else None)
    return Change("U", texts, old, kind, unchanged or None, **more)


def delete(*old: str | None, old_kind: str = "K", **more: Any) -> Change:
    """Return a delete; `old` has all columns, with NULL outside the key in kind K."""
    return Change("D", None, old, old_kind, **more)


def truncate(**more: Any) -> Change:
    """Return a TRUNCATE of the table."""
    return Change("T", **more)


def column(name: str, base_type: str = "int4", typmod: int = -1, **more: Any) -> Column:
    """Return a column as the catalog describes it."""
    more.setdefault("type", base_type)
    return Column(
        name=name,
        type_oid=more.pop("type_oid", 23),
        typmod=typmod,
        base_type=base_type,
        base_typmod=typmod,
        **more,
    )


def relation(
    *columns: Column,
    key: Sequence[str] = ("id",),
    identity: str = "d",
    table: str = "items",
    relation_id: int = 1000,
) -> Relation:
    """Return a table of schema `shop` with attnums in order."""
    described = tuple(
        Column(
            **{
                **{name: getattr(c, name) for name in Column.__slots__},
                "attnum": c.attnum or number,
                "is_key": c.is_key or identity == "f" or (identity == "d" and c.name in key),
            }
        )
        for number, c in enumerate(columns, 1)
    )
    return Relation(relation_id, "shop", table, ReplicaIdentity(identity), described, tuple(key))


@dataclass
class Landing:
    """Writer of one table's raw zone, transaction by transaction."""

    zone: RawZone
    relations: Sequence[Relation]
    epoch: int = 1
    lsn: int = 0x1000
    clock: dt.datetime = CLOCK
    windows: list[LsnWindow] = field(default_factory=list)

    @classmethod
    def of_two_tables(cls, zone: RawZone) -> Landing:
        """Land snapshots of `items`, which has one row, and of `other`, and an empty window."""
        columns = column("id"), column("v", "text")
        both = [relation(*columns), relation(*columns, table="other", relation_id=7)]
        landing = cls(zone, both)
        landing.begin([["1", "a"]])
        landing.land([])
        return landing

    @property
    def relation(self) -> Relation:
        """The first relation version."""
        return self.relations[0]

    def begin(
        self, copied: Iterable[Texts] = (), *, at: int | None = None, version: int = 1
    ) -> None:
        """Record the epoch and land a snapshot of the table, at the current LSN by default."""
        latest = self.zone.epochs.latest()
        if latest is None or latest.epoch < self.epoch:
            self.zone.epochs.append(
                replace(EPOCH, epoch=self.epoch, start_lsn=Lsn(self.lsn), created_at=self.clock)
            )
        self.describe()
        self.copy(copied, at=at, version=version)
        for other in {r.relation_id: r for r in self.relations}.values():
            if other.relation_id != self.relation.relation_id:
                self.zone.snapshots.land_snapshot(self.epoch, Lsn(self.lsn), other, 1, [])

    def describe(self) -> None:
        """Store the relation versions."""
        for described in self.relations:
            self.zone.relations.register(self.epoch, described, Lsn(self.lsn))
        self.zone.relations.flush()

    def copy(
        self,
        rows: Iterable[Texts],
        *,
        at: int | None = None,
        version: int = 1,
        is_partial: bool = False,
    ) -> None:
        """Land a snapshot of the table, or of some of its rows."""
        texts = pa.array([list(row) for row in rows], type=schema.CHANGES.field("new").type)
        batch = pa.RecordBatch.from_arrays([texts], names=["new"])
        store = self.zone.partial_snapshots if is_partial else self.zone.snapshots
        store.land_snapshot(
            self.epoch,
            Lsn(self.lsn if at is None else at),
            self.relations[version - 1],
            version,
            [batch],
        )

    def land(self, *transactions: Sequence[Change], wal_bytes: int = 0) -> LsnWindow:
        """Land the transactions as the next window.

        Args:
            wal_bytes: least size of the window.
        """
        start = self.lsn
        rows: list[dict[str, Any]] = []
        for number, changes in enumerate(transactions):
            commit_lsn = start + 0x10 * number
            rows += [
                self.raw_row(change, commit_lsn, ordinal) for ordinal, change in enumerate(changes)
            ]
        self.lsn = start + max(wal_bytes, 0x10 * max(1, len(transactions)))
        window = LsnWindow.of(self.epoch, start, self.lsn)
        self.zone.changes.land(window, raw_batches(rows))
        self.windows.append(window)
        return window

    def _table(self, change: Change) -> str:
        return next(r.table for r in self.relations if r.relation_id == change.relation_id)

    def raw_row(self, change: Change, commit_lsn: int, ordinal: int) -> dict[str, Any]:
        """Return one row of raw/changes."""
        return {
            "commit_lsn": commit_lsn,
            "ordinal": ordinal,
            "xid": commit_lsn,
            "commit_ts": self.clock + dt.timedelta(microseconds=commit_lsn),
            "origin": None,
            "op": change.op,
            "relation_id": change.relation_id,
            "relation_version": change.version,
            "schema": self.relation.schema,
            "table": self._table(change),
            "old_kind": change.old_kind,
            "old": None if change.old is None else list(change.old),
            "new": _without_unchanged(change),
            "unchanged": None if change.unchanged is None else list(change.unchanged),
        }


def _without_unchanged(change: Change) -> list[str | None] | None:
    if change.new is None:
        return None
    left_out = set(change.unchanged or ())
    return [None if i in left_out else text for i, text in enumerate(change.new)]


def raw_batches(rows: list[dict[str, Any]]) -> list[pa.RecordBatch]:
    """Return Arrow batches of raw rows."""
    columns = [f for f in schema.CHANGES if f.name not in ("epoch", "window")]
    batches: list[pa.RecordBatch] = pa.Table.from_pylist(
        rows, schema=pa.schema(columns)
    ).to_batches()
    return batches


@dataclass
class Version:
    """One version of a key."""

    row: list[str | None]
    start: int
    ordinal: int
    op: str
    end: int | None = None


@dataclass
class Versions:
    """The versions of a table: each change is applied to the open version of its key.

    A change of a `tracked` column opens a version. Other columns have their values at the end of
    the version. If a key has several rows within a transaction (deferred constraints with FULL, or
    with a key that is a part of the identity), the row at the commit counts, with the position of
    the last change of this row.

    Attributes:
        identity: the columns that tell the rows of a key apart; empty if a key has one row, or if
            each change has its whole old row.
    """

    key: Sequence[int]
    tracked: Sequence[int] | None = None
    identity: Sequence[int] = ()
    open: dict[tuple[str | None, ...], Version] = field(default_factory=dict)
    ended: list[Version] = field(default_factory=list)

    @property
    def all(self) -> list[Version]:
        """Return all versions."""
        return [*self.ended, *self.open.values()]

    @property
    def last_of_each_key(self) -> list[Version]:
        """Return the newest version of each key."""
        ended = {self._key(version.row): version for version in self.ended}
        return list({**ended, **self.open}.values())

    def copy(self, rows: Iterable[Texts], lsn: int) -> None:
        """Apply a snapshot: its differences are versions."""
        found = {self._key(row): list(row) for row in rows}
        for key in [key for key in self.open if key not in found]:
            self._end(key, lsn)
        for key, row in found.items():
            self._put(key, row, lsn, -1, "S")

    def apply(self, changes: Iterable[Change], lsn: int) -> None:
        """Apply one transaction."""
        held = {key: [version.row] for key, version in self.open.items()}
        events: list[tuple[int, tuple[str | None, ...] | None, list[str | None] | None, str]] = []
        tangled: set[tuple[str | None, ...]] = set()
        put_by: dict[tuple[str | None, ...], tuple[int, str]] = {}
        for ordinal, change in enumerate(changes):
            before = change.old if change.old is not None else change.new
            old_key = None
            if change.op == "T":
                held = {}
                events.append((ordinal, None, None, "T"))
                continue
            row = None
            if change.op in "UD":
                assert before is not None
                old_key = self._key(before)
                rows = held[old_key]
                old = rows.pop(self._find(rows, before, change.old_kind))
            if change.op in "IU":
                assert change.new is not None
                row = list(change.new)
                for i in change.unchanged or ():
                    row[i] = old[i]
                new_key = self._key(row)
                held.setdefault(new_key, []).append(row)
                put_by[tuple(row)] = ordinal, change.op
                if len(held[new_key]) > 1:
                    tangled.add(new_key)
            if old_key is not None and (row is None or old_key != self._key(row)):
                events.append((ordinal, old_key, None, change.op))
            if row is not None:
                events.append((ordinal, self._key(row), row, change.op))
        for ordinal, key, row, op in events:
            if key is None:
                for one in list(self.open):
                    self._end(one, lsn)
            elif key in tangled:
                continue
            elif row is None:
                self._end(key, lsn)
            else:
                self._put(key, row, lsn, ordinal, op)
        for key in tangled:
            if held.get(key):
                # A row that existed before is not a new version.
                (remaining,) = held[key]
                self._put(key, remaining, lsn, *put_by.get(tuple(remaining), (-1, "")))
            elif key in self.open:
                self._end(key, lsn)

    def _find(self, rows: list[list[str | None]], old: Texts, old_kind: str | None) -> int:
        compared = range(len(old)) if old_kind == "O" else self.identity
        return next(
            place for place, row in enumerate(rows) if all(row[i] == old[i] for i in compared)
        )

    def _end(self, key: tuple[str | None, ...], lsn: int) -> None:
        version = self.open.pop(key)
        version.end = lsn
        self.ended.append(version)

    def _put(
        self, key: tuple[str | None, ...], row: list[str | None], lsn: int, ordinal: int, op: str
    ) -> None:
        if key in self.open:
            known = self.open[key].row
            width = range(len(row)) if self.tracked is None else self.tracked
            if all(known[i] == row[i] for i in width):
                self.open[key].row = row
                return
            self._end(key, lsn)
        self.open[key] = Version(row, lsn, ordinal, op)

    def _key(self, row: Texts) -> tuple[str | None, ...]:
        return tuple(row[i] for i in self.key)


class Images(Versions):
    """The newest row of each key, with the position of its last change."""

    def _put(
        self, key: tuple[str | None, ...], row: list[str | None], lsn: int, ordinal: int, op: str
    ) -> None:
        # Without an operation, the row of the key is that of before.
        if op or key not in self.open:
            self.open[key] = Version(row, lsn, ordinal, op)
