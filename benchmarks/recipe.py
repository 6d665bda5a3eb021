"""A hand-written merge for a stream of changes, as a baseline.

Per window, the recipe is the body of a `foreachBatch`: cast the texts, keep the newest row of each
key by `row_number`, merge. The recipe does not handle unchanged TOAST, changed keys, TRUNCATE, and
values without an exact type, and does not recognise a repeated window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from benchmarks.orders import SCHEMA
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.sql import delta_table

# In SQL, because a Spark Connect server knows `DeltaTable.merge` only with a plugin of Delta.
_MERGE = """
    MERGE INTO {target} t USING {source} s ON t.id = s.id
    WHEN MATCHED AND s.op = 'D' THEN DELETE
    WHEN MATCHED THEN UPDATE SET *
    WHEN NOT MATCHED AND s.op <> 'D' THEN INSERT *
"""
_SOURCE = "recipe_changes"

_VALUES = (
    "CAST(new[1] AS BIGINT) AS customer_id",
    "new[2] AS status",
    "CAST(new[3] AS DECIMAL(12, 2)) AS amount",
    "new[4] AS note",
    "CAST(new[5] AS TIMESTAMP) AS updated_at",
)

# Table properties by name of the recipe: Delta's defaults, and with deletion vectors, as our tables
# have.
RECIPES: Mapping[str, Mapping[str, str]] = {
    "recipe": {},
    "recipe_with_deletion_vectors": {"delta.enableDeletionVectors": "true"},
}


@dataclass(frozen=True)
class Recipe:
    """Tables of the hand-written merge, from the same raw zone."""

    spark: SparkSession
    zone: RawZone
    name: str

    def path(self, table: str) -> str:
        """Return the path of a table."""
        return self.zone.lake.path(self.zone.name, self.name, table)

    def write_copy(self, table: str) -> None:
        """Write the rows of the table's snapshot in one commit."""
        copied = self._read(self.zone.snapshots.table.uri, table)
        rows = copied.selectExpr("CAST(new[0] AS BIGINT) AS id", *_VALUES)
        rows.write.format("delta").options(**RECIPES[self.name]).save(self.path(table))

    def merge(self, table: str, window: LsnWindow) -> None:
        """Merge a window's changes."""
        changes = self._read(self.zone.changes.table.uri, table).where(
            f"commit_lsn >= {int(window.start)} AND commit_lsn < {int(window.end)}"
        )
        rows = changes.selectExpr(
            "op",
            "commit_lsn",
            "ordinal",
            "CAST(coalesce(new[0], old[0]) AS BIGINT) AS id",
            *_VALUES,
        )
        newest_first = Window.partitionBy("id").orderBy(F.desc("commit_lsn"), F.desc("ordinal"))
        newest = rows.withColumn("age", F.row_number().over(newest_first)).where("age = 1")
        newest.createOrReplaceTempView(_SOURCE)
        self.spark.sql(_MERGE.format(target=delta_table(self.path(table)), source=_SOURCE))

    def _read(self, uri: str, table: str) -> DataFrame:
        rows = self.spark.read.format("delta").load(uri)
        return rows.where((F.col("schema") == SCHEMA) & (F.col("table") == table))
