"""SCD type 1: one row per key, as it is now.

A copy replaces the contents. Changes are folded to one row per key and applied by one MERGE; where
the table is empty, or a TRUNCATE emptied it in the range, there is nothing to match and the rows
are written as they are. Each of these is one Delta commit that carries the watermark as its
application transaction, so a repeat is recognised by Delta itself and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.events import Fold, build_bag, build_events
from pgcdc_assets.merge.rows import target_columns, typed
from pgcdc_assets.merge.shape import TableShape, key_text
from pgcdc_assets.merge.sql import delta_table, identifier, string
from pgcdc_assets.merge.toast import follow_key_changes, with_known_values
from pgcdc_assets.merge.winners import left_in_bag, newest_per_key

KEY = "pgcdc.key"
RELATION_ID = "pgcdc.relation_id"
RELATION_VERSION = "pgcdc.relation_version"

UNKNOWN_VALUE = "pgcdc: an unchanged TOAST value is nowhere to be found"

_NEEDS_MAPPING = frozenset(" ,;{}()\n\t=")


def write_copy(path: str, copied: DataFrame, shape: TableShape, app_id: str, lsn: Lsn) -> None:
    """Replace the table, or create it, with the rows of a copy.

    Args:
        copied: one column `new`, in the layout of `shape`.
        lsn: the copy's snapshot LSN, the watermark from now on.
    """
    keep = [
        f"CAST({int(lsn)} AS BIGINT) AS lsn",
        "CAST(-1 AS BIGINT) AS ordinal",
        "CAST(NULL AS TIMESTAMP) AS commit_ts",
    ]
    rows = typed(copied, shape, lambda i: f"new[{i}]", keep)
    create_or_replace(path, rows, shape, app_id, lsn)


def create_or_replace(path: str, rows: DataFrame, shape: TableShape, app_id: str, lsn: Lsn) -> None:
    """Write the numbered columns as the table's whole contents, in a table of this shape."""
    writer = (
        rows.select(*target_columns(shape))
        .writeTo(delta_table(path))
        .using("delta")
        .option("txnAppId", app_id)
        .option("txnVersion", str(int(lsn)))
    )
    for name, value in table_properties(shape).items():
        writer = writer.tableProperty(name, value)
    writer.createOrReplace()


def table_properties(shape: TableShape) -> dict[str, str]:
    """Give the properties of a table of this shape."""
    properties = {
        # A MERGE then marks rows as deleted instead of writing their files anew.
        "delta.enableDeletionVectors": "true",
        KEY: key_text(shape.key_names),
        RELATION_ID: str(shape.relation.relation_id),
        RELATION_VERSION: str(shape.version),
    }
    if any(_NEEDS_MAPPING & set(field.name) for field in shape.fields):
        properties["delta.columnMapping.mode"] = "name"
    return properties


def fold_changes(changes: DataFrame, fold: Fold, stored: DataFrame | None) -> DataFrame:
    """Fold raw changes to one row per key: what the key holds after them.

    Columns: `k0` ..., `c0` ..., `rescued`, `lsn`, `ordinal`, `commit_ts`, `is_content` and, where a
    change left something out, `unknown`: fields to be taken from the table's row.

    Args:
        stored: the table's rows; None when there were none at the beginning of the range.
    """
    keep = [*fold.key_columns, "commit_lsn AS lsn", "ordinal", "commit_ts", "is_content"]
    if not fold.unknown:
        if fold.facts.is_full:
            winners = left_in_bag(build_bag(changes, fold), fold)
        else:
            winners = newest_per_key(build_events(changes, fold), fold)
        return typed(winners, fold.shape, lambda i: f"tuple[{i}]", keep)
    events = with_known_values(build_events(changes, fold), fold)
    winners = follow_key_changes(newest_per_key(events, fold), events, fold)
    origin = fold.named("o", "u")

    def text(index: int) -> str:
        return f"v{index}.text" if index in fold.unknown else f"tuple[{index}]"

    rows = typed(winners, fold.shape, text, [*keep, "unknown", "is_elsewhere", *origin])
    if stored is None or not fold.facts.has_old_tuples:
        return rows
    return _fetch_from_old_keys(rows, fold, stored)


