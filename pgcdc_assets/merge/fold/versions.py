"""Versions of keys: the row of each key between two positions.

The input are the typed events of a range (`events.py`), and the table's current rows with the same
keys before the range. In the order of (commit LSN, ordinal), a content opens a version, unless it
equals the version before it. The next event of the key ends the version, or an earlier TRUNCATE.

Under REPLICA IDENTITY FULL, and if the key is a part of the replica identity, a key may have two
rows within one transaction (a deferrable constraint; see `latest.py`). For such a key the
transaction counts as one step to the row of the key at its commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pgcdc_assets.merge.fold.events import Fold, build_bag, build_events
from pgcdc_assets.merge.fold.key_range import KeyRange, find_key_range
from pgcdc_assets.merge.fold.latest import keep_bag_remainder, keep_rows_at_commit
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.fold.toast import (
    fetch_unknown,
    follow_key_changes,
    value_or_error_sql,
    with_known_values,
)
from pgcdc_assets.merge.fold.truncates import count_before_sql, next_truncate_sql
from pgcdc_assets.merge.fold.typed_columns import type_columns
from pgcdc_assets.spark.computed_rows import compute_rows
from pgcdc_assets.spark.sql import comparable_sql, identifier, string

_COPIED = ("lsn", "ordinal", "commit_ts", "op", "is_content")


def key_events(changes: DataFrame, fold: Fold) -> DataFrame:
    """Turn raw changes into events without values."""
    return build_bag(changes, fold) if fold.stats.is_full else build_events(changes, fold)


def typed_events(
    events: DataFrame, fold: Fold, current: DataFrame | None, stored: DataFrame | None
) -> DataFrame:
    """Return events with typed values: `value_0` ..., `rescued`, `lsn`, `ordinal`, `op` ...

    Args:
        current: all current rows of the table before the range; None without rows.
        stored: the current rows with keys of the events.
    """
    keep = [
        *(*fold.key_columns, "commit_lsn AS lsn", "ordinal", "commit_ts", "op", "is_content"),
        *fold.origin_columns,
    ]
    if not fold.unknown:
        if fold.stats.is_full or fold.further_identity:
            events = _untangle(events, fold, stored)
        return type_columns(events, fold.schema, lambda i: f"tuple[{i}]", keep)
    known = with_known_values(events, fold)
    events = follow_key_changes(known, known, fold)
    if fold.further_identity:
        events = _untangle(events, fold, stored)
    origin = fold.named("origin", "origin_rescued")
    is_own = "unknown IS NOT NULL AND NOT is_elsewhere"
    events = events.selectExpr(
        *(name for name in events.columns if name not in {*origin, "is_elsewhere"}),
        *(
            f"IF({is_own}, {key}, {other}) AS {other}"
            for key, other in zip(fold.key_columns, origin, strict=True)
        ),
        "unknown IS NOT NULL AS is_elsewhere",
    )

    rows = type_columns(
        events, fold.schema, fold.known_text, [*keep, "unknown", "is_elsewhere", *origin]
    )
    if current is None:
        others = [name for name in rows.columns if name not in {f"value_{i}" for i in fold.unknown}]
        values = [f"{value_or_error_sql(fold, i, '')} AS value_{i}" for i in fold.unknown]
        return rows.selectExpr(*others, *values)
    return fetch_unknown(rows, fold, current, fold.schema.stored_position[0])


def build_versions(
    events: DataFrame,
    stored: DataFrame | None,
    fold: Fold,
    tracked: Sequence[int] | None,
    epoch: int,
) -> DataFrame:
    """Find the versions that the events open, and the changes to the versions of the table.

    Columns: the key, `value_0` ..., `rescued`, `is_stored` (it is in the table already),
    `valid_from`, `valid_to`, `is_current`, `valid_from_lsn`, `valid_to_lsn`, `valid_from_epoch`,
    `valid_to_epoch`, `ordinal`, `op`, and `is_touched`: false for a version that is in the table
    and stays as it is.

    Args:
        events: from `typed_events`.
        stored: the table's current rows under the keys of the events, and others if need be; None
            when there are none.
        tracked: indexes of the fields whose change opens a version; None: all.
        epoch: of the events.
    """
    keys = ", ".join(fold.key_columns)
    values = [*(f"value_{i}" for i in range(len(fold.schema.fields))), "rescued"]
    names = [*fold.key_columns, *values, *_COPIED, *fold.origin_columns, "epoch"]
    rows = events.selectExpr("*", f"{epoch} AS epoch").selectExpr(*names, "false AS is_stored")
    if stored is not None:
        nothing = [f"CAST(NULL AS INT) AS {name}" for name in fold.origin_columns]
        there = stored_rows(stored, fold, "_valid_from_epoch AS epoch", *nothing)
        rows = rows.unionAll(there.selectExpr(*names, "true AS is_stored"))
    order = "is_stored DESC, lsn, ordinal, is_content"
    window = f"OVER (PARTITION BY {keys} ORDER BY {order})"
    truncates = fold.stats.truncates
    if fold.stats.may_leave_and_come:
        # A row that one change removes and adds again was never absent.
        rows = rows.selectExpr(
            "*", f"lead(struct(is_content, lsn, ordinal)) {window} AS following"
        ).where(
            "is_content OR NOT coalesce(following.is_content AND following.lsn = lsn "
            "AND following.ordinal = ordinal, false)"
        )
    parts = comparable_parts_sql(fold.schema, tracked)
    # A plain column keeps its name: a second name would carry the column through the shuffle twice.
    named = [part if part in values else f"compared_{n}" for n, part in enumerate(parts)]
    is_same = "".join(f" AND before_{n} <=> {name}" for n, name in enumerate(named))
    # A row that a change no longer has says nothing about a column that was dropped before it.
    dropped = [i for i in fold.kept if tracked is None or i in tracked]
    is_same += "".join(
        f" AND (NOT {fold.has_field(i)} OR dropped_{i} IS NULL OR dropped_{i}.content <=> "
        f"{_dropped_content_sql(fold, i)})"
        for i in dropped
    )
    steps = (
        rows.selectExpr(
            *names,
            "is_stored",
            f"{count_before_sql(truncates)} AS segment",
            *(f"{part} AS compared_{n}" for n, part in enumerate(parts) if part not in values),
        )
        .selectExpr(
            "*",
            f"lag(is_content) {window} AS follows_content",
            f"lag(segment) {window} AS last_segment",
            *(f"lag({name}) {window} AS before_{n}" for n, name in enumerate(named)),
            *(
                f"lag(IF({fold.has_field(i)}, struct({_dropped_content_sql(fold, i)} AS content), "
                f"NULL)) {window} AS dropped_{i}"
                for i in dropped
            ),
        )
        .selectExpr(
            *names,
            "is_stored",
            "segment",
            "NOT (is_content AND coalesce(follows_content AND last_segment = segment, false)"
            f"{is_same}) AS starts",
        )
    )
    changed = "false"
    if tracked is not None:
        steps = _with_last_values(steps, fold, values, keys, order)
        changed = "has_changed"
    started = steps.where("starts").selectExpr(
        "*", f"lead(struct(lsn, ordinal, commit_ts AS ts)) {window} AS next_at"
    )
    ended = "next_at"
    if truncates:
        ended = f"least(next_at, {next_truncate_sql(truncates, 'segment')})"
    return (
        started.selectExpr("*", f"{ended} AS ended")
        .where("is_content")
        .selectExpr(
            *fold.key_columns,
            *values,
            "is_stored",
            "commit_ts AS valid_from",
            "ended.ts AS valid_to",
            "ended IS NULL AS is_current",
            "lsn AS valid_from_lsn",
            "ended.lsn AS valid_to_lsn",
            "epoch AS valid_from_epoch",
            f"IF(ended IS NULL, NULL, {epoch}) AS valid_to_epoch",
            "ordinal",
            "op",
            f"NOT is_stored OR ended IS NOT NULL OR {changed} AS is_touched",
        )
    )


def stored_rows(stored: DataFrame, fold: Fold, *further: str) -> DataFrame:
    """Return rows of the table with the columns of events, and additional columns."""
    lsn, commit_ts, op = fold.schema.stored_position
    return stored.selectExpr(
        *fold.stored_key(),
        *(f"{identifier(field.name)} AS value_{i}" for i, field in enumerate(fold.schema.fields)),
        "_rescued AS rescued",
        f"{lsn} AS lsn",
        "_ordinal AS ordinal",
        f"{commit_ts} AS commit_ts",
        f"{op} AS op",
        "true AS is_content",
        *further,
    )


def _with_last_values(
    steps: DataFrame, fold: Fold, values: list[str], keys: str, order: str
) -> DataFrame:
    """Return each version with its last values: untracked fields may have changed.

    A dropped field has its last value before the drop.
    """
    numbered = steps.selectExpr(
        "*",
        f"sum(IF(starts, 1, 0)) OVER (PARTITION BY {keys} ORDER BY {order} "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS version",
    )
    whole = (
        f"OVER (PARTITION BY {keys}, version ORDER BY {order} "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)"
    )
    others = [name for name in steps.columns if name not in values]
    retained, fields = fold.schema.retained, fold.schema.fields
    texts = {i: f"try_element_at(rescued, {string(fields[i].name)})" for i in retained}
    newest = numbered.selectExpr(
        *others,
        f"last(struct({', '.join(values)})) {whole} AS newest",
        *(
            f"last(IF({fold.has_field(i)}, struct(value_{i} AS value, {texts[i]} AS text), NULL), "
            f"true) {whole} AS dropped_{i}"
            for i in retained
        ),
        f"count(*) {whole} > 1 AS has_changed",
    )
    if not retained:
        return newest.selectExpr(*others, "has_changed", "newest.*")
    empty = "CAST(map() AS MAP<STRING, STRING>)"
    names = ", ".join(string(fields[i].name) for i in retained)
    entries = ", ".join(f"{string(fields[i].name)}, dropped_{i}.text" for i in retained)
    rescued = (
        f"map_concat(map_filter(coalesce(newest.rescued, {empty}), (k, v) -> k NOT IN ({names})), "
        f"map_filter(map({entries}), (k, v) -> v IS NOT NULL))"
    )
    live = [f"newest.{name}" for i, name in enumerate(values[:-1]) if i not in retained]
    last = [f"dropped_{i}.value AS value_{i}" for i in retained]
    return newest.selectExpr(
        *others,
        "has_changed",
        *live,
        *last,
        f"IF(size({rescued}) = 0, NULL, {rescued}) AS rescued",
    )


def _untangle(events: DataFrame, fold: Fold, stored: DataFrame | None) -> DataFrame:
    """Fold a transaction in which a key had two rows, or fewer than none, to one step."""
    keys = ", ".join(fold.key_columns)
    names = [*fold.key_columns, "commit_lsn", "ordinal", "commit_ts", "op", "is_content"]
    rows = events.selectExpr("*", "false AS is_stored")
    if stored is not None:
        renamed = (name if name != "commit_lsn" else "lsn AS commit_lsn" for name in names)
        there = stored_rows(stored, fold).selectExpr(*renamed, "true AS is_stored")
        rows = rows.unionByName(there, allowMissingColumns=True)
    # An update that keeps the identity of its row is one event. Under FULL it is two.
    added = "CAST(is_stored OR is_arrival AS INT)" if fold.further_identity else "1"
    held = (
        f"sum(IF(is_content, {added}, -1)) OVER (PARTITION BY {keys}, segment "
        "ORDER BY is_stored DESC, commit_lsn, ordinal, is_content "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    )
    marked = (
        rows.selectExpr("*", f"{count_before_sql(fold.stats.truncates, 'commit_lsn')} AS segment")
        .selectExpr("*", f"{held} NOT IN (0, 1) AS is_odd")
        .where("NOT is_stored")
        .selectExpr(
            *events.columns,
            "segment",
            f"bool_or(is_odd) OVER (PARTITION BY {keys}, segment, commit_lsn) AS is_tangled",
        )
    )
    clean, tangled = marked.where("NOT is_tangled"), marked.where("is_tangled")
    if fold.further_identity:
        steps = keep_rows_at_commit(tangled, fold, "segment")
    else:
        tangled = tangled.selectExpr("*", "commit_lsn AS transaction")
        steps = keep_bag_remainder(tangled, fold, "segment", "transaction")
    return clean.select(*events.columns).unionByName(steps.select(*events.columns))


@dataclass(frozen=True)
class AffectedRows:
    """The rows of a table that changes affect.

    Attributes:
        fold: of the changes.
        events: of the changed keys, without values.
        rows: the table's rows that may have these keys; None for an empty table.
        key_range: a part of the table that contains these rows; None: the whole table.
    """

    fold: Fold
    events: DataFrame
    rows: DataFrame | None
    key_range: KeyRange | None = None

    @property
    def stored(self) -> DataFrame | None:
        """The table's rows that have these keys; None for an empty table."""
        if self.rows is None:
            return None
        return with_affected_keys(self.rows, self.events, self.fold)

    def computed(self) -> AffectedRows:
        """Compute the events now, because several queries read them."""
        return replace(self, events=compute_rows(self.events))


