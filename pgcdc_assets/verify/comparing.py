"""Source against SCD1 at one LSN, by digests, in memory that does not grow with the table.

Three steps, each only where the one before found a difference: sums of buckets of rows, which both
servers compute where the rows are; digests of the rows in the buckets that differ; and for some of
the rows that differ, their keys and a digest of each column.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgcdc_assets.merge import TableTarget
from pgcdc_assets.merge.shape import SOFT_DELETE_COLUMNS
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.digests import Bucket, RowDetail, SourceDigests, open_source_table
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.verify.canonical import compared_columns, key_indexes
from pgcdc_assets.verify.moment import Moment
from pgcdc_assets.verify.report import Comparison, Difference, Kind
from pgcdc_assets.verify.target import TargetDigests, read_version
from pgcdc_assets.verify.target_at import target_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAMED_ROWS = 20

# Differing rows of both sides whose columns are looked at; more would tell nothing new.
_EXAMINED_ROWS = 200

# Rows of differing buckets whose digests are fetched at a time, and at all.
_ROWS_A_PASS = 500_000
_PASSES = 8

_ROWS_A_BUCKET = 256
_MOST_DIGITS = 4

_EMPTY = Bucket(0, 0, 0)


def compare_at(
    spark: SparkSession,
    settings: ConnectionSettings,
    zone: RawZone,
    publication: str,
    table: TableTarget,
    moment: Moment,
    *,
    named_rows: int = NAMED_ROWS,
) -> Comparison:
    """Compare a table's SCD1 with the source, both as of the moment.

    The raw zone has to be captured through the moment (`wait_captured`).

    Args:
        named_rows: differing rows whose keys are told, at the most.

    Raises:
        ConfigurationError: the table is not published, was never merged, or may not be read.
        TransientError: the table was altered meanwhile, or a server went away.
        DefiniteError: what the raw zone holds cannot be folded into the table.
    """
    from pgcdc_assets.merge.session import own_sessions

    with (
        own_sessions(spark, 1) as (session,),
        target_at(session, zone, table, moment) as version,
        open_source_table(
            settings, publication, table.schema, table.table, moment.snapshot_name
        ) as source,
    ):
        frame = read_version(session, version)
        columns = compared_columns(source.relation, dict(frame.dtypes))
        key_names = _key_names(source.relation, table.key)
        key = key_indexes(columns, key_names)
        comparing = _Comparing(
            source.digests([column.source for column in columns], key),
            TargetDigests(session, frame, columns, key),
            tuple(column.name for column in columns),
            named_rows,
        )
        comparing.run(_digits(frame))
        lacking = _lacking(source.relation, frame)
    return Comparison(
        table.schema,
        table.table,
        comparing.source_rows,
        comparing.target_rows,
        missing=comparing.counts[Kind.MISSING],
        extra=comparing.counts[Kind.EXTRA],
        differing=comparing.counts[Kind.DIFFERS],
        columns=tuple(dict.fromkeys([*lacking, *comparing.columns])),
        lsn=moment.lsn,
        key_columns=tuple(columns[i].name for i in key),
        differences=tuple(comparing.named),
        is_counted=comparing.is_counted,
    )


def _key_names(relation: Relation, key: Sequence[str] | None) -> tuple[str, ...]:
    if key:
        return tuple(key)
    if relation.primary_key:
        return relation.primary_key
    if relation.replica_identity == "f":
        return ()
    return tuple(column.name for column in relation.columns if column.is_key)


def _lacking(relation: Relation, frame: DataFrame) -> list[str]:
    """Name the columns that only one side has."""
    source = [column.name for column in relation.columns]
    ours = {name for name, _, _ in SOFT_DELETE_COLUMNS}
    return [name for name in source if name not in frame.columns] + [
        name for name in frame.columns if name not in source and name not in ours
    ]


def _digits(frame: DataFrame) -> int:
    """Choose how many hex digits name a bucket, so that few rows share one."""
    rows = frame.count()
    digits = 1
    while digits < _MOST_DIGITS and rows > _ROWS_A_BUCKET * 16**digits:
        digits += 1
    return digits


@dataclass
class _Comparing:
    """The three steps over one table, and what they found."""

    source: SourceDigests
    target: TargetDigests
    names: tuple[str, ...]
    limit: int
    source_rows: int = 0
    target_rows: int = 0
    is_counted: bool = True
    counts: Counter[Kind] = field(default_factory=Counter)
    named: list[Difference] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    _examined: dict[Kind, list[str]] = field(default_factory=lambda: {kind: [] for kind in Kind})

    def run(self, digits: int) -> None:
        with ThreadPoolExecutor(1, "pgcdc-verify") as pool:
            asked = pool.submit(self.source.buckets, digits)
            target = self.target.buckets(digits)
            source = asked.result()
        self.source_rows = sum(bucket.row_count for bucket in source.values())
        self.target_rows = sum(bucket.row_count for bucket in target.values())
        differing = sorted(
            name for name in source.keys() | target.keys() if source.get(name) != target.get(name)
        )
        sizes = {
            name: source.get(name, _EMPTY).row_count + target.get(name, _EMPTY).row_count
            for name in differing
        }
        groups = list(itertools.islice(_grouped(sizes), _PASSES))
        for group in groups:
            self._look_into(group)
        self.is_counted = sum(map(len, groups)) == len(differing)
        self._examine()

    def _look_into(self, buckets: Sequence[str]) -> None:
        found = _differing_keys(self.source.rows(buckets), self.target.rows(buckets))
        for kind, key_digest in found:
            self.counts[kind] += 1
            examined = self._examined[kind]
            if len(examined) < (_EXAMINED_ROWS if kind is Kind.DIFFERS else self.limit):
                examined.append(key_digest)

    def _examine(self) -> None:
        """Find out keys and columns of some of the differing rows."""
        wanted = sorted({digest for digests in self._examined.values() for digest in digests})
        source = _by_key(self.source.details(wanted))
        target = _by_key(self.target.details(wanted))
        differences = {kind: list(self._differences(kind, source, target)) for kind in Kind}
        found = {name for rows in differences.values() for row in rows for name in row.columns}
        self.columns = [name for name in self.names if name in found]
        # Some of each kind, before more of one.
        in_turns = itertools.zip_longest(*differences.values())
        rows = [row for turn in in_turns for row in turn if row is not None]
        self.named = rows[: self.limit]

    def _differences(
        self,
        kind: Kind,
        source: Mapping[str, Sequence[RowDetail]],
        target: Mapping[str, Sequence[RowDetail]],
    ) -> Iterator[Difference]:
        for digest in dict.fromkeys(self._examined[kind]):
            ours, theirs = source.get(digest, ()), target.get(digest, ())
            if not (ours or theirs):
                continue
            columns: tuple[str, ...] = ()
            if kind is Kind.DIFFERS and ours and theirs:
                pairs = zip(self.names, ours[0].columns, theirs[0].columns, strict=True)
                columns = tuple(name for name, mine, other in pairs if mine != other)
            yield Difference(kind, (ours or theirs)[0].key, columns)


def _grouped(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Group buckets so that the rows of a group fit in memory."""
    group: list[str] = []
    row_count = 0
    for name, size in sizes.items():
        if group and row_count + size > _ROWS_A_PASS:
            yield group
            group, row_count = [], 0
        group.append(name)
        row_count += size
    if group:
        yield group


