"""Comparison of the current versions of a history with the rows of SCD1.

Both tables are folded from the same changes, so they have the same rows at the same watermark. If a
merge began a version, SCD1 has the row of the key from the same change, or from a later change with
equal values. So the rows since an LSN can be compared without the other rows. The logs of both
tables contain the number of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import comparable_sql, identifier, string
from pgcdc_assets.tables.columns import (
    DELETED,
    IS_CURRENT,
    RESCUED,
    SCD1_COLUMNS,
    SCD2_COLUMNS,
    SOFT_DELETE_COLUMNS,
)
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify.ignored_columns import find_owned_names
from pgcdc_assets.verify.merge_key import MergeKey
from pgcdc_assets.verify.table_version import (
    TableVersion,
    open_merged,
    read_pinned,
    read_table_version,
)
from pgcdc_assets.verify.target_at import version_through

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CURRENT_VIEW = "pgcdc_current"
_IMAGE_VIEW = "pgcdc_image"
_NO_ENTRIES = "CAST(array() AS ARRAY<STRUCT<key: STRING, value: STRING>>)"


@dataclass(frozen=True)
class Pair:
    """Both tables of one source table at the same watermark.

    Attributes:
        owned: columns that the owner has added to the history.
        soft_deletes: the setting of the table.
    """

    image: TableVersion
    history: TableVersion
    owned: frozenset[str]
    soft_deletes: bool

    @property
    def marks_deleted(self) -> bool:
        """Whether SCD1 keeps deleted rows, and marks these rows.

        A history may also have kept a dropped column of the source with the name of the mark.
        """
        if DELETED not in self.image.columns:
            return False
        return self.soft_deletes or DELETED not in self.history.columns


def find_pair(
    zone: RawZone,
    table: CdcTable,
    history: TableVersion,
    epochs: Sequence[Epoch],
    *,
    goes_back: bool,
) -> Pair | str:
    """Find comparable versions of both tables, or return the reason why no versions are comparable.

    Args:
        goes_back: if one table is ahead of the other, use an earlier version of the table that is
            ahead.
    """
    name = table.qualified_name
    path = table_path(zone.lake, zone.name, table.schema, table.table, 1)
    try:
        image = read_table_version(zone, path, name, epochs)
    except ConfigurationError:
        return "there is no SCD1 table"
    if image.key != history.key:
        return "the two tables have different keys"
    log = open_merged(zone, history.path, name, history.version)
    owned = find_owned_names(zone, table.name, log)
    pair = Pair(image, history, owned, table.soft_deletes)
    if image.watermark == history.watermark:
        return pair
    progress = f"SCD1 is merged through {_text(image)}, this table through {_text(history)}"
    if not goes_back or image.watermark is None or history.watermark is None:
        return progress
    epoch, lsn = min(image.watermark, history.watermark)
    ahead = max(image, history, key=lambda pinned: pinned.watermark or (0, Lsn(0)))
    found = version_through(zone, open_merged(zone, ahead.path, name), ahead.path, epoch, lsn)
    if found is None or found.watermark != lsn:
        return progress
    earlier = read_table_version(zone, ahead.path, name, epochs, found.version)
    if earlier.watermark != (epoch, lsn) or earlier.key != history.key:
        return progress
    return replace(pair, image=earlier) if ahead is image else replace(pair, history=earlier)


def _text(pinned: TableVersion) -> str:
    return "nothing" if pinned.watermark is None else str(pinned.watermark.lsn)


@dataclass(frozen=True)
class PairComparison:
    """Compares a pair.

    Attributes:
        session: a session for this call only, with the time zone UTC.
        is_small: read all rows of both tables, without a filter.
    """

    session: SparkSession
    pair: Pair
    is_small: bool

    def count_missing(self, since: Lsn | None) -> int:
        """Count the current versions without an equal row in SCD1.

        Args:
            since: compare the versions that began at this LSN or above; None: all versions.
        """
        history, image = self._history(), self._image()
        if since is not None:
            history = history.where(f"_valid_from_lsn >= {int(since)}")
            image = image.where(f"_lsn >= {int(since)}")
        key = MergeKey(self.pair.history.key, dict(history.dtypes))
        columns = [*key.expressions(), f"{self._content(history, image)} AS content"]
        history.selectExpr(*columns).createOrReplaceTempView(_CURRENT_VIEW)
        image.selectExpr(*columns).createOrReplaceTempView(_IMAGE_VIEW)
        (row,) = self.session.sql(
            f"SELECT count(*) AS missing FROM {_CURRENT_VIEW} c LEFT ANTI JOIN {_IMAGE_VIEW} i "
            f"ON {key.same('c', 'i')} AND c.content <=> i.content"
        ).collect()
        return int(row["missing"])

    def count_difference(self) -> int:
        """Return the difference of the row counts, usually from the logs, without a scan."""
        image, history = self.pair.image.row_count, self.pair.history.current_count
        if image is None or self.pair.marks_deleted:
            image = self._image().count()
        if history is None:
            history = self._history().count()
        return abs(image - history)

    def _history(self) -> DataFrame:
        rows = read_pinned(self.session, self.pair.history, is_small=self.is_small)
        return rows.where(IS_CURRENT)

    def _image(self) -> DataFrame:
        rows = read_pinned(self.session, self.pair.image, is_small=self.is_small)
        return rows.where(f"NOT coalesce({DELETED}, false)") if self.pair.marks_deleted else rows

    def _content(self, history: DataFrame, image: DataFrame) -> str:
        """Write the SQL of the compared columns: the source's with the same type in both tables."""
        types = dict(image.dtypes)
        system = SOFT_DELETE_COLUMNS if self.pair.marks_deleted else SCD1_COLUMNS
        ours = {name for name, _, _ in (*SCD2_COLUMNS, *system)} | self.pair.owned
        columns = {
            name: kind
            for name, kind in history.dtypes
            if name not in ours and types.get(name) == kind
        }
        parts = [comparable_sql(identifier(name), kind.upper()) for name, kind in columns.items()]
        # Spark cannot compare maps, and the order of their entries has no meaning. A map without
        # entries is NULL, and a history also keeps the entries of dropped columns.
        listed = ", ".join(map(string, columns))
        entries = f"coalesce(map_entries({RESCUED}), {_NO_ENTRIES})"
        parts.append(f"array_sort(filter({entries}, entry -> entry.key IN ({listed})))")
        return f"struct({', '.join(f'{part} AS compared_{n}' for n, part in enumerate(parts))})"