def find_affected_rows(
    changes: DataFrame, rows: DataFrame | None, fold: Fold, *, is_large: bool
) -> AffectedRows:
    """Find the rows of a table that raw changes affect.

    Args:
        rows: the table's rows that changes can end or change; None for an empty table.
        is_large: look for the affected range of keys.
    """
    touched = AffectedRows(fold, key_events(changes, fold), rows)
    if rows is None or not is_large:
        return touched
    key_range = find_key_range(touched.events, fold)
    if key_range is None:
        return touched
    return replace(touched, rows=rows.where(key_range.condition_sql()), key_range=key_range)


def with_affected_keys(rows: DataFrame, events: DataFrame, fold: Fold) -> DataFrame:
    """Keep the rows of the table that have a key of the events."""
    touched = events.select(*fold.key_columns).distinct()
    return rows.alias("t").join(
        touched.alias("s"), on=F.expr(fold.same_key("key", "key_rescued")), how="left_semi"
    )


def contents_sql(schema: TableSchema) -> str:
    """Write the SQL of a row's contents, such that equal values mean equal rows."""
    parts = comparable_parts_sql(schema)
    return f"struct({', '.join(f'{part} AS compared_{n}' for n, part in enumerate(parts))})"


def comparable_parts_sql(schema: TableSchema, tracked: Sequence[int] | None = None) -> list[str]:
    """Write the SQL of the values by which two contents are compared, without dropped fields.

    Args:
        tracked: indexes of the compared fields; None: all.
    """
    compared = range(len(schema.fields)) if tracked is None else tracked
    wanted = [i for i in compared if not schema.fields[i].is_retained]
    parts = [comparable_sql(f"value_{i}", schema.fields[i].type.ddl) for i in wanted]
    if not all(field.type.is_text for field in schema.fields):
        # A type that holds every text of its own may not hold the text of an earlier type. Maps
        # cannot be compared, and the order of their entries is arbitrary.
        entries = "array_sort(map_entries(rescued))"
        if len(wanted) < len(schema.fields):
            names = ", ".join(string(schema.fields[i].name) for i in wanted) or "NULL"
            texts = "coalesce(rescued, CAST(map() AS MAP<STRING, STRING>))"
            entries = f"filter(array_sort(map_entries({texts})), e -> e.key IN ({names}))"
        parts.append(entries)
    return parts


def _dropped_content_sql(fold: Fold, index: int) -> str:
    """Write the SQL of the value by which two contents are compared, for a dropped field."""
    field = fold.schema.fields[index]
    value = comparable_sql(f"value_{index}", field.type.ddl)
    return f"struct({value} AS value, try_element_at(rescued, {string(field.name)}) AS text)"