def _differing_keys(
    source: Iterable[tuple[str, str]], target: Iterable[tuple[str, str]]
) -> Iterator[tuple[Kind, str]]:
    """Compare two streams of digests of key and row, sorted by key; several rows may share one."""
    ours, theirs = _runs(source), _runs(target)
    mine, other = next(ours, None), next(theirs, None)
    while mine is not None or other is not None:
        if other is None or (mine is not None and mine[0] < other[0]):
            assert mine is not None
            yield from itertools.repeat((Kind.MISSING, mine[0]), len(mine[1]))
            mine = next(ours, None)
        elif mine is None or other[0] < mine[0]:
            yield from itertools.repeat((Kind.EXTRA, other[0]), len(other[1]))
            other = next(theirs, None)
        else:
            yield from _of_one_key(mine[0], mine[1], other[1])
            mine, other = next(ours, None), next(theirs, None)


def _of_one_key(key: str, mine: list[str], other: list[str]) -> Iterator[tuple[Kind, str]]:
    if mine == other:
        return
    only_mine, only_other = Counter(mine) - Counter(other), Counter(other) - Counter(mine)
    pairs = min(only_mine.total(), only_other.total())
    yield from itertools.repeat((Kind.DIFFERS, key), pairs)
    yield from itertools.repeat((Kind.MISSING, key), only_mine.total() - pairs)
    yield from itertools.repeat((Kind.EXTRA, key), only_other.total() - pairs)


def _runs(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for key, group in itertools.groupby(rows, key=lambda row: row[0]):
        yield key, [row for _, row in group]


def _by_key(details: Iterable[RowDetail]) -> dict[str, list[RowDetail]]:
    found: dict[str, list[RowDetail]] = {}
    for detail in details:
        found.setdefault(detail.key_digest, []).append(detail)
    return found