def _fetch_from_old_keys(rows: DataFrame, fold: Fold, stored: DataFrame) -> DataFrame:
    """Take what is still unknown from the row that the table has under the key it came from."""
    shape = fold.shape
    met = _same_key(fold, "o", "u")
    joined = rows.alias("s").join(
        stored.alias("t"), on=F.expr(f"is_elsewhere AND {met}"), how="left"
    )
    kept = [
        name
        for name in rows.columns
        if name not in {"unknown", "rescued", *(f"c{i}" for i in fold.unknown)}
    ]
    columns = [f"s.{name} AS {name}" for name in kept]
    for i in fold.unknown:
        mine, theirs = f"s.c{i}", f"t.{identifier(shape.fields[i].name)}"
        taken = f"s.is_elsewhere AND array_contains(s.unknown, {i})"
        found = f"IF(t.`_lsn` IS NULL, {_unknown_value(shape.fields[i].type.ddl)}, {theirs})"
        columns.append(f"IF({taken}, {found}, {mine}) AS c{i}")
    columns.append(f"IF(s.is_elsewhere, {_joined_rescued(fold)}, s.rescued) AS rescued")
    columns.append("IF(s.is_elsewhere, NULL, s.unknown) AS unknown")
    return joined.selectExpr(*columns)


def rows_alone(rows: DataFrame, fold: Fold) -> DataFrame:
    """Make of folded rows the whole contents of a table: there is no row to take anything from."""
    rows = rows.where("is_content")
    if fold.unknown:
        width = range(len(fold.shape.fields))
        others = [n for n in rows.columns if n not in {f"c{i}" for i in fold.unknown}]
        known = [f"{_value_or_error(fold, i, '')} AS c{i}" for i in fold.unknown]
        rows = rows.selectExpr(*others, *known).select(
            *(f"c{i}" for i in width), "rescued", "lsn", "ordinal", "commit_ts"
        )
    return rows


def replace_contents(
    path: str, rows: DataFrame, shape: TableShape, app_id: str, watermark: Lsn
) -> None:
    """Replace the table's rows by the numbered columns, and keep its shape."""
    overwrite(rows.select(*target_columns(shape)), path, app_id, watermark)


def overwrite(rows: DataFrame, path: str, app_id: str, watermark: Lsn) -> None:
    """Replace the table's rows, and keep its shape."""
    (
        rows.write.format("delta")
        .mode("overwrite")
        .option("txnAppId", app_id)
        .option("txnVersion", str(int(watermark)))
        .save(path)
    )


def merge_rows(
    spark: SparkSession, path: str, rows: DataFrame, fold: Fold, app_id: str, watermark: Lsn
) -> tuple[int, int, int]:
    """Apply folded rows by one MERGE; give the counts of inserted, updated and deleted rows."""
    rows.createOrReplaceTempView("pgcdc_source")
    with _transaction(spark, app_id, watermark):
        result = spark.sql(merge_statement(path, fold, rows.columns)).collect()
    if not result:
        return 0, 0, 0
    counts = result[0].asDict()
    return (
        int(counts["num_inserted_rows"]),
        int(counts["num_updated_rows"]),
        int(counts["num_deleted_rows"]),
    )


