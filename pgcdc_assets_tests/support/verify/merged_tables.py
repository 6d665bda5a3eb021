"""Merged tables that a test may read, copy and damage."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify import Findings, check_all, check_merged
from pgcdc_assets_tests.support.merge.history import Landing

BOTH = CdcTable("shop", "items", scd=(1, 2))
IMAGE = CdcTable("shop", "items", scd=(1,))
HISTORY = CdcTable("shop", "items", scd=(2,))


@dataclass
class Merged:
    """Merged tables, and their watermark before the last merge."""

    session: SparkSession
    landing: Landing
    since: Position = field(default_factory=lambda: Position(1, Lsn(0)))

    @property
    def zone(self) -> RawZone:
        return self.landing.zone

    def path(self, scd: int) -> str:
        return table_path(self.zone.lake, self.zone.name, "shop", "items", scd)

    def merge(self, table: CdcTable) -> None:
        """Merge all landed windows."""
        for report in merge_tables(self.session, self.zone, [table], self.landing.windows[-1]):
            assert isinstance(report, MergeReport), report.error.__cause__ or report.error
            self.since = Position(self.landing.epoch, report.watermark_before or Lsn(0))

    def check_merged(self, scd: int, table: CdcTable) -> Findings:
        """Check the rows that the last merge changed, as in a large table."""
        return check_merged(self.session, self.zone, table, scd, self.since, whole_below_bytes=-1)

    def check_all(self, scd: int, table: CdcTable) -> Findings:
        return check_all(self.session, self.zone, table, scd)

    def copied(self, folder: Path) -> Merged:
        """Copy the tables."""
        shutil.copytree(self.zone.lake.uri, folder)
        zone = RawZone(Lake(str(folder)), self.zone.name)
        landing = replace(self.landing, zone=zone, windows=list(self.landing.windows))
        return replace(self, landing=landing)

    def one(self, scd: int, condition: str) -> dict[str, Any]:
        """Return a row."""
        builder = QueryBuilder().register("t", DeltaTable(self.path(scd)))
        found = builder.execute(f"select * from t where {condition} order by 1, 2 limit 1")
        (row,) = pa.table(found).to_pylist()
        return dict(row)

    def add(self, scd: int, row: dict[str, Any], **changed: Any) -> None:
        table = DeltaTable(self.path(scd))
        schema = pa.schema(table.schema().to_arrow())
        rows = pa.Table.from_pylist([{**row, **changed}], schema=schema)
        write_deltalake(table, rows, mode="append")

    def change(self, scd: int, row: dict[str, Any], **changed: str) -> None:
        done = DeltaTable(self.path(scd)).update(predicate=_same(row), updates=changed)
        assert done["num_updated_rows"] == 1

    def remove(self, scd: int, row: dict[str, Any]) -> None:
        assert DeltaTable(self.path(scd)).delete(_same(row))["num_deleted_rows"] == 1


def _same(row: dict[str, Any]) -> str:
    names = [n for n in ("history", "id", "_lsn", "_valid_from_lsn", "_ordinal") if n in row]
    return " and ".join(f"{name} = {row[name]}" for name in names)
