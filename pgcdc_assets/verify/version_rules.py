"""Rules about the versions of each key, in an SCD2 table.

In the order of (commit LSN, ordinal) a version ends at or before the beginning of the next one, and
at most one is current. After a merge only the rows that it wrote or ended are looked at. All others
began and ended before them, except versions that are still current: those are looked up by the keys
that were touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.verify.merge_key import MergeKey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_VIEW = "pgcdc_versions"
_OLDER_VIEW = "pgcdc_older_versions"


@dataclass(frozen=True)
class VersionCounts:
    """What was counted.

    Where LSNs do not tell the order of the rows, only the first three say something.

    Attributes:
        row_count: rows looked at, without those that were looked up by key.
        several_current: keys with more than one current row.
        wrong_flag: rows whose `_is_current` is not what their end says.
        overlapping: versions that go on where the next one of their key has begun.
        reversed: versions that end before they begin, or have no beginning.
        ends: ends without a successor, among those to judge.
    """

    row_count: int
    several_current: int
    wrong_flag: int
    overlapping: int
    reversed: int
    ends: int


@dataclass(frozen=True)
class VersionRules:
    """Checks one version of an SCD2 table.

    Attributes:
        session: nobody else uses it meanwhile; its time zone is UTC.
        history: the table's rows.
        since: look at rows that began or ended at this LSN or above; None: at all.
        judged: SQL over `to_lsn`: the end is one to judge.
    """

    session: SparkSession
    history: DataFrame
    key: MergeKey
    since: Lsn | None
    judged: str

    def count(self) -> VersionCounts:
        """Look at the rows."""
        self._read().createOrReplaceTempView(_VIEW)
        bounds = "".join(f", {bound}" for bound in self.key.bounds())
        found = self.session.sql(
            "SELECT count(*) AS row_count, "
            "count_if(place = 1 AND current_rows > 1) AS several_current, "
            f"count_if({_OVERLAPS}) AS overlapping, "
            "count_if(NOT coalesce(from_lsn <= to_lsn, from_lsn IS NOT NULL)) AS reversed, "
            "count_if(is_current <> (to_lsn IS NULL) OR is_open <> (to_lsn IS NULL)) "
            f"AS wrong_flag, count_if({self._is_end()}) AS ends{bounds} FROM ({self._in_order()})"
        ).collect()[0]
        several_current, overlapping = found["several_current"], found["overlapping"]
        if self.since is not None and found["row_count"]:
            beside_current, beside_ended = self._older(self.key.within(found.asDict()))
            several_current += beside_current
            overlapping += beside_ended
        return VersionCounts(
            found["row_count"],
            several_current,
            found["wrong_flag"],
            overlapping,
            found["reversed"],
            found["ends"],
        )

    def ends(self) -> DataFrame:
        """Give the ends without a successor that are to be judged: one column `to_lsn`."""
        self._read().createOrReplaceTempView(_VIEW)
        return self.session.sql(f"SELECT to_lsn FROM ({self._in_order()}) WHERE {self._is_end()}")

    def _read(self) -> DataFrame:
        rows = self.history
        if self.since is not None:
            lsn = int(self.since)
            rows = rows.where(f"_valid_from_lsn >= {lsn} OR _valid_to_lsn >= {lsn}")
        return rows.selectExpr(
            *self.key.expressions(),
            "_valid_from_lsn AS from_lsn",
            "_ordinal AS ordinal",
            "_valid_to_lsn AS to_lsn",
            "_valid_to IS NULL AS is_open",
            "coalesce(_is_current, false) AS is_current",
        )

    def _in_order(self) -> str:
        of_key = f"PARTITION BY {self.key.listed}"
        in_order = f"OVER ({of_key} ORDER BY from_lsn, ordinal, to_lsn NULLS LAST)"
        return (
            f"SELECT *, lead(struct(from_lsn, ordinal, is_current)) {in_order} AS following, "
            f"row_number() {in_order} AS place, "
            f"sum(IF(is_current, 1, 0)) OVER ({of_key}) AS current_rows FROM {_VIEW}"
        )

    def _is_end(self) -> str:
        return (
            "to_lsn >= from_lsn AND (following IS NULL OR following.from_lsn > to_lsn) "
            f"AND {self.judged}"
        )

    def _older(self, within: str) -> tuple[int, int]:
        """Count the current rows that a merge left behind under the keys that it touched.

        Beside a current row, and beside versions that have ended: that is an overlap.
        """
        assert self.since is not None
        (
            self.history.where("_is_current")
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


# A pair of current rows is not counted here: it is another rule's.
_OVERLAPS = (
    "following IS NOT NULL AND NOT (is_current AND following.is_current) AND "
    "(to_lsn IS NULL OR to_lsn > following.from_lsn "
    "OR (from_lsn = following.from_lsn AND ordinal = following.ordinal))"
)