def merge_statement(path: str, fold: Fold, source_columns: Sequence[str]) -> str:
    """Write the MERGE."""
    fields = fold.shape.fields
    updates = []
    inserts = []
    for i, field in enumerate(fields):
        name = identifier(field.name)
        mine = f"s.c{i}"
        if i in fold.unknown:
            mine = f"IF(coalesce(array_contains(s.unknown, {i}), false), t.{name}, s.c{i})"
        updates.append(f"t.{name} = {mine}")
        inserts.append((name, _value_or_error(fold, i, "s.")))
    rescued = "s.rescued"
    if fold.unknown:
        rescued = f"IF(s.unknown IS NULL, s.rescued, {_joined_rescued(fold)})"
    system = {"_lsn": "s.lsn", "_ordinal": "s.ordinal", "_commit_ts": "s.commit_ts"}
    updates += [f"t.{name} = {value}" for name, value in system.items()]
    updates.append(f"t._rescued = {rescued}")
    inserts += [*system.items(), ("_rescued", "s.rescued")]
    newer = "(s.lsn > t._lsn OR (s.lsn = t._lsn AND s.ordinal > t._ordinal))"
    return (
        f"MERGE INTO {delta_table(path)} t USING pgcdc_source s ON {_same_key(fold, 'k', 'r')}\n"
        f"WHEN MATCHED AND {newer} AND NOT s.is_content THEN DELETE\n"
        f"WHEN MATCHED AND {newer} THEN UPDATE SET {', '.join(updates)}\n"
        f"WHEN NOT MATCHED AND s.is_content THEN INSERT "
        f"({', '.join(name for name, _ in inserts)}) "
        f"VALUES ({', '.join(value for _, value in inserts)})"
    )


@contextmanager
def _transaction(spark: SparkSession, app_id: str, version: Lsn) -> Iterator[None]:
    """Have what is committed in this session carry the application transaction.

    The session is the caller's own: see `session.own_session`.
    """
    spark.conf.set("spark.databricks.delta.write.txnAppId", app_id)
    spark.conf.set("spark.databricks.delta.write.txnVersion", str(int(version)))
    try:
        yield
    finally:
        spark.conf.unset("spark.databricks.delta.write.txnAppId")
        spark.conf.unset("spark.databricks.delta.write.txnVersion")


def _same_key(fold: Fold, typed_prefix: str, rescued_prefix: str) -> str:
    """Write the SQL that a source row's key is that of the table's row."""
    parts = []
    for number, index in enumerate(fold.shape.key):
        field = fold.shape.fields[index]
        name = identifier(field.name)
        if not field.type.may_rescue:
            parts.append(f"t.{name} = s.{typed_prefix}{number}")
            continue
        rescued = f"try_element_at(t._rescued, {string(field.name)})"
        parts.append(f"t.{name} <=> s.{typed_prefix}{number}")
        parts.append(f"{rescued} <=> s.{rescued_prefix}{number}")
    return " AND ".join(parts)


def _unknown_value(ddl: str) -> str:
    return f"CAST(raise_error({string(UNKNOWN_VALUE)}) AS {ddl})"


def _value_or_error(fold: Fold, index: int, prefix: str) -> str:
    """Write the SQL of a field's value where there is no row to take an unknown one from."""
    if index not in fold.unknown:
        return f"{prefix}c{index}"
    unknown = f"coalesce(array_contains({prefix}unknown, {index}), false)"
    error = _unknown_value(fold.shape.fields[index].type.ddl)
    return f"IF({unknown}, {error}, {prefix}c{index})"


def _joined_rescued(fold: Fold) -> str:
    """Write the SQL of `_rescued` for a row that takes its unknown fields from the table's row."""
    names = [
        f"IF(array_contains(s.unknown, {i}), {string(fold.shape.fields[i].name)}, NULL)"
        for i in fold.unknown
    ]
    empty = "CAST(map() AS MAP<STRING, STRING>)"
    taken = (
        f"map_filter(coalesce(t._rescued, {empty}), (name, _text) -> "
        f"array_contains(array_compact(array({', '.join(names)})), name))"
    )
    both = f"map_concat(coalesce(s.rescued, {empty}), {taken})"
    return f"IF(size({both}) = 0, NULL, {both})"
