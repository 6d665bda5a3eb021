"""The pipeline from a real Postgres to SCD1 tables, without Dagster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify import Comparison, compare_table
from pgcdc_assets_tests.support.database import Database

PUBLICATION = "pub"

# A table of each kind. `bag` and `log` have no key.
EACH_KIND = (
    CdcTable("public", "t", scd=(1, 2)),
    CdcTable("public", "kept", soft_deletes=True),
    CdcTable("public", "bag"),
    CdcTable("public", "log", without_key="log"),
)

# Two rows of table `t` swap their keys over a third key.
KEY_SWAP = (
    "update t set id = -1 where id = 1",
    "update t set id = 1 where id = 2",
    "update t set id = 2 where id = -1",
)


@dataclass
class Pipeline:
    """Snapshots, captures and merges of the tables of schema public."""

    database: Database
    zone: RawZone
    spark: SparkSession
    tables: Sequence[str] = ("t",)
    windows: list[LsnWindow] = field(default_factory=list)

    @property
    def slot(self) -> str:
        """Name of the slot, unique on the server."""
        return f"s_{self.database.name}"

    def start(self, *statements: str) -> None:
        """Create the tables, publish them, and take their snapshots."""
        for statement in statements:
            self.database.execute(statement)
        self.database.execute(f"create publication {PUBLICATION} for all tables")
        self.copy()

    def copy(self, *tables: str) -> None:
        """Take snapshots of the tables; without names, of the tables without a snapshot."""
        wanted = [TableName("public", table) for table in tables] or None
        snapshot_tables(self.database.settings(), self.zone, self.slot, PUBLICATION, wanted)

    def capture(self, limits: CaptureLimits | None = None) -> LsnWindow:
        """Capture all earlier commits as the next window."""
        epoch = self.zone.epochs.latest()
        assert epoch is not None
        start = self.zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
        # Test servers commit asynchronously. This commit also flushes earlier commits.
        self.database.transaction(
            "set local synchronous_commit = on", "select pg_logical_emit_message(true, 'test', '')"
        )
        end = Lsn.parse(self.database.value("select pg_current_wal_flush_lsn()::text"))
        window = LsnWindow.of(epoch.epoch, start, end)
        settings = self.database.settings()
        capture_window(settings, self.zone, self.slot, PUBLICATION, window, limits)
        self.windows.append(window)
        return window

    def merge(
        self, through: LsnWindow | None = None, *targets: CdcTable
    ) -> dict[str, MergeReport | MergeFailure]:
        """Merge through a window, the newest by default."""
        wanted = targets or [CdcTable("public", table) for table in self.tables]
        reports = merge_tables(self.spark, self.zone, wanted, through or self.windows[-1])
        return {report.table: report for report in reports}

    def sync(self, *targets: CdcTable) -> dict[str, MergeReport]:
        """Capture and merge, and check the success."""
        reports = self.merge(self.capture(), *targets)
        for report in reports.values():
            assert isinstance(report, MergeReport), report.error.__cause__ or report.error
        return {table: r for table, r in reports.items() if isinstance(r, MergeReport)}

    def path(self, table: str = "t", scd: int = 1) -> str:
        """Return the path of an SCD table."""
        return table_path(self.zone.lake, self.zone.name, "public", table, scd)

    def frame(self, table: str = "t", scd: int = 1) -> DataFrame:
        """Return an SCD table as a DataFrame."""
        return self.spark.read.format("delta").load(self.path(table, scd))

    def rows(self, table: str = "t", columns: str = "id, v") -> list[tuple[Any, ...]]:
        """Return the rows of the SCD1 table in order."""
        names = [name.strip() for name in columns.split(",")]
        return sorted(tuple(row) for row in self.frame(table).select(*names).collect())

    def compare(self, table: str = "t") -> Comparison:
        """Compare the SCD1 table with the source, value by value."""
        return compare_table(self.database.settings(), self.zone, PUBLICATION, "public", table)

    def assert_equal(self, *tables: str) -> None:
        """Check that every table equals its source."""
        for table in tables or self.tables:
            comparison = self.compare(table)
            assert comparison.is_equal, comparison
