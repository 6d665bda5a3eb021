"""An SCD1 table as it is at one LSN, without a trace in the table itself.

Merges leave a version of the table per watermark. The newest one whose watermark is not above the
LSN is taken; changes between the two are folded into a shallow clone in a staging folder, by the
merge's own code. So it does not matter how far the live table has gone, nor whether a merge runs
meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import DefiniteError, TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeFailure, TableTarget
from pgcdc_assets.merge.fence import read_watermarks
from pgcdc_assets.merge.sql import delta_table
from pgcdc_assets.merge.watermark import advance_watermark, table_path
from pgcdc_assets.raw.reading import read_changes
from pgcdc_assets.raw.staging import VERIFY, staging_root
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.verify.merged import open_merged
from pgcdc_assets.verify.moment import Moment
from pgcdc_assets.verify.target import TargetVersion

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCD = 1

# Versions looked at, newest first, before the table is built from raw instead.
_VERSIONS = 200


@contextlib.contextmanager
def target_at(
    spark: SparkSession, zone: RawZone, table: TableTarget, moment: Moment
) -> Iterator[TargetVersion]:
    """Give a version of some Delta table that holds the SCD1 table as of the moment.

    Raises:
        ConfigurationError: the table was never merged.
        DefiniteError: what the raw zone holds cannot be folded into it.
        TransientError: the fold failed for another reason.
    """
    path = table_path(zone.lake, zone.name, table.schema, table.table, _SCD)
    newest = open_merged(zone, path, table.qualified_name)
    found = version_through(zone, newest, path, moment.epoch, moment.lsn)
    if found is not None and _is_unchanged(zone, table, moment, found[1]):
        yield TargetVersion(path, found[0])
        return
    with staging_root(zone.lake, zone.name, VERIFY) as root:
        staged = table_path(zone.lake, zone.name, table.schema, table.table, _SCD, root)
        if found is not None:
            _clone(spark, zone, path, staged, moment.epoch, *found)
        _fold(spark, zone, table, moment, root)
        yield TargetVersion(staged)


def version_through(
    zone: RawZone, table: DeltaTable, path: str, epoch: int, lsn: Lsn
) -> tuple[int, Lsn] | None:
    """Find the newest version with a watermark at or below the LSN; None when the log has none."""
    for _ in range(_VERSIONS):
        try:
            watermark = read_watermarks(zone, table, path, [epoch]).get(epoch)
        except DefiniteError:
            # The log's older entries are cleaned away.
            return None
        if watermark is not None and watermark <= lsn:
            return table.version(), watermark
        if table.version() == 0:
            return None
        try:
            table.load_as_version(table.version() - 1)
        except (DeltaError, OSError):
            # The log's older entries are cleaned away.
            return None
    return None


def _is_unchanged(zone: RawZone, table: TableTarget, moment: Moment, watermark: Lsn) -> bool:
    """Whether nothing happened to the table between a watermark and the moment."""
    place = (table.schema, table.table)
    for copy in zone.snapshots.complete_copies(moment.epoch):
        if (copy.schema, copy.table) == place and watermark < copy.snapshot_lsn <= moment.lsn:
            return False
    changes = read_changes(
        zone.changes.table,
        epoch=moment.epoch,
        start=watermark,
        end=moment.lsn,
        source=place,
        columns=("op",),
    )
    return next(changes, None) is None


def _clone(
    spark: SparkSession,
    zone: RawZone,
    path: str,
    staged: str,
    epoch: int,
    version: int,
    watermark: Lsn,
) -> None:
    spark.sql(
        f"CREATE TABLE {delta_table(staged)} SHALLOW CLONE {delta_table(path)} "
        f"VERSION AS OF {version}"
    )
    # A clone has the files of the table, and none of its application transactions.
    advance_watermark(zone, staged, None, (epoch, watermark))


def _fold(
    spark: SparkSession, zone: RawZone, table: TableTarget, moment: Moment, root: str
) -> None:
    from pgcdc_assets.merge import merge_tables

    target = replace(table, scd=(_SCD,))
    through = LsnWindow.of(moment.epoch, 0, moment.lsn)
    for report in merge_tables(spark, zone, [target], through, root=root):
        if isinstance(report, MergeFailure):
            raise report.error
        if report.watermark_after != moment.lsn:
            raise TransientError(
                reason=f"Table {table.qualified_name} was not folded through {moment.lsn}, but "
                f"through {report.watermark_after}. Run it again."
            )
