"""The epoch columns of a history, for tables of releases that did not write them.

LSNs of different epochs do not compare: a renewed slot may begin at a lower LSN on another server.
So a history stores the epoch beside each LSN (docs/decisions/0017-epochs-in-history.md). A table
without these columns gets them in one rewrite before its next merge. An LSN that one epoch alone
has captured belongs to that epoch. If the LSNs of two epochs overlap, the commit time decides.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.write import overwrite_with_new_columns
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.columns import EPOCH_COLUMNS, SCD2_COLUMNS, VALID_FROM, VALID_TO
from pgcdc_assets.tables.fence import Step, read_watermarks
from pgcdc_assets.tables.state import open_table


@dataclass(frozen=True)
class MergedEpoch:
    """The part of a table that comes from one epoch.

    Attributes:
        start_lsn: the lowest LSN that a row of it may have.
        watermark: the highest.
        begins_at: the earliest commit time that a row of it may have.
    """

    epoch: int
    start_lsn: Lsn
    watermark: Lsn
    begins_at: dt.datetime


def add_epochs(spark: SparkSession, zone: RawZone, path: str, name: TableName, step: Step) -> None:
    """Add and fill the two epoch columns in one commit.

    Args:
        name: schema and table.
    """
    merged = find_merged_epochs(zone, path, name)
    comments = {column: comment for column, _, comment in SCD2_COLUMNS}
    columns = [
        F.expr(epoch_sql(merged, f"{end}_lsn", end)).alias(
            f"{end}_epoch", metadata={"comment": comments[f"{end}_epoch"]}
        )
        for end in (VALID_FROM, VALID_TO)
    ]
    rows = spark.read.format("delta").load(path).drop(*EPOCH_COLUMNS)
    overwrite_with_new_columns(rows.select("*", *columns), path, step)


def find_merged_epochs(zone: RawZone, path: str, name: TableName) -> list[MergedEpoch]:
    """List the epochs of the changes in a table, the newest first."""
    epochs = {epoch.epoch: epoch for epoch in zone.epochs.all()}
    table = open_table(zone.lake, path)
    assert table is not None
    begins: dict[int, dt.datetime] = {}
    for (epoch, _, *copied), taken_at in zone.snapshots.times().items():
        if tuple(copied) == name:
            begins[epoch] = min(taken_at, begins.get(epoch, taken_at))
    return [
        MergedEpoch(
            number,
            epochs[number].start_lsn,
            watermark,
            begins.get(number, epochs[number].created_at),
        )
        for number, watermark in sorted(
            read_watermarks(zone, table, path, epochs).items(), reverse=True
        )
    ]


def epoch_sql(merged: Sequence[MergedEpoch], lsn: str, at: str) -> str:
    """Write the SQL of an LSN's epoch; NULL for an LSN that no epoch has captured.

    For two epochs:
        CASE WHEN lsn BETWEEN 10 AND 90 AND at >= timestamp_micros(...) THEN 2
             WHEN lsn BETWEEN 50 AND 200 THEN 1
             WHEN lsn BETWEEN 10 AND 90 THEN 2 END

    Args:
        merged: the newest epoch first.
        lsn: the LSN's column.
        at: the column of the commit time.
    """
    by_both, by_lsn = [], []
    for epoch in merged:
        within = f"{lsn} BETWEEN {int(epoch.start_lsn)} AND {int(epoch.watermark)}"
        micros = round(epoch.begins_at.timestamp() * 1_000_000)
        since = f" AND {at} >= timestamp_micros({micros})" if epoch is not merged[-1] else ""
        by_both.append(f"WHEN {within}{since} THEN {epoch.epoch}")
        by_lsn.append(f"WHEN {within} THEN {epoch.epoch}")
    if not merged:
        return "CAST(NULL AS INT)"
    return f"CASE {' '.join(by_both + by_lsn)} END"
