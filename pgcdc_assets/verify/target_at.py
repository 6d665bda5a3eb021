"""An SCD1 table at one LSN, without a change of the table itself.

Each merge commits a version of the table with its watermark. The newest version whose watermark is
not above the LSN is copied to a staging folder, by a shallow clone if the table is large. A merge
folds the changes up to the LSN into the copy. So the live table may be ahead, and merges may run at
the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import DefiniteError, PgcdcError, TableDamaged, TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge import MergeFailure
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.snapshots import parse_snapshot_key
from pgcdc_assets.raw.staging import VERIFY, staging_root
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.fence import read_fence, read_watermarks
from pgcdc_assets.tables.merge_notes import NOTES, is_unfinished
from pgcdc_assets.tables.properties import KEY_SINCE
from pgcdc_assets.tables.schema_gate import read_gate, schema_change_error
from pgcdc_assets.tables.spark_watermarks import advance_by_spark
from pgcdc_assets.tables.state import advance_watermark, open_table, read_position, table_path
from pgcdc_assets.verify.comparison_point import Moment
from pgcdc_assets.verify.reading_errors import TableReading
from pgcdc_assets.verify.small_table import copy_small
from pgcdc_assets.verify.table_version import open_merged
from pgcdc_assets.verify.target import TargetVersion

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCD = 1

# Number of versions to examine, newest first.
_VERSIONS = 200


@contextlib.contextmanager
def targets_at(
    spark: SparkSession, zone: RawZone, tables: Sequence[CdcTable], moment: Moment
) -> Iterator[list[TargetVersion | PgcdcError]]:
    """Find or build a Delta table with the rows of SCD1 at a moment, for each table.

    If this fails, the table has an error instead: a ConfigurationError if the table was never
    merged, a DefiniteError if the changes of the raw zone cannot be folded into the table, a
    TransientError if the fold failed for another reason. One merge folds all staged tables.
    """
    with staging_root(zone.lake, zone.name, VERIFY) as root:
        found: list[TargetVersion | PgcdcError | None] = []
        for table in tables:
            try:
                with TableReading(zone, table).explained():
                    found.append(_find_or_stage(spark, zone, table, moment, root))
            except PgcdcError as error:
                found.append(error)
        unfolded = [t for t, version in zip(tables, found, strict=True) if version is None]
        folded = _fold(spark, zone, unfolded, moment, root) if unfolded else {}
        yield [
            folded[table.name] if version is None else version
            for table, version in zip(tables, found, strict=True)
        ]


def _find_or_stage(
    spark: SparkSession, zone: RawZone, table: CdcTable, moment: Moment, root: str
) -> TargetVersion | None:
    """Find the version of a table at the moment; None if an earlier version was staged for a fold.

    Raises:
        ConfigurationError: the table was never merged.
        SchemaChangeError: a schema change before the moment needs a snapshot, which is not taken
            or is later.
        TableDamaged: the log has lost the watermark of the table.
        TransientError: no version of a finished merge from before the moment is kept.
    """
    path = table_path(zone.lake, zone.name, table.schema, table.table, _SCD)
    log = open_merged(zone, path, table.qualified_name)
    found = version_through(zone, log, path, moment.epoch, moment.lsn)
    mark = None if found is None else Position(moment.epoch, found.watermark)
    gate = read_gate(zone, table, _SCD, mark, Position(moment.epoch, moment.lsn))
    if gate is not None and gate.hold < (moment.epoch, moment.lsn):
        raise schema_change_error(table.name, gate.events[0])
    if found is None:
        # A table without a watermark of the epoch begins with a snapshot. Any other table must not
        # be built from the raw zone: the comparison would not read its rows.
        _check_not_merged(zone, table, path, moment)
        return None
    if _is_unchanged(zone, table, moment, found.watermark):
        return TargetVersion(path, found.version)
    staged = table_path(zone.lake, zone.name, table.schema, table.table, _SCD, root)
    if not copy_small(zone.lake, log, staged):
        spark.sql(
            f"CREATE TABLE {delta_table(staged)} SHALLOW CLONE {delta_table(path)} "
            f"VERSION AS OF {found.version}"
        )
    _set_watermark(spark, zone, staged, Position(moment.epoch, found.watermark))
    return None


def _set_watermark(spark: SparkSession, zone: RawZone, staged: str, position: Position) -> None:
    """Write the watermark of a copy, which has the table's rows, but not its transactions.

    A fold into a copy without a watermark would build it from the raw zone.

    Raises:
        TransientError: the watermark was not written.
    """
    if not advance_watermark(zone, staged, None, position):
        advance_by_spark(spark, zone, staged, None, position)
    table = open_table(zone.lake, staged)
    if table is None or read_position(zone, table, staged) != position:
        raise TransientError(
            reason=f"The watermark of the copy {staged} could not be written. Run it again."
        )


class MergedVersion(NamedTuple):
    """A version of a table and its watermark."""

    version: int
    watermark: Lsn


def version_through(
    zone: RawZone, table: DeltaTable, path: str, epoch: int, lsn: Lsn
) -> MergedVersion | None:
    """Find the newest version with a watermark at or below the LSN; None without such a version.

    Versions between the commits of one merge are left out. A fold into their copy would take the
    rows for rows that follow the new columns and the new key.

    Raises:
        TableDamaged: the log has lost the watermark of the table.
    """
    newest = table.version()
    for _ in range(_VERSIONS):
        try:
            watermark = read_watermarks(zone, table, path, [epoch]).get(epoch)
            if watermark is not None and watermark <= lsn:
                if not _is_unfinished(zone, table, path, Position(epoch, watermark)):
                    return MergedVersion(table.version(), watermark)
        except DefiniteError:
            if table.version() == newest:
                raise
            # The log's older entries are cleaned away.
            return None
        if table.version() == 0:
            return None
        try:
            table.load_as_version(table.version() - 1)
        except (DeltaError, OSError):
            # The log's older entries are cleaned away.
            return None
    return None


def _is_unfinished(zone: RawZone, table: DeltaTable, path: str, watermark: Position) -> bool:
    """Return whether the loaded version is between the commits of one merge."""
    properties = table.metadata().configuration
    if KEY_SINCE in properties and parse_snapshot_key(properties[KEY_SINCE]) > watermark:
        # The rows without the new key have ended, and the rows of the snapshot are to follow.
        return True
    if not properties.keys() & set(NOTES):
        return False
    return is_unfinished(table, read_fence(zone.lake, table, path, zone.name))


def _check_not_merged(zone: RawZone, table: CdcTable, path: str, moment: Moment) -> None:
    log = open_merged(zone, path, table.qualified_name)
    watermark = read_watermarks(zone, log, path, [moment.epoch]).get(moment.epoch)
    if watermark is not None:
        raise TransientError(
            reason=f"Table {table.qualified_name} was not compared: it is merged through "
            f"{watermark}, and its log has no version of a finished merge from before "
            f"{moment.lsn}, at which the source was read. Run it again."
        )


def _is_unchanged(zone: RawZone, table: CdcTable, moment: Moment, watermark: Lsn) -> bool:
    """Return whether the table has no change between a watermark and the moment."""
    snapshots = zone.snapshots.complete_snapshots(moment.epoch)
    for copy in [*snapshots, *zone.partial_snapshots.complete_snapshots(moment.epoch)]:
        if copy.name == table.name and watermark < copy.snapshot_lsn <= moment.lsn:
            return False
    changes = scan_changes(
        zone.changes.table,
        epoch=moment.epoch,
        start=watermark,
        end=moment.lsn,
        names=zone.source_relations(moment.epoch).names(table.name),
        columns=("op",),
    )
    return next(changes, None) is None


def _fold(
    spark: SparkSession, zone: RawZone, tables: Sequence[CdcTable], moment: Moment, root: str
) -> dict[TableName, TargetVersion | PgcdcError]:
    from pgcdc_assets.merge import merge_tables

    targets = [replace(table, scd=(_SCD,)) for table in tables]
    through = LsnWindow.of(moment.epoch, 0, moment.lsn)
    by_name = {table.name: table for table in targets}
    found: dict[TableName, TargetVersion | PgcdcError] = {}
    for report in merge_tables(spark, zone, targets, through, root=root):
        name = report.name
        if isinstance(report, MergeFailure):
            found[name] = _error_of_fold(TableReading(zone, by_name[name]), report.error)
        elif report.watermark_after != moment.lsn:
            found[name] = TransientError(
                reason=f"Table {name} was not folded through {moment.lsn}, but "
                f"through {report.watermark_after}. Run it again."
            )
        else:
            found[name] = TargetVersion(report.path)
    return found


def _error_of_fold(reading: TableReading, error: PgcdcError) -> PgcdcError:
    """Return the error of a fold, whose copy shares the files of the live table."""
    cause = error.__cause__
    if isinstance(error, TransientError) and isinstance(cause, Exception):
        explained = reading.explain(cause)
        if isinstance(explained, TableDamaged):
            return explained
    return error
