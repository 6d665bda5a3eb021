"""SCD type 1 where the table is tiny: all of its rows are written again, in one commit.

A MERGE of ten rows is half a dozen jobs of Spark. To read the table's files beside the changes and
to write what remains is one, and Delta's bookkeeping for it is less
(docs/decisions/0012-tiny-tables-written-anew.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.typed_columns import target_columns
from pgcdc_assets.merge.fold.versions import stored_rows
from pgcdc_assets.merge.write import overwrite
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.state import TargetState


def read_files(spark: SparkSession, state: TargetState) -> DataFrame:
    """Read a table as its log describes it.

    The files are named to Spark where nothing but their rows counts: to let Delta find them is a
    job of its own. Deletion vectors, mapped names and the files of another table are Delta's.
    """
    names = state.files.column("path").to_pylist()
    is_plain = not state.has_deletion_vectors and not any(set("/:%") & set(n) for n in names)
    if not names or not is_plain or "delta.columnMapping.mode" in state.properties:
        return spark.read.format("delta").load(state.path)
    schema = StructType.fromJson(json.loads(state.schema))
    return spark.read.schema(schema).parquet(*(f"{state.path}/{name}" for name in names))


@dataclass(frozen=True)
class WholeTable:
    """Rows that take the place of all of a table's.

    Attributes:
        rows: with the table's columns.
        counted: says, when they were written, how many were inserted, updated and deleted.
    """

    rows: DataFrame
    counted: Observation

    @classmethod
    def of(cls, rows: DataFrame, stored: DataFrame, fold: Fold) -> WholeTable:
        """Put folded rows in the place of the table's rows under the same keys.

        Args:
            rows: without unknown fields.
            stored: all of the table's rows; no key of theirs is NULL.
        """
        values = [*(f"c{i}" for i in range(len(fold.shape.fields))), "rescued"]
        names = [*fold.key_columns, *values, "lsn", "ordinal", "commit_ts", "is_content"]
        both = rows.selectExpr(*names, "false AS is_stored").unionAll(
            stored_rows(stored, fold).selectExpr(*names, "true AS is_stored")
        )
        of_key = f"OVER (PARTITION BY {', '.join(fold.key_columns)})"
        at = "struct(lsn, ordinal)"
        # A row that no change is newer than stays, even one whose key is there twice: the checks
        # tell of it.
        is_kept = (
            f"IF(is_stored, change IS NULL OR change <= {at}, "
            "IF(there IS NULL, is_content, change > there))"
        )
        rows = both.selectExpr(
            "*",
            f"max(IF(is_stored, NULL, {at})) {of_key} AS change",
            f"max(IF(is_stored, {at}, NULL)) {of_key} AS there",
        ).where(is_kept)
        counted = Observation()
        changed = {
            "inserted": "NOT is_stored AND there IS NULL",
            "updated": "NOT is_stored AND there IS NOT NULL AND is_content",
            "deleted": "NOT is_content",
        }
        counts = [F.expr(f"count_if({which})").alias(name) for name, which in changed.items()]
        kept = rows.observe(counted, *counts).where("is_content")
        return cls(kept.select(*target_columns(fold.shape)), counted)

    def write(self, path: str, step: Step) -> None:
        """Write them in one commit."""
        overwrite(self.rows, path, step)

    def counts(self) -> tuple[int, int, int]:
        """Give the numbers of inserted, updated and deleted rows.

        To be asked once the commit is known to be there: of a write that Delta has left out nothing
        is counted, and an embedded session waits for the count for ever.
        """
        found = self.counted.get
        return int(found["inserted"]), int(found["updated"]), int(found["deleted"])
