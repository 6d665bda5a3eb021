"""Row counts, LSNs and times of a window, counted at landing or again from the rows."""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.table_name import TableName

MESSAGES = "(messages)"

COUNTED = ("schema", "table", "op", "ordinal", "commit_lsn", "commit_ts")


class StoredCounts(Mapping[str, Mapping[str, int]]):
    """The counts of a stored window, parsed when they are first used.

    With a hundred changed tables, `json.loads` makes 38 KB of a text of 4 KB. Windows have the same
    names of tables, and often the same numbers, so these objects are shared.
    """

    __slots__ = ("_counts", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._counts: dict[str, Any] | None = None

    def __getitem__(self, table: str) -> Mapping[str, int]:
        found: Mapping[str, int] = self._parsed()[table]
        return found

    def get(self, table: str, default: Any = None) -> Any:
        """Return the counts of a table, which a merge asks for in each window for each table."""
        return self._parsed().get(table, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parsed())

    def __len__(self) -> int:
        return len(self._parsed())

    def __repr__(self) -> str:
        return repr(self._parsed())

    def _parsed(self) -> dict[str, Any]:
        if self._counts is None:
            self._counts = json.loads(self._text, object_pairs_hook=_shared)
            self._text = ""
        return self._counts


def _shared(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    if pairs and isinstance(pairs[0][1], int):
        return _shared_operations(tuple(pairs))
    return {sys.intern(table): operations for table, operations in pairs}


@lru_cache(4096)
def _shared_operations(pairs: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    return MappingProxyType(dict(pairs))


@dataclass(frozen=True)
class WindowSummary:
    """Row counts, LSNs and times of one landed window.

    Attributes:
        window: the window.
        row_count: number of rows.
        transaction_count: number of transactions with rows.
        counts: number of rows by table (`TableName.record_name`) and operation; logical messages
            are counted under `(messages)`.
        first_commit_lsn: lowest commit LSN; None in a window without rows, like the next three.
        last_commit_lsn: highest commit LSN.
        first_commit_ts: earliest commit time, not always of the first commit: clocks may step back.
        last_commit_ts: latest commit time.
    """

    window: LsnWindow
    row_count: int = 0
    transaction_count: int = 0
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    first_commit_lsn: Lsn | None = None
    last_commit_lsn: Lsn | None = None
    first_commit_ts: dt.datetime | None = None
    last_commit_ts: dt.datetime | None = None

    def count_changes(self, tables: Iterable[TableName]) -> int:
        """Return the number of changes of tables, by their names at the source."""
        return sum(sum(self.counts.get(table.record_name, {}).values()) for table in tables)

    def count_operations(self, tables: Iterable[TableName]) -> dict[str, int]:
        """Return the number of changes of tables by operation, by their names at the source."""
        total: Counter[str] = Counter()
        for table in tables:
            total.update(self.counts.get(table.record_name, {}))
        return dict(total)

    def as_record(self) -> dict[str, Any]:
        """Return the JSON object for the record of the window's commit."""
        return {
            "window": self.window.key,
            "row_count": self.row_count,
            "transaction_count": self.transaction_count,
            "counts": {table: dict(ops) for table, ops in self.counts.items()},
            "first_commit_lsn": _text(self.first_commit_lsn),
            "last_commit_lsn": _text(self.last_commit_lsn),
            "first_commit_ts": self.first_commit_ts and self.first_commit_ts.isoformat(),
            "last_commit_ts": self.last_commit_ts and self.last_commit_ts.isoformat(),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> WindowSummary:
        """Return the summary of a record."""
        return cls(
            window=LsnWindow.parse(record["window"]),
            row_count=record["row_count"],
            transaction_count=record["transaction_count"],
            counts=record["counts"],
            first_commit_lsn=_lsn(record["first_commit_lsn"]),
            last_commit_lsn=_lsn(record["last_commit_lsn"]),
            first_commit_ts=_time(record["first_commit_ts"]),
            last_commit_ts=_time(record["last_commit_ts"]),
        )


class SummaryBuilder:
    """Counter of a window's rows, batch by batch."""

    def __init__(self, window: LsnWindow) -> None:
        self._window = window
        self._counts: dict[str, dict[str, int]] = {}
        self._row_count = 0
        self._transaction_count = 0
        self._lsns: tuple[int, int] | None = None
        self._times: tuple[dt.datetime, dt.datetime] | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch with the columns `COUNTED`."""
        if batch.num_rows == 0:
            return
        self._row_count += batch.num_rows
        # Every transaction has exactly one row with ordinal 0, in whatever batch.
        self._transaction_count += pc.sum(pc.equal(batch.column("ordinal"), 0)).as_py()
        self._lsns = _widen(self._lsns, batch.column("commit_lsn"))
        self._times = _widen(self._times, batch.column("commit_ts"))
        kinds = pa.Table.from_batches([batch.select(["schema", "table", "op"])])
        counted = kinds.group_by(["schema", "table", "op"], use_threads=False).aggregate(
            [([], "count_all")]
        )
        for row in counted.to_pylist():
            name = _counted_as(row["schema"], row["table"])
            ops = self._counts.setdefault(name, {})
            ops[row["op"]] = ops.get(row["op"], 0) + row["count_all"]

    def build(self) -> WindowSummary:
        """Return the summary, with tables and operations sorted by name."""
        first_lsn, last_lsn = self._lsns or (None, None)
        first_time, last_time = self._times or (None, None)
        return WindowSummary(
            window=self._window,
            row_count=self._row_count,
            transaction_count=self._transaction_count,
            counts={
                name: dict(sorted(self._counts[name].items())) for name in sorted(self._counts)
            },
            first_commit_lsn=None if first_lsn is None else Lsn(first_lsn),
            last_commit_lsn=None if last_lsn is None else Lsn(last_lsn),
            first_commit_ts=first_time,
            last_commit_ts=last_time,
        )


def _counted_as(schema: str | None, table: str | None) -> str:
    return MESSAGES if schema is None or table is None else TableName(schema, table).record_name


def _widen(known: tuple[Any, Any] | None, column: pa.Array) -> tuple[Any, Any]:
    found = pc.min_max(column).as_py()
    if known is None:
        return found["min"], found["max"]
    return min(known[0], found["min"]), max(known[1], found["max"])


def _text(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(lsn)


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def _time(text: str | None) -> dt.datetime | None:
    return None if text is None else dt.datetime.fromisoformat(text)
