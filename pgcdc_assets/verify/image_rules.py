"""The rule about the rows of an SCD1 table: a key has one row.

After a merge, only the rows that the merge wrote and older rows with the same keys are checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.verify.merge_key import MergeKey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_VIEW = "pgcdc_rows"
_OLDER_VIEW = "pgcdc_older_rows"


def count_duplicates(
    session: SparkSession, image: DataFrame, key: MergeKey, since: Lsn | None
) -> tuple[int, int]:
    """Count the checked rows, and the keys of checked rows that occur more than once in the table.

    Args:
        session: a session for this call only, with the time zone UTC.
        image: the table's rows.
        since: check the rows at this LSN or above; None: all rows.
    """
    rows = image if since is None else image.where(f"_lsn >= {int(since)}")
    rows.selectExpr(*key.expressions()).createOrReplaceTempView(_VIEW)
    bounds = "".join(f", {bound}" for bound in key.bounds())
    found = session.sql(
        f"SELECT coalesce(sum(n), 0) AS row_count, count_if(n > 1) AS duplicates{bounds} "
        f"FROM (SELECT {key.listed}, count(*) AS n FROM {_VIEW} GROUP BY {key.listed})"
    ).collect()[0]
    row_count, duplicates = found["row_count"], found["duplicates"]
    if since is not None and row_count:
        older = image.where(f"_lsn < {int(since)}").where(key.within(found.asDict()))
        older.selectExpr(*key.expressions()).createOrReplaceTempView(_OLDER_VIEW)
        duplicates += session.sql(
            f"SELECT count(*) AS n FROM {_OLDER_VIEW} o LEFT SEMI JOIN {_VIEW} t "
            f"ON {key.same('o', 't')}"
        ).collect()[0]["n"]
    return row_count, duplicates
