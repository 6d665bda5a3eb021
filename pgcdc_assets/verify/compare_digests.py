"""Comparison of the source with SCD1 at one LSN, by digests, in bounded memory.

Postgres and Spark first compute sums over buckets of rows. For buckets with different sums, the
second step compares the digests of rows. For some of the differing rows, the third step compares
the keys and the digests of columns.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.copy.digests import Bucket, RowDetail, SourceDigests, open_source_table
from pgcdc_assets.raw.relations.schema_events import kept_partitions
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.properties import KEY, parse_key
from pgcdc_assets.verify.canonical_text import key_indexes, pair_columns
from pgcdc_assets.verify.comparison_point import Moment
from pgcdc_assets.verify.differing_keys import find_differing_keys
from pgcdc_assets.verify.ignored_columns import find_ignored, find_lacking
from pgcdc_assets.verify.reading_errors import TableReading, comparison_session
from pgcdc_assets.verify.report import Comparison, ComparisonFailure, Difference, DifferenceKind
from pgcdc_assets.verify.small_table import local_rows, read_small, row_limit
from pgcdc_assets.verify.source_calls import SourceCalls
from pgcdc_assets.verify.table_version import open_merged
from pgcdc_assets.verify.target import TargetDigests, TargetVersion, read_version, sum_buckets
from pgcdc_assets.verify.target_at import targets_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAMED_ROWS = 20

# Number of small tables that are compared together, each over a connection to the source.
_SIDE_BY_SIDE = 5

# Maximum number of differing rows whose columns are compared.
_EXAMINED_ROWS = 200

# Rows of differing buckets whose digests are read at a time, and the number of times after which a
# difference that was found is enough.
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
    table: CdcTable,
    moment: Moment,
    *,
    named_rows: int = NAMED_ROWS,
) -> Comparison:
    """Compare a table's SCD1 with the source, both at the moment.

    Wait for the capture of all changes before the moment first (`wait_captured`).

    Args:
        named_rows: maximum number of differing rows whose keys are reported.

    Raises:
        ConfigurationError: the table is not published, was never merged, or may not be read.
        TransientError: the table was altered during the comparison, or a server is not available.
        DefiniteError: the changes of the raw zone cannot be folded into the table.
    """
    (found,) = compare_tables(
        spark, settings, zone, publication, [table], moment, named_rows=named_rows
    )
    if isinstance(found, ComparisonFailure):
        raise found.error
    return found


def compare_tables(
    spark: SparkSession,
    settings: ConnectionSettings,
    zone: RawZone,
    publication: str,
    tables: Sequence[CdcTable],
    moment: Moment,
    *,
    named_rows: int = NAMED_ROWS,
) -> Iterator[Comparison | ComparisonFailure]:
    """Compare tables with the source, all at the moment, and yield the results in order.

    One query sums up several small tables. An error that `compare_at` would raise is yielded as
    the result of its table, and the other tables are compared.
    """
    with (
        comparison_session(spark) as session,
        targets_at(session, zone, tables, moment) as versions,
    ):
        known = zone.source_relations(moment.epoch).newest_ids(table.name for table in tables)
        run = _Run(session, settings, zone, publication, moment, named_rows, known)
        group: list[_Member] = []
        for table, version in zip(tables, versions, strict=True):
            member = run.open_target(table, version)
            if not member.is_small:
                yield from run.compare(group)
                group = []
            group.append(member)
            if not member.is_small or len(group) == _SIDE_BY_SIDE:
                yield from run.compare(group)
                group = []
        yield from run.compare(group)


@dataclass(frozen=True)
class _Member:
    """A table that is compared together with other tables.

    Attributes:
        frame: the rows of the table's version; None after an error.
        ignored: names of the columns that the source has dropped, and of the owner's columns.
        key: present names of the merge key's columns; the settings may have earlier names.
        digits: number of hex digits of a bucket's name.
    """

    table: CdcTable
    frame: DataFrame | None = None
    ignored: frozenset[str] = frozenset()
    key: tuple[str, ...] = ()
    digits: int = 1
    is_small: bool = True
    error: PgcdcError | None = None


@dataclass(frozen=True)
class _Run:
    """The state that all tables of one call share."""

    session: SparkSession
    settings: ConnectionSettings
    zone: RawZone
    publication: str
    moment: Moment
    named_rows: int
    relation_ids: Mapping[TableName, int]

    def open_target(self, table: CdcTable, version: TargetVersion | PgcdcError) -> _Member:
        """Open the table's version. A small version is read without a Spark job."""
        if isinstance(version, PgcdcError):
            return _Member(table, error=version)
        try:
            with TableReading(self.zone, table).explained():
                log = open_merged(self.zone, version.path, table.qualified_name, version.version)
                ignored = find_ignored(self.zone, table.name, log)
                key = parse_key(log.metadata().configuration.get(KEY, ""))
                small = read_small(log)
                if small is not None:
                    frame = local_rows(self.session, small)
                    return _Member(table, frame, ignored, key, _digits(small.rows.num_rows))
                frame = read_version(self.session, version)
                rows = row_limit(log)
                digits = _digits(frame.count() if rows is None else rows)
                return _Member(table, frame, ignored, key, digits, False)
        except PgcdcError as error:
            return _Member(table, error=error)

    def compare(self, members: Sequence[_Member]) -> Iterator[Comparison | ComparisonFailure]:
        """Compare tables; both servers sum up the buckets at the same time."""
        with ExitStack() as held, SourceCalls() as calls:
            sides = [self._open_source(held, calls, n, m) for n, m in enumerate(members)]
            opened = [side for side in sides if isinstance(side, _TableComparison)]
            asked = [calls.submit(partial(side.source.buckets, side.digits)) for side in opened]
            found = iter(zip(asked, self._sum_targets(opened), strict=True))
            for member, side in zip(members, sides, strict=True):
                table = member.table
                try:
                    if isinstance(side, PgcdcError):
                        raise side
                    source, target = next(found)
                    if isinstance(target, PgcdcError):
                        raise target
                    with side.reading.explained():
                        side.run(source.result(), target)
                except PgcdcError as error:
                    yield ComparisonFailure(table.schema, table.table, error)
                else:
                    yield side.report(table, self.moment)

    def _sum_targets(
        self, sides: Sequence[_TableComparison]
    ) -> list[dict[str, Bucket] | PgcdcError]:
        """Sum up the buckets of all tables in one query; after an error, those of each alone."""
        try:
            return [*sum_buckets(self.session, [(side.target, side.digits) for side in sides])]
        except Exception as error:
            if len(sides) == 1:
                # The statement on the source may take hours.
                sides[0].calls.end(sides[0].source.source)
                return [sides[0].reading.explain(error)]
        return [sums for side in sides for sums in self._sum_targets([side])]

    def _open_source(
        self, held: ExitStack, calls: SourceCalls, number: int, member: _Member
    ) -> _TableComparison | PgcdcError:
        """Open the source of a table until the stack is closed."""
        if member.frame is None:
            assert member.error is not None
            return member.error
        table, frame = member.table, member.frame
        reading = TableReading(self.zone, table)
        try:
            source = held.enter_context(
                open_source_table(
                    self.settings,
                    self.publication,
                    table.name,
                    self.moment.snapshot_name,
                    self.relation_ids.get(table.name),
                )
            )
            calls.add(source)
            with reading.explained():
                types = {name: kind for name, kind in frame.dtypes if name not in member.ignored}
                columns = pair_columns(source.relation, types)
                key = key_indexes(columns, member.key, table.key or (), source.relation.row_key)
                kept_end = self._find_kept_end(table)
                target = TargetDigests(self.session, frame, columns, key, number, kept_end)
        except PgcdcError as error:
            return error
        return _TableComparison(
            source.digests([column.source for column in columns], key),
            target,
            tuple(column.name for column in columns),
            tuple(columns[i].name for i in key),
            find_lacking(source.relation, types),
            member.digits,
            self.named_rows,
            reading,
            calls,
        )

    def _find_kept_end(self, table: CdcTable) -> Lsn | None:
        """Return an LSN above all kept rows of detached partitions; None without such rows."""
        if not table.keeps_partitions:
            return None
        moment = Position(self.moment.epoch, self.moment.lsn)
        merged = [s for s in self.zone.snapshots.complete_snapshots() if s.position <= moment]
        kept = kept_partitions(self.zone.schema_events.read(), merged, [table.name])
        return max((event.lsn for event in kept.get(table.name, ())), default=None)


