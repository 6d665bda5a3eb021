"""Digests of an SCD1 table's rows, computed by Spark; Postgres computes those of the source.

`postgres/copy/digests.py` defines a digest. All queries are SQL over one temporary view of a
separate session, so that the queries run on every kind of session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.copy.digests import BYTES_MARK, NULL_MARK, Bucket, RowDetail
from pgcdc_assets.spark.sql import string
from pgcdc_assets.tables.columns import DELETED, LSN
from pgcdc_assets.verify.canonical_text import ComparedColumn

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_VIEW = "pgcdc_verified_"

# The mark of a deleted row in a table with soft deletes.


@dataclass(frozen=True)
class TargetVersion:
    """A version of a Delta table with the rows of an SCD1 table."""

    path: str
    version: int | None = None


class TargetDigests:
    """Queries of the digests of one table's rows.

    Args:
        session: a session for these queries only, with the time zone UTC.
        number: a number that is unique among the tables compared in the session.
        kept_end: rows with a lower LSN may be kept rows of detached partitions; None: no row is.
    """

    def __init__(
        self,
        session: SparkSession,
        frame: DataFrame,
        columns: Sequence[ComparedColumn],
        key: Sequence[int],
        number: int = 0,
        kept_end: Lsn | None = None,
    ) -> None:
        self._session = session
        self._columns = tuple(columns)
        self._key = tuple(key)
        names = {column.name for column in columns}
        is_there = ""
        if DELETED in frame.columns and DELETED not in names:
            # A row that another program has added may have no mark.
            is_there = f" WHERE NOT coalesce({DELETED}, false)"
        is_old = "false" if kept_end is None else f"{LSN} < {int(kept_end)}"
        view = f"{_VIEW}{number}"
        frame.createOrReplaceTempView(view)
        # A table may have no column.
        selected = [f"{column.text} AS text_{i}" for i, column in enumerate(columns)]
        selected.append(f"{is_old} AS is_old")
        pieces = [_piece(i) for i in range(len(columns))]
        self._rows = (
            f"SELECT *, md5(concat({', '.join(pieces[i] for i in self._key)})) AS key_digest, "
            f"md5(concat({', '.join(pieces)})) AS row_digest "
            f"FROM (SELECT {', '.join(selected)} FROM {view}{is_there})"
        )

    def buckets_sql(self, digits: int) -> str:
        """Write the query that sums up the rows of each bucket."""
        part = "sum(CAST(conv(substr(row_digest, {}, 8), 16, 10) AS BIGINT))"
        return (
            f"SELECT substr(key_digest, 1, {digits}) AS bucket, count(*) AS row_count, "
            f"{part.format(1)} AS first_sum, {part.format(9)} AS second_sum "
            f"FROM ({self._rows}) GROUP BY substr(key_digest, 1, {digits})"
        )

    def rows(self, buckets: Sequence[str]) -> Iterator[tuple[str, str, int, int]]:
        """Yield the digests of key and row in the buckets in order, with the number of such rows.

        The last value is how many of them may be kept rows of detached partitions.
        """
        wanted = ", ".join(string(bucket) for bucket in buckets)
        found: pa.Table = self._session.sql(
            "SELECT key_digest, row_digest, count(*) AS row_count, count_if(is_old) AS old_count "
            f"FROM ({self._rows}) "
            f"WHERE substr(key_digest, 1, {len(buckets[0])}) IN ({wanted}) "
            "GROUP BY key_digest, row_digest ORDER BY key_digest, row_digest"
        ).toArrow()
        for batch in found.to_batches(max_chunksize=10_000):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def details(self, key_digests: Sequence[str]) -> Iterator[RowDetail]:
        """Yield the keys and the column digests of the different rows with these key digests."""
        if not key_digests:
            return
        key = ", ".join(f"text_{i}" for i in self._key)
        columns = ", ".join(f"md5({_piece(i)})" for i in range(len(self._columns)))
        wanted = ", ".join(string(digest) for digest in key_digests)
        rows = self._session.sql(
            f"SELECT DISTINCT key_digest, row_digest, array({key}), array({columns}) "
            f"FROM ({self._rows}) WHERE key_digest IN ({wanted})"
        ).collect()
        for row in rows:
            yield RowDetail(row[0], row[1], tuple(row[2]), tuple(row[3]))


def sum_buckets(
    session: SparkSession, tables: Sequence[tuple[TargetDigests, int]]
) -> list[dict[str, Bucket]]:
    """Sum up the buckets of several tables in one query.

    Args:
        tables: tables, each with the number of hex digits of a bucket's name.
    """
    parts = [
        f"SELECT {number} AS number, * FROM ({digests.buckets_sql(digits)})"
        for number, (digests, digits) in enumerate(tables)
    ]
    found: list[dict[str, Bucket]] = [{} for _ in tables]
    if not parts:
        return found
    for number, bucket, *sums in session.sql(" UNION ALL ".join(parts)).collect():
        found[number][bucket] = Bucket(*sums)
    return found


def read_version(session: SparkSession, target: TargetVersion) -> DataFrame:
    """Read a version of a table; the default is the newest version."""
    reader = session.read.format("delta")
    if target.version is not None:
        reader = reader.option("versionAsOf", str(target.version))
    return reader.load(target.path)


def _piece(index: int) -> str:
    text = f"text_{index}"
    # The form of bytes that are not UTF-8 (`protocol/utf8.py`): U+0000, `\x` and hex.
    hex_digits = f"substr({text}, 4)"
    return (
        f"CASE WHEN startswith({text}, '\\u0000') "
        f"THEN concat(CAST(length({hex_digits}) AS STRING), '{BYTES_MARK}', {hex_digits}) "
        f"ELSE coalesce(concat(CAST(octet_length({text}) AS STRING), ':', {text}), '{NULL_MARK}') "
        "END"
    )
