"""The versions and the current image of random changes, on frames: no lake, no MERGE."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.schema import build_schema
from pgcdc_assets.merge.fold.typed_columns import type_columns
from pgcdc_assets.merge.fold.versions import (
    build_versions,
    contents_sql,
    find_affected_rows,
    typed_events,
)
from pgcdc_assets.merge.kinds.current_image import fold_changes, rows_alone
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.tables.columns import SCD1_COLUMNS, SCD2_COLUMNS
from pgcdc_assets_tests.support.merge.frames import (
    COLUMNS,
    NUMBER,
    OF_HISTORY,
    OF_IMAGE,
    Frames,
    VersionsOfDrop,
    comparable,
    draw_frames,
    stored_frame,
    time_of,
    typed_row,
)
from pgcdc_assets_tests.support.merge.history import Images, Version, Versions, column, relation
from pgcdc_assets_tests.support.merge.random_history import NUMERIC_10_2

pytestmark = [pytest.mark.spark, pytest.mark.sampled]

_BEFORE, _EPOCH = 2, 3
Row = dict[str, Any]


def _version(version: Version, before: set[int]) -> Row:
    """Return a version as `build_versions` describes it, but for `is_stored`."""
    end = version.end
    return {
        **typed_row(version.row),
        "valid_from": time_of(version.start).replace(tzinfo=None),
        "valid_to": None if end is None else time_of(end).replace(tzinfo=None),
        "is_current": end is None,
        "valid_from_lsn": version.start,
        "valid_to_lsn": end,
        "valid_from_epoch": _BEFORE if version.start in before else _EPOCH,
        "valid_to_epoch": None if end is None else _EPOCH,
        "ordinal": version.ordinal,
        "op": version.op,
    }


def _with_names(rows: DataFrame, fold: Fold) -> list[Row]:
    """Collect rows with the names of the columns instead of their numbers."""
    named = {f"value_{i}": field.name for i, field in enumerate(fold.schema.fields)}
    named |= {"rescued": "_rescued"}
    assert len(set(rows.columns)) == len(rows.columns)
    return [
        {named.get(name, name): value for name, value in row.asDict().items()}
        for row in rows.collect()
    ]


def _key(row: Row) -> tuple[Any, ...]:
    return row["history"], row["id"], (row["_rescued"] or {}).get("id")


def _stored_versions(spark: SparkSession, frames: Frames, fold: Fold) -> DataFrame:
    rows = [
        {
            **typed_row(version.row),
            "_valid_from": time_of(version.start),
            "_valid_from_lsn": version.start,
            "_valid_from_epoch": _BEFORE,
            "_ordinal": version.ordinal,
            "_op": version.op,
        }
        for version in frames.before
    ]
    return stored_frame(spark, fold, rows, OF_HISTORY)


def _check_versions(
    spark: SparkSession, frames: Frames, tracked: Sequence[int] | None, *, is_large: bool
) -> None:
    fold = frames.fold(SCD2_COLUMNS, shows_the_past=True)
    names = [field.name for field in fold.schema.fields]
    fields = None if tracked is None else [names.index(COLUMNS[i].name) for i in tracked]
    stored = _stored_versions(spark, frames, fold) if frames.before else None
    changes = frames.changes(spark)
    touched = find_affected_rows(changes, stored, fold, is_large=is_large)
    assert (touched.key_range is not None) == (is_large and stored is not None)
    if is_large:
        touched = touched.computed()
    events = typed_events(touched.events, fold, touched.rows, touched.stored)
    built = _with_names(build_versions(events, touched.stored, fold, fields, _EPOCH), fold)

    before = {version.start for version in frames.before}
    known = {comparable(_version(each, before)) for each in frames.before}
    wanted = {
        comparable(row): row
        for row in (_version(each, before) for each in frames.expected.all)
        if row["valid_to_lsn"] is None or row["valid_to_lsn"] >= frames.rows[0]["commit_lsn"]
    }
    keys = {_key(row) for row in built}
    # No other version of the table is read again.
    assert keys <= {_key(typed_row((*key, None, None, None))) for key in frames.changed_keys}
    found = []
    for row in built:
        is_stored, is_touched = row.pop("is_stored"), row.pop("is_touched")
        for number in range(2):
            row.pop(f"key_{number}")
        row.pop("key_rescued_1")
        found.append(comparable(row))
        assert is_stored == (row["valid_from_epoch"] == _BEFORE)
        assert is_touched or (is_stored and found[-1] in known)
        if tracked is None:
            assert is_touched == (not is_stored or row["valid_to_lsn"] is not None)
    # A TRUNCATE ends the versions of the other keys, which the MERGE does.
    others = {text for text, row in wanted.items() if _key(row) not in keys}
    assert sorted(found) == sorted(wanted.keys() - others)
    assert all(wanted[text]["valid_from_epoch"] == _BEFORE for text in others)
    untouched = {text for text in others if wanted[text]["valid_to_lsn"] is None}
    assert untouched <= known


@pytest.mark.parametrize(
    ("identity", "truncates", "is_new", "tracked"),
    [
        # No change of the first one leaves a value out.
        pytest.param("whole", False, False, None, id="whole"),
        pytest.param("d", False, False, None, id="default"),
        pytest.param("d", True, False, (2, NUMBER), id="default, truncate, two columns"),
        pytest.param("d", False, True, (2, NUMBER), id="default, new, two columns"),
        pytest.param("f", False, False, (2, NUMBER), id="full, two columns"),
        pytest.param("f", True, True, None, id="full, truncate, new"),
        pytest.param("p", False, False, None, id="part"),
        pytest.param("p", True, False, (2, NUMBER), id="part, truncate, two columns"),
    ],
)
def test_versions_are_exact(
    spark: SparkSession,
    rng: random.Random,
    identity: str,
    truncates: bool,
    is_new: bool,
    tracked: tuple[int, ...] | None,
) -> None:
    """D1 to D6, D9, D12, D14."""
    expected = Versions(key=(0, 1), tracked=None if tracked is None else (0, 1, *tracked))
    is_whole = identity == "whole"
    frames = draw_frames(
        rng,
        "d" if is_whole else identity,
        expected,
        truncates=truncates,
        is_new=is_new,
        is_whole=is_whole,
    )
    _check_versions(spark, frames, expected.tracked, is_large=truncates)


@pytest.mark.parametrize(
    ("identity", "drops_at", "tracked"),
    [
        pytest.param("d", 3, (2, NUMBER), id="default, two columns"),
        pytest.param("d", 0, (2,), id="default, before the range, one column"),
        pytest.param("f", 3, None, id="full"),
        pytest.param("f", 6, None, id="full, after the range"),
        pytest.param("p", 3, (2,), id="part, one column"),
    ],
)
def test_versions_keep_the_past_of_a_dropped_column(
    spark: SparkSession,
    rng: random.Random,
    identity: str,
    drops_at: int,
    tracked: tuple[int, ...] | None,
) -> None:
    """F4: the drop opens no version, and a version from before keeps the value."""
    expected = VersionsOfDrop(key=(0, 1), tracked=None if tracked is None else (0, 1, *tracked))
    frames = draw_frames(rng, identity, expected, drops_at=drops_at)
    _check_versions(spark, frames, expected.tracked, is_large=True)


@pytest.mark.parametrize(
    ("identity", "truncates", "is_new"),
    [
        pytest.param("d", False, False, id="default"),
        pytest.param("d", True, False, id="default, truncate"),
        pytest.param("d", False, True, id="default, new"),
        pytest.param("f", False, False, id="full"),
        pytest.param("p", False, False, id="part"),
    ],
)
def test_the_current_image_is_exact(
    spark: SparkSession, rng: random.Random, identity: str, truncates: bool, is_new: bool
) -> None:
    """D1 to D9: unknown values are those of the row of the table."""
    expected = Images(key=(0, 1))
    frames = draw_frames(rng, identity, expected, truncates=truncates, is_new=is_new)
    fold = frames.fold(SCD1_COLUMNS, shows_the_past=False)
    is_alone = is_new or truncates
    table = {_key(row): row for row in map(_image, frames.before)}
    stored = None if is_alone else stored_frame(spark, fold, table.values(), OF_IMAGE)
    last = fold.stats.truncates[-1] if truncates else None
    changes = frames.changes(spark, (0, 0) if last is None else (last.commit_lsn, last.ordinal))
    rows = fold_changes(changes, fold, stored)
    found = {} if is_alone else table
    for row in _with_names(rows_alone(rows, fold) if is_alone else rows, fold):
        _apply(found, row, fold)
    wanted = [_image(version) for version in expected.open.values()]
    if identity == "f":
        # Which one of two equal rows a transaction deleted is not known.
        for row in (*wanted, *found.values()):
            for name in ("_lsn", "_ordinal", "_commit_ts"):
                row.pop(name)
    assert sorted(map(comparable, found.values())) == sorted(map(comparable, wanted))


def _image(version: Version) -> Row:
    return {
        **typed_row(version.row),
        "_lsn": version.start,
        "_ordinal": version.ordinal,
        "_commit_ts": time_of(version.start).replace(tzinfo=None),
    }


def _apply(table: dict[tuple[Any, ...], Row], row: Row, fold: Fold) -> None:
    """Apply a folded row, as the MERGE does."""
    names = [field.name for field in fold.schema.fields]
    new = {name: row[name] for name in (*names, "_rescued")}
    new |= {f"_{name}": row[name] for name in ("lsn", "ordinal", "commit_ts")}
    if not row.get("is_content", True):
        key = row["key_0"], row["key_1"], row["key_rescued_1"]
        table.pop(key, None)
        return
    rescued = dict(row["_rescued"] or {})
    for i in row.get("unknown") or ():
        assert names[i] not in rescued
        before = table[_key(new)]
        new[names[i]] = before[names[i]]
        rescued |= {n: t for n, t in (before["_rescued"] or {}).items() if n == names[i]}
    new["_rescued"] = rescued or None
    table[_key(new)] = new


def test_equal_rows_have_equal_contents(spark: SparkSession) -> None:
    """D11: Postgres prints two zeros, and one text for each other value."""
    made = relation(
        column("number", "float8"),
        column("amount", "numeric", NUMERIC_10_2),
        column("note", "text"),
        key=(),
        identity="f",
    )
    schema = build_schema([RelationVersion(1, 1, Lsn(1), made)], None)
    texts: list[tuple[str | None, ...]] = [
        ("0", "1.00", "a"),
        ("-0", "1.00", "a"),
        ("0", "1.00", "b"),
        ("0", "NaN", "a"),
        ("0", "Infinity", "a"),
        ("0", None, "a"),
        (None, "NaN", "a"),
        ("NaN", "NaN", None),
    ]
    rows = spark.createDataFrame(texts * 2, "a STRING, b STRING, c STRING")
    typed = type_columns(rows, schema, lambda i: "abc"[i], ["a", "b", "c"])
    counts = typed.groupBy(F.expr(contents_sql(schema)).alias("content")).agg(
        F.expr("count(*) AS n"), F.expr("count(DISTINCT struct(a, b, c)) AS texts")
    )
    assert [(row.n, row.texts) for row in counts.collect()] == [(2, 1)] * len(texts)
