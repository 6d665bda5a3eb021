"""Every type that the server's `pg_type` lists, by snapshot and by WAL, in SCD1 and SCD2.

One table has a column of each type, and further columns of types with a length or precision. Its
rows have edge cases and random values with a new seed in each run. The source's SELECT is the
oracle.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.merge import MergeFailure
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.columns import RESCUED
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify.values import comparable, reader_for
from pgcdc_assets_tests.support.database import create_database, drop_database
from pgcdc_assets_tests.support.merge.every_type import (
    CREATED,
    TypeColumn,
    Types,
)
from pgcdc_assets_tests.support.merge.every_type_values import WITHOUT_INPUT
from pgcdc_assets_tests.support.merge.expected_types import expected_type, must_rescue
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.servers import asked_versions
from pgcdc_assets_tests.support.verify.comparison import verify_all

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.every_pg]

# The embedded Postgres 18 has pgvector. The other extensions are in Debian's postgresql-15 (with
# contrib) and postgresql-15-postgis-3, which `.ci/run` installs.
_EXTENSIONS = {
    18: ("vector",),
    15: ("hstore", "citext", "ltree", "cube", "isn", "seg", "intarray", "lo", "postgis"),
}
_STREAMED, _CHANGED = 1000, 2000
_DOCS = Path(__file__).parents[2] / "docs" / "reference" / "types.md"
_PINNED = {
    "timezone": "UTC",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "search_path": "pg_catalog",
}

Texts = list[str | None]


@dataclass
class TypedTable:
    """A table with a column of each type.

    Attributes:
        name: name of the source table.
        kinds: expected Delta type of each column.
        declared: Postgres type of each column.
        texts: texts of each row by `id`, as the source prints them at the end.
        row_count: number of rows with different values in the snapshot.
    """

    pipeline: Pipeline
    name: str
    kinds: list[str]
    declared: list[str]
    texts: dict[int, Texts]
    row_count: int

    def open(self, scd: int) -> DeltaTable:
        """Open the SCD table of a kind."""
        zone = self.pipeline.zone
        return DeltaTable(table_path(zone.lake, zone.name, "public", self.name, scd))

    def read(self, scd: int, *more: str) -> list[tuple[tuple[Any, ...], list[Any]]]:
        """Return the rows of an SCD table: `id`, further columns, and the values.

        A rescued value is a triple of a mark, the text and the column's value.
        """
        found = []
        for batch in self.open(scd).scan():
            rows = pa.record_batch(batch)
            heads = zip(*(rows.column(name).to_pylist() for name in ("id", *more)), strict=True)
            columns = [comparable(rows.column(f"c{i}")) for i in range(len(self.kinds))]
            rescued = [dict(each or ()) for each in rows.column(RESCUED).to_pylist()]
            for number, head in enumerate(heads):
                values = [
                    ("rescued", rescued[number][f"c{i}"], column[number])
                    if f"c{i}" in rescued[number]
                    else column[number]
                    for i, column in enumerate(columns)
                ]
                found.append((head, values))
        return found

    def expected(self, texts: Texts) -> list[Any]:
        """Return the values of a row of texts, in the form of `read`."""
        schema = pa.schema(self.open(1).schema().to_arrow())
        values: list[Any] = []
        for i, (kind, text) in enumerate(zip(self.kinds, texts, strict=True)):
            if text is None:
                values.append(None)
            elif must_rescue(kind, text):
                values.append(("rescued", text, None))
            else:
                values.append(reader_for(schema.field(f"c{i}").type)(text))
        return values

    def differing(self, found: Sequence[Any], wanted: Sequence[Any]) -> list[tuple[str, Any, Any]]:
        """Return the names of the columns in which two rows differ."""
        triples = zip(self.declared, found, wanted, strict=True)
        return [(name, one, other) for name, one, other in triples if one != other]


@dataclass(frozen=True)
class Tables:
    """The types of a server, and the tables with the types.

    Attributes:
        merged: the table that is landed and merged.
        landed: the table that is only landed.
    """

    types: Types
    merged: TypedTable
    landed: TypedTable | None


@pytest.fixture(scope="module")
def tables(
    server: EmbeddedServer,
    spark: SparkSession,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Tables]:
    """Create every type of the server, by snapshot and by stream, and merge the types in one call.

    A merge depends on names of types and on texts, but not on the server. So the first version of
    `--pg` merges all types. Another version lands its builtin types, and merges only the types of
    extensions and the types that the test creates.
    """
    database = create_database(server)
    zone = RawZone(Lake(str(tmp_path_factory.mktemp("every_type") / "lake")), "types")
    pipeline = Pipeline(database, zone, spark)
    merges_all = server.version == asked_versions(request.config)[0]
    try:
        for extension in _available(database.query("select name from pg_available_extensions")):
            database.execute(f"create extension {extension}")
        for statement in CREATED:
            database.execute(statement)
        with database.connect() as connection:
            types = Types.of(connection, random.Random(seed))
        yield _merge(pipeline, types, merges_all)
    finally:
        drop_database(database)


def _available(rows: list[tuple[Any, ...]]) -> list[str]:
    there = {name for (name,) in rows}
    return [name for names in _EXTENSIONS.values() for name in names if name in there]


def _merge(pipeline: Pipeline, types: Types, merges_all: bool) -> Tables:
    columns = types.columns()
    apart = [c for c in columns if not merges_all and c.type.is_builtin and not c.is_declared]
    merged = [column for column in columns if column not in apart]
    held = {"t": merged, "landed": apart} if apart else {"t": merged}
    pipeline.start(*(sql for name, of in held.items() for sql in _create(name, of)))
    for statement in (sql for name, of in held.items() for sql in _change(name, of)):
        pipeline.database.execute(statement)
    pipeline.capture()
    for report in pipeline.merge(None, CdcTable("public", "t", (1, 2))).values():
        assert not isinstance(report, MergeFailure), report.error
    return Tables(
        types,
        _typed_table(pipeline, "t", merged, types),
        _typed_table(pipeline, "landed", apart, types) if apart else None,
    )


def _create(table: str, columns: Sequence[TypeColumn]) -> list[str]:
    """Create a table with the rows of the snapshot."""
    names = ", ".join(f"c{i}" for i in range(len(columns)))
    typed = ", ".join(f"c{i} {column.declared}" for i, column in enumerate(columns))
    statements = [f"create table {table} (id int primary key, {typed})"]
    for row in range(_row_count(columns)):
        values = ", ".join(column.literal(row) for column in columns)
        statements.append(f"insert into {table} values ({row}, {values})")
    nulls = ", null" * len(columns)
    statements.append(f"insert into {table} values ({_row_count(columns)}{nulls})")
    statements.append(f"insert into {table} select id + {_CHANGED}, {names} from {table}")
    return statements


def _change(table: str, columns: Sequence[TypeColumn]) -> list[str]:
    """Insert the same rows again for the stream, and change other rows."""
    names = ", ".join(f"c{i}" for i in range(len(columns)))
    next_row = f"other.id = (changed.id + 1) % {_row_count(columns)}"
    return [
        f"insert into {table} select id + {_STREAMED}, {names} from {table} where id < {_STREAMED}",
        f"update {table} changed set ({names}) = (select {names} from {table} other "
        f"where {next_row}) where id >= {_CHANGED}",
    ]


def _row_count(columns: Sequence[TypeColumn]) -> int:
    return max(len(column.texts) for column in columns)


def _typed_table(
    pipeline: Pipeline, name: str, columns: Sequence[TypeColumn], types: Types
) -> TypedTable:
    return TypedTable(
        pipeline,
        name,
        [expected_type(column.type, column.declared, types.by_oid) for column in columns],
        [column.declared for column in columns],
        _source_texts(pipeline, name, len(columns)),
        _row_count(columns),
    )


def _source_texts(pipeline: Pipeline, table: str, count: int) -> dict[int, Texts]:
    """Return the text of each value by its output function, in the session settings of captures."""
    shown = ", ".join(
        f"case when c{i} is distinct from null then format('%s', c{i}) end" for i in range(count)
    )
    with pipeline.database.connect() as connection, connection.cursor() as cursor:
        for name, value in _PINNED.items():
            cursor.execute(f"set {name} = '{value}'")
        cursor.execute(f"select id, array[{shown}] from public.{table}")
        return dict(cursor.fetchall())


def test_every_type_has_values_and_documentation(tables: Tables) -> None:
    """The fixture fails for a type without documentation. The test names a type without a value."""
    types = tables.types
    empty = {each.name for each in types.by_oid.values() if not types.values(each.oid)}
    assert empty <= WITHOUT_INPUT | types.refused
    named = set(_DOCS.read_text().split("`"))
    scalars = [each for each in types.by_oid.values() if each.kind == "b" and not each.element]
    missing = [each.sql for each in scalars if not {each.sql.rpartition(".")[2], each.name} & named]
    assert not missing


def test_extensions_are_installed(tables: Tables, server: EmbeddedServer) -> None:
    """In CI a missing extension is a failure. Elsewhere its types are skipped by name."""
    wanted = set(_EXTENSIONS.get(server.version, ()))
    (found,) = tables.merged.pipeline.database.query(
        "select array_agg(extname::text) from pg_extension"
    )
    missing = wanted - set(found[0])
    if not missing:
        return
    reason = f"types of {', '.join(sorted(missing))} on Postgres {server.version}: not installed"
    # A Debian without the package postgresql-15 has no extensions of this version.
    is_packaged = str(binaries(server.version)).startswith("/usr/lib/postgresql/")
    if os.environ.get("CI") == "true" and (server.version == 18 or is_packaged):
        pytest.fail(reason)
    pytest.skip(reason)


def test_the_raw_zone_has_the_exact_texts(tables: Tables) -> None:
    """G1 to G10: each value in the raw zone."""
    for table in (tables.merged, tables.landed):
        if table is not None:
            _check_raw(table)


def _check_raw(table: TypedTable) -> None:
    zone, count = table.pipeline.zone, table.row_count
    copied, landed = DeltaTable(zone.snapshots.table.uri), zone.changes.table
    snapshot = [pa.record_batch(batch) for batch in copied.scan(columns=["table", "new"])]
    stream = scan_changes(landed, epoch=1, start=0, end=2**62, columns=["op", "new", "table"])
    found: dict[str, dict[int, Texts]] = {"S": {}, "I": {}, "U": {}}
    for batch in (*snapshot, *stream):
        for row in batch.to_pylist():
            if row["table"] == table.name:
                found[row.get("op", "S")][int(row["new"][0])] = row["new"][1:]
    for row in range(count + 1):
        texts, changed = table.texts[row], table.texts[row + _CHANGED]
        assert table.differing(found["S"][row], texts) == []
        assert table.differing(found["I"][row + _STREAMED], texts) == []
        assert table.differing(found["S"][row + _CHANGED], texts) == []
        assert table.differing(found["U"][row + _CHANGED], changed) == []
    assert table.texts[count] == [None] * len(table.kinds)


def test_each_column_has_its_documented_type(tables: Tables) -> None:
    merged = tables.merged
    found = dict(merged.pipeline.frame().dtypes)
    types = [found[f"c{i}"] for i in range(len(merged.kinds))]
    assert merged.differing(types, merged.kinds) == []


def test_scd1_has_each_value_or_its_text(tables: Tables) -> None:
    """G1 to G10."""
    merged = tables.merged
    rows = merged.read(1)
    assert {head[0] for head, _ in rows} == set(merged.texts)
    for (row_id,), values in rows:
        assert merged.differing(values, merged.expected(merged.texts[row_id])) == []


def test_scd2_has_each_value_or_its_text_in_each_version(tables: Tables) -> None:
    """G1 to G10."""
    merged = tables.merged
    found = dict(merged.read(2, "_op", "_is_current"))
    wanted: dict[tuple[Any, ...], Texts] = {}
    for row in range(merged.row_count + 1):
        first, last = merged.texts[row], merged.texts[row + _CHANGED]
        wanted |= {(row, "S", True): first, (row + _STREAMED, "I", True): first}
        wanted |= {(row + _CHANGED, "S", False): first, (row + _CHANGED, "U", True): last}
    assert set(found) == set(wanted)
    for head, texts in wanted.items():
        assert merged.differing(found[head], merged.expected(texts)) == []


def test_the_digests_of_both_engines_are_equal(tables: Tables) -> None:
    """`equals_source` compares the digests of Postgres with those of Spark."""
    found = verify_all(tables.merged.pipeline)["t"]
    assert found.is_equal, found
    assert found.source_rows == len(tables.merged.texts)
