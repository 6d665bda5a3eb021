"""Types in SCD1: each value is exact, by snapshot and by stream.

A database with unusual output settings has a table per group of types. Every value is inserted
before and after the snapshot. The tests check the result of one merge of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.verify import Comparison, small_table
from pgcdc_assets_tests.support.database import create_database, drop_database
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.merge.type_values import GROUPS, RESCUED, SAME, Case
from pgcdc_assets_tests.support.verify.comparison import verify_all

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_STREAMED = 1000

_SETTINGS = (
    "create type mood as enum ('so so', 'très bien', '\"quoted\", {x}')",
    "create schema other",
    "create type other.mood as enum ('a', 'b c')",
    "create type pair as (a int, b text)",
    "create domain small as numeric(6,2) check (value > -1000)",
    "create domain smaller as small check (value > -100)",
)
_UNHELPFUL = {
    "timezone": "Asia/Kolkata",
    "datestyle": "German, DMY",
    "intervalstyle": "iso_8601",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
}


@pytest.fixture(scope="module")
def merged(
    server: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pipeline]:
    """Merge all groups of types, by snapshot and by stream."""
    database = create_database(server)
    lake = Lake(str(tmp_path_factory.mktemp("types") / "lake"))
    pipeline = Pipeline(database, RawZone(lake, "types"), spark, tuple(GROUPS))
    try:
        for setting, value in _UNHELPFUL.items():
            database.execute(f"alter database {database.name} set {setting} = '{value}'")
        tables = []
        for name, cases in GROUPS.items():
            columns = ", ".join(f"c{i} {case.declared}" for i, case in enumerate(cases))
            tables.append(f"create table {name} (id int primary key, {columns})")
        pipeline.start(*_SETTINGS, *tables, *_inserts(0))
        for statement in _inserts(_STREAMED):
            database.execute(statement)
        pipeline.sync()
        yield pipeline
    finally:
        drop_database(database)


@pytest.fixture(scope="module", params=["small", "large"])
def compared(merged: Pipeline, request: pytest.FixtureRequest) -> dict[str, Comparison]:
    """Compare all groups of types at one LSN, as small tables and as large tables."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "large":
            patch.setattr(small_table, "SMALL_ROWS", -1)
        return verify_all(merged)


def _inserts(first_id: int) -> list[str]:
    statements = []
    for name, cases in GROUPS.items():
        for row in range(max(len(case.values) for case in cases)):
            given = {
                f"c{i}": case.values[row][0]
                for i, case in enumerate(cases)
                if row < len(case.values)
            }
            columns, values = (
                ", ".join(["id", *given]),
                ", ".join([str(first_id + row), *given.values()]),
            )
            statements.append(f"insert into {name} ({columns}) values ({values})")
    return statements


@pytest.mark.sampled
@pytest.mark.parametrize("group", GROUPS)
def test_values_are_typed_exactly_or_rescued_exactly(merged: Pipeline, group: str) -> None:
    """G1, G2, G3, G4, G5, G6, G7, G9, G10."""
    _check(merged, group, GROUPS[group])


@pytest.mark.parametrize("group", GROUPS)
def test_each_value_is_equal_to_the_source_at_one_lsn(
    compared: Mapping[str, Comparison], group: str
) -> None:
    """G1 to G10, by the digests that Postgres and Spark compute."""
    found = compared[group]
    assert found.is_equal, found
    assert found.source_rows > 0


def _check(merged: Pipeline, group: str, cases: Sequence[Case]) -> None:
    found = _found(merged, group, cases)
    texts = _texts_at_the_source(merged, group, cases)
    for i, case in enumerate(cases):
        for row, (literal, expected) in enumerate(case.values):
            for number in (row, _STREAMED + row):
                value, rescued = found[number][i]
                text = texts[number][i]
                wanted = text if expected is SAME else None if expected is RESCUED else expected
                kept = text if expected is RESCUED else None
                assert (value, rescued) == (wanted, kept), (case.declared, literal, number)


@pytest.mark.parametrize("group", GROUPS)
def test_the_table_equals_its_source_by_an_independent_reader(merged: Pipeline, group: str) -> None:
    """G1, G2, G3, G4, G5, G6, G7, G9, G10: by the package's own comparison."""
    merged.assert_equal(group)


def test_a_column_comment_has_its_postgres_type(merged: Pipeline) -> None:
    fields = {field.name: field for field in merged.frame("g1").schema.fields}
    assert fields["c2"].metadata["comment"] == "numeric"
    assert {"_lsn", "_ordinal", "_commit_ts", "_rescued"} <= set(fields)


def _found(
    pipeline: Pipeline, group: str, cases: Sequence[Case]
) -> dict[int, list[tuple[str | None, str | None]]]:
    """Return each typed value as text, and its rescued text."""
    frame = pipeline.frame(group)
    kinds = dict(frame.dtypes)
    shown = []
    for i in range(len(cases)):
        kind = kinds[f"c{i}"]
        if kind == "binary":
            value = f"hex(c{i})"
        elif kind.startswith("array"):
            value = f"to_json(c{i})"
        else:
            value = f"CAST(c{i} AS STRING)"
        shown.append(
            f"struct({value} AS value, try_element_at(_rescued, 'c{i}') AS rescued) AS v{i}"
        )
    rows = frame.selectExpr("id", *shown).collect()
    return {row["id"]: [tuple(row[f"v{i}"]) for i in range(len(cases))] for row in rows}


def _texts_at_the_source(
    pipeline: Pipeline, group: str, cases: Sequence[Case]
) -> dict[int, list[str | None]]:
    """Return each value's text by its output function, with the pinned settings of captures."""
    pinned = (
        "set timezone = 'UTC'; set datestyle = 'ISO'; set intervalstyle = 'postgres'; "
        "set extra_float_digits = 3; set bytea_output = 'hex'; set lc_monetary = 'C'; "
    )
    shown = ", ".join(
        f"case num_nulls(c{i}) when 0 then format('%s', c{i}) end" for i in range(len(cases))
    )
    with pipeline.database.connect() as connection, connection.cursor() as cursor:
        cursor.execute(pinned)
        cursor.execute(f"select id, {shown} from {group}")
        return {row[0]: list(row[1:]) for row in cursor.fetchall()}
