"""Rules about the versions of each key in an SCD2 table.

In the order of (epoch, commit LSN, ordinal), a version ends at or before the beginning of the next
version, and at most one version is current. After a merge, only the rows that the merge wrote or
ended are checked. Older current versions with the same keys are found by the keys. All other
versions began and ended before the merge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.snapshots import parse_snapshot_key
from pgcdc_assets.tables.columns import IS_CURRENT
from pgcdc_assets.verify.merge_key import MergeKey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_VIEW = "pgcdc_versions"
_LEAVING_VIEW = "pgcdc_leaving"
_OLDER_VIEW = "pgcdc_older_versions"

# A pair of current rows counts as a violation of the rule about current rows, not as an overlap.
_OVERLAPS = (
    "following IS NOT NULL AND NOT (is_current AND following.is_current) AND "
    "(to_lsn IS NULL "
    "OR struct(to_epoch, to_lsn) > struct(following.from_epoch, following.from_lsn) "
    "OR struct(from_epoch, from_lsn, ordinal) "
    "= struct(following.from_epoch, following.from_lsn, following.ordinal))"
)

# SQL of the counts, by name.
_COUNTED = {
    "row_count": "true",
    "several_current": "place = 1 AND current_rows > 1",
    "wrong_flag": "is_current <> (to_lsn IS NULL) OR is_open <> (to_lsn IS NULL)",
    "overlapping": _OVERLAPS,
    "reversed": "from_lsn IS NULL OR (to_lsn IS NOT NULL "
    "AND struct(from_epoch, from_lsn) > struct(to_epoch, to_lsn))",
}


def ended_after_sql(key_since: str) -> str:
    """Write the SQL of whether a version did not end before the table got its key.

    Earlier versions are of rows that another key identified.

    Args:
        key_since: the key of a snapshot.
    """
    epoch, lsn = parse_snapshot_key(key_since)
    return (
        "_valid_to_lsn IS NULL OR struct(coalesce(_valid_to_epoch, 0), _valid_to_lsn) > "
        f"struct({epoch}, {int(lsn)}L)"
    )


@dataclass(frozen=True)
class VersionCounts:
    """Counts of violations in a history.

    If neither LSNs nor stored epochs determine the order of the rows, only the first three counts
    are known.

    Attributes:
        row_count: rows that were checked, without the rows that were found by their keys.
        several_current: keys with more than one current row.
        wrong_flag: rows whose `_is_current` contradicts their end.
        overlapping: versions that end after the beginning of the next version of their key.
        reversed: versions that end before they begin, or have no beginning.
        unexplained: ends without a successor and without a change that explains them.
    """

    row_count: int
    several_current: int
    wrong_flag: int
    overlapping: int
    reversed: int
    unexplained: int


@dataclass(frozen=True)
class HistoryRules:
    """Checks one version of an SCD2 table.

    Attributes:
        session: a session for this call only, with the time zone UTC.
        history: the table's rows.
        since: check the rows that began or ended at this LSN or above; None: all rows.
        judged: SQL condition over `to_lsn` of the ends to check.
        leaving: the changes that explain ends, see `unexplained_ends.py`.
    """

    session: SparkSession
    history: DataFrame
    key: MergeKey
    since: Lsn | None
    judged: str
    leaving: DataFrame

    def count(self) -> VersionCounts:
        """Count the violations."""
        self._read().createOrReplaceTempView(_VIEW)
        self.leaving.createOrReplaceTempView(_LEAVING_VIEW)
        row = self.session.sql(self._counting()).collect()[0]
        found = {name: value or 0 for name, value in row.asDict().items()}
        if self.since is not None and found["row_count"]:
            beside_current, beside_ended = self._older(self.key.within(found))
            found["several_current"] += beside_current
            found["overlapping"] += beside_ended
        return VersionCounts(**{name: found[name] for name in (*_COUNTED, "unexplained")})

    def _counting(self) -> str:
        """Write the query. It groups ends, and the changes that explain ends, by LSN.

        The other rows form one group without an LSN.
        """
        flags = ", ".join(
            f"IF({condition}, 1, 0) AS {name}" for name, condition in _COUNTED.items()
        )
        bounded = self.key.bounded
        rows = ", ".join(
            [
                f"SELECT IF({self._is_end()}, to_lsn, NULL) AS end_lsn, 0 AS leaving",
                f"false AS is_truncate, {flags}",
                *bounded,
            ]
        )
        nothing = ", ".join(["0"] * len(_COUNTED) + ["NULL"] * len(bounded))
        leaving = f"SELECT commit_lsn, 1, is_truncate, {nothing} FROM {_LEAVING_VIEW}"
        sums = ", ".join(f"sum({name}) AS {name}" for name in _COUNTED)
        groups = ", ".join(
            [
                f"SELECT end_lsn, bool_or(is_truncate) AS is_emptied, {sums}",
                "sum(leaving) AS leaving",
                *self.key.bounds("row_count = 1"),
            ]
        )
        unexplained = "sum(IF(end_lsn IS NULL OR is_emptied, 0, greatest(0, row_count - leaving)))"
        totals = ", ".join([sums, f"{unexplained} AS unexplained", *self.key.bounds_of_groups()])
        both = f"{rows} FROM ({self._in_order()}) UNION ALL {leaving}"
        return f"SELECT {totals} FROM ({groups} FROM ({both}) GROUP BY end_lsn)"

    def _read(self) -> DataFrame:
        rows = self.history
        if self.since is not None:
            lsn = int(self.since)
            rows = rows.where(f"_valid_from_lsn >= {lsn} OR _valid_to_lsn >= {lsn}")
        return rows.selectExpr(
            *self.key.expressions(),
            f"{self._epoch('_valid_from_epoch')} AS from_epoch",
            "_valid_from_lsn AS from_lsn",
            "_ordinal AS ordinal",
            f"{self._epoch('_valid_to_epoch', '_valid_from_epoch')} AS to_epoch",
            "_valid_to_lsn AS to_lsn",
            "_valid_to IS NULL AS is_open",
            "coalesce(_is_current, false) AS is_current",
        )

    def _epoch(self, *columns: str) -> str:
        """Write the SQL of an epoch.

        A table of an earlier release has no epochs before its next merge. A missing epoch sorts
        before all other epochs.
        """
        if not set(columns) <= set(self.history.columns):
            return "0"
        return f"coalesce({', '.join(columns)}, 0)"

    def _in_order(self) -> str:
        of_key = f"PARTITION BY {self.key.listed}"
        in_order = f"OVER ({of_key} ORDER BY from_epoch, from_lsn, ordinal, to_lsn NULLS LAST)"
        return (
            f"SELECT *, lead(struct(from_epoch, from_lsn, ordinal, is_current)) {in_order} "
            "AS following, "
            f"row_number() {in_order} AS place, "
            f"sum(IF(is_current, 1, 0)) OVER ({of_key}) AS current_rows FROM {_VIEW}"
        )

    def _is_end(self) -> str:
        return (
            "struct(to_epoch, to_lsn) >= struct(from_epoch, from_lsn) AND (following IS NULL "
            "OR struct(following.from_epoch, following.from_lsn) > struct(to_epoch, to_lsn)) "
            f"AND {self.judged}"
        )

    def _older(self, within: str) -> tuple[int, int]:
        """Count older current rows with the keys that a merge changed.

        An older current row is a violation if the merge wrote a current row, or a version that has
        ended, with the same key.
        """
        assert self.since is not None
        (
            self.history.where(IS_CURRENT)
            .where(f"_valid_from_lsn < {int(self.since)}")
            .where(within)
            .selectExpr(*self.key.expressions())
            .createOrReplaceTempView(_OLDER_VIEW)
        )
        listed = self.key.listed
        touched = (
            f"SELECT {listed}, bool_or(is_current) AS has_current FROM {_VIEW} GROUP BY {listed}"
        )
        found = self.session.sql(
            "SELECT count_if(t.has_current) AS beside_current, "
            "count_if(NOT t.has_current) AS beside_ended "
            f"FROM {_OLDER_VIEW} o JOIN ({touched}) t ON {self.key.same('o', 't')}"
        ).collect()[0]
        return found["beside_current"], found["beside_ended"]
