"""SCD type 2: every version of every key, as half-open intervals in commit order.

One MERGE ends the versions that are current no more and adds the new ones. Where the changes touch
a good part of a range of keys, the range's current versions are read, sorted in among the changes,
and written anew instead: one shuffle where a MERGE makes three. Either is one commit. The table is
partitioned by `_is_current`, so that its past costs a merge nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.merge.change_stats import ChangeFacts, Truncate
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.key_range import Bounds, matched
from pgcdc_assets.merge.fold.schema import TableShape
from pgcdc_assets.merge.fold.truncates import truncate_sql
from pgcdc_assets.merge.fold.typed_columns import CopiedRows, target_columns, typed
from pgcdc_assets.merge.fold.versions import stored_rows
from pgcdc_assets.merge.write import (
    SOURCE_VIEW,
    create_or_replace,
    insert_clause,
    replace_where,
    values_by_name,
)
from pgcdc_assets.spark.sql import delta_table, identifier
from pgcdc_assets.tables.fence import Step

PARTITIONED_BY = ("_is_current",)


def write_first_copy(path: str, copied: CopiedRows, epoch: int, step: Step) -> None:
    """Make the table of a copy: each row is a version that is current since the copy."""
    keep = [
        f"{_timestamp(copied.at)} AS valid_from",
        "CAST(NULL AS TIMESTAMP) AS valid_to",
        "true AS is_current",
        f"CAST({int(copied.lsn)} AS BIGINT) AS valid_from_lsn",
        "CAST(NULL AS BIGINT) AS valid_to_lsn",
        f"{epoch} AS valid_from_epoch",
        "CAST(NULL AS INT) AS valid_to_epoch",
        "CAST(-1 AS BIGINT) AS ordinal",
        "'S' AS op",
    ]
    rows = typed(copied.frame, copied.shape, lambda i: f"new[{i}]", keep)
    create_or_replace(path, rows, copied.shape, step, PARTITIONED_BY, copied.position)


def copied_events(copied: CopiedRows, current: DataFrame | None) -> DataFrame:
    """Write a copy as events at its LSN: what it holds has come, what it does not hold has gone.

    Args:
        current: all current rows of the table.
    """
    fold = Fold(copied.shape, ChangeFacts())
    position = [
        f"CAST({int(copied.lsn)} AS BIGINT) AS lsn",
        "CAST(-1 AS BIGINT) AS ordinal",
        f"{_timestamp(copied.at)} AS commit_ts",
        "'S' AS op",
    ]
    keep = [*fold.key_values("k", "r", lambda i: f"new[{i}]"), *position, "true AS is_content"]
    rows = typed(copied.frame, copied.shape, lambda i: f"new[{i}]", keep)
    if current is None:
        return rows
    there = stored_rows(current, fold)
    replaced = {"lsn", "ordinal", "commit_ts", "op", "is_content"}
    values = [name for name in there.columns if name not in replaced]
    return rows.unionByName(there.selectExpr(*values, *position, "false AS is_content"))


def current_rows(spark: SparkSession, path: str) -> DataFrame:
    """Read the versions that no change has ended."""
    return spark.read.format("delta").load(path).where("_is_current")


def merge_statement(
    path: str, fold: Fold, tracked: Sequence[int] | None, bounds: Bounds | None, epoch: int
) -> str:
    """Write the MERGE.

    Args:
        epoch: of the changes.
        bounds: of a part of the table that holds every version to be ended.
    """
    fields = list(enumerate(fold.shape.fields))
    ends = ["_valid_to", "_valid_to_lsn", "_valid_to_epoch", "_is_current"]
    updates = [f"t.{name} = s.{name.removeprefix('_')}" for name in ends]
    if tracked is not None:
        updates += [f"t.{identifier(f.name)} = s.c{i}" for i, f in fields if i not in tracked]
        updates.append("t._rescued = s.rescued")
    statement = (
        f"MERGE INTO {delta_table(path)} t USING {SOURCE_VIEW} s\n"
        f"ON t._is_current AND s.is_stored AND {matched(fold, bounds)}\n"
        f"WHEN MATCHED THEN UPDATE SET {', '.join(updates)}\n"
        f"WHEN NOT MATCHED AND NOT s.is_stored THEN {insert_clause(values_by_name(fold.shape))}"
    )
    if fold.facts.truncates:
        statement += f"\n{ending(fold.facts.truncates[0], epoch)}"
    return statement


@dataclass(frozen=True)
class RangeOfVersions:
    """Versions that take the place of the current ones of a range.

    Attributes:
        rows: with the table's columns.
        bounds: of the range.
        counted: says, when the rows were written, how many of the table's were `altered`.
    """

    rows: DataFrame
    bounds: Bounds
    counted: Observation

    @classmethod
    def of(cls, versions: DataFrame, bounds: Bounds, shape: TableShape) -> RangeOfVersions:
        """Take versions of every row in the range, as `build_versions` gives them."""
        counted = Observation()
        altered = F.expr("count_if(is_stored AND is_touched)").alias("altered")
        return cls(
            versions.observe(counted, altered).select(*target_columns(shape)), bounds, counted
        )

    def write(self, spark: SparkSession, path: str, step: Step) -> None:
        """Write them in one commit."""
        condition = f"_is_current AND {self.bounds.condition()}"
        replace_where(spark, self.rows, path, condition, step)

    def count_altered(self) -> int:
        """Give the number of the table's versions that were ended or changed.

        To be asked once the commit is known to be there: of a write that Delta has left out nothing
        is counted, and an embedded session waits for the count for ever.
        """
        return int(self.counted.get["altered"])


def ending(truncate: Truncate, epoch: int) -> str:
    """Write the clause that ends every other current version at a TRUNCATE."""
    first = truncate_sql(truncate)
    return (
        "WHEN NOT MATCHED BY SOURCE AND t._is_current THEN UPDATE SET "
        f"t._valid_to = {first}.ts, t._valid_to_lsn = {first}.lsn, "
        f"t._valid_to_epoch = {epoch}, t._is_current = false"
    )


def _timestamp(at: dt.datetime) -> str:
    return f"timestamp_micros({round(at.timestamp() * 1_000_000)})"