def _digits(rows: int) -> int:
    """Choose the number of hex digits of a bucket name, so that few rows share a bucket."""
    digits = 1
    while digits < _MOST_DIGITS and rows > _ROWS_A_BUCKET * 16**digits:
        digits += 1
    return digits


@dataclass
class _TableComparison:
    """The three steps for one table, and their findings."""

    source: SourceDigests
    target: TargetDigests
    names: tuple[str, ...]
    key_names: tuple[str, ...]
    lacking: tuple[tuple[str, ...], tuple[str, ...]]
    digits: int
    limit: int
    reading: TableReading
    calls: SourceCalls
    source_rows: int = 0
    target_rows: int = 0
    is_counted: bool = True
    counts: Counter[DifferenceKind] = field(default_factory=Counter)
    named: list[Difference] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    _examined: dict[DifferenceKind, list[str]] = field(
        default_factory=lambda: {kind: [] for kind in DifferenceKind}
    )

    def run(self, source: Mapping[str, Bucket], target: Mapping[str, Bucket]) -> None:
        """Execute the second and the third step, with the sums of the first step."""
        self.source_rows = sum(bucket.row_count for bucket in source.values())
        self.target_rows = sum(bucket.row_count for bucket in target.values())
        differing = sorted(
            name for name in source.keys() | target.keys() if source.get(name) != target.get(name)
        )
        sizes = {
            name: source.get(name, _EMPTY).row_count + target.get(name, _EMPTY).row_count
            for name in differing
        }
        examined = 0
        for passes, group in enumerate(_grouped(sizes)):
            # Kept rows of detached partitions are no difference, and must not hide one.
            if passes >= _PASSES and set(+self.counts) - {DifferenceKind.KEPT}:
                break
            self._look_into(group)
            examined += len(group)
        self.is_counted = examined == len(differing)
        self._examine()

    def report(self, table: CdcTable, moment: Moment) -> Comparison:
        """Return the result of the comparison."""
        source_only, target_only = self.lacking
        return Comparison(
            table.schema,
            table.table,
            self.source_rows,
            self.target_rows,
            missing=self.counts[DifferenceKind.MISSING],
            extra=self.counts[DifferenceKind.EXTRA],
            differing=self.counts[DifferenceKind.DIFFERS],
            kept=self.counts[DifferenceKind.KEPT],
            columns=tuple(dict.fromkeys([*source_only, *target_only, *self.columns])),
            source_only=source_only,
            target_only=target_only,
            compared=self.names,
            lsn=moment.lsn,
            key_columns=self.key_names,
            differences=tuple(self.named),
            is_counted=self.is_counted,
        )

    def _look_into(self, buckets: Sequence[str]) -> None:
        source = self.calls.iterate(self.source.rows(buckets))
        found = find_differing_keys(source, self.target.rows(buckets))
        for kind, key_digest, count in found:
            self.counts[kind] += count
            if kind is DifferenceKind.KEPT:
                continue
            examined = self._examined[kind]
            if len(examined) < (_EXAMINED_ROWS if kind is DifferenceKind.DIFFERS else self.limit):
                examined.append(key_digest)

    def _examine(self) -> None:
        """Read keys and columns of some of the differing rows."""
        wanted = sorted({digest for digests in self._examined.values() for digest in digests})
        source = _by_key(self.calls.iterate(self.source.details(wanted)))
        target = _by_key(self.target.details(wanted))
        differences = {
            kind: list(self._differences(kind, source, target)) for kind in DifferenceKind
        }
        found = {name for rows in differences.values() for row in rows for name in row.columns}
        self.columns = [name for name in self.names if name in found]
        # Report some rows of each kind of difference.
        in_turns = itertools.zip_longest(*differences.values())
        rows = [row for turn in in_turns for row in turn if row is not None]
        self.named = rows[: self.limit]

    def _differences(
        self,
        kind: DifferenceKind,
        source: Mapping[str, RowDetail],
        target: Mapping[str, RowDetail],
    ) -> Iterator[Difference]:
        for digest in dict.fromkeys(self._examined[kind]):
            ours, theirs = source.get(digest), target.get(digest)
            shown = ours or theirs
            if shown is None:
                continue
            columns: tuple[str, ...] = ()
            if kind is DifferenceKind.DIFFERS and ours and theirs:
                pairs = zip(self.names, ours.columns, theirs.columns, strict=True)
                columns = tuple(name for name, mine, other in pairs if mine != other)
            yield Difference(kind, shown.key, columns)


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


def _by_key(details: Iterable[RowDetail]) -> dict[str, RowDetail]:
    """Return the first row of each key."""
    found: dict[str, RowDetail] = {}
    for detail in details:
        found.setdefault(detail.key_digest, detail)
    return found
