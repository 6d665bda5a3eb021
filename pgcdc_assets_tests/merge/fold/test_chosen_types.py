"""Types of columns that the settings choose, by snapshot and stream, in SCD1 and SCD2."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import MergeConflict
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import MergeFailure
from pgcdc_assets.merge.fold.chosen_types import choose_types
from pgcdc_assets.merge.fold.schema import build_schema
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.protocol.relation import Column
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.relations.registry import RelationVersion
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import Comparison, compare_tables
from pgcdc_assets_tests.support.database import create_database, drop_database
from pgcdc_assets_tests.support.merge.draw_values import draw_interval
from pgcdc_assets_tests.support.merge.history import column, relation
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline
from pgcdc_assets_tests.support.servers import asked_versions
from pgcdc_assets_tests.support.verify.comparison import moment_of

RESCUED = object()
# The parts of an interval, as the source extracts them.
PARTS = object()
_PARTS = (
    "select id, format('{%s, %s, %s}', (extract(year from i) * 12 + extract(month from i))::int, "
    "extract(day from i), (extract(hour from i) * 3600000000 + extract(minute from i) * 60000000 "
    "+ extract(microseconds from i))::bigint) from t"
)
_DIGITS = "1234567890" * 4

# Column, Postgres type, chosen type, values as SQL literals, each with what Spark shows.
Cases = tuple[tuple[str, str, str, tuple[tuple[str, Any], ...]], ...]
BUILTIN: Cases = (
    (
        "d",
        "numeric",
        "decimal(20, 5)",
        (
            ("'1.10'", "1.10000"),
            ("'1.1000000000'", "1.10000"),
            ("'-0.00001'", "-0.00001"),
            ("'1.1234567'", RESCUED),
            ("'NaN'", RESCUED),
            ("'99999999999999999999'", RESCUED),
        ),
    ),
    (
        "f",
        "numeric",
        "DOUBLE",
        (
            ("'1.5'", "1.5"),
            ("'0.00'", "0.0"),
            ("'NaN'", "NaN"),
            ("'-Infinity'", "-Infinity"),
            ("'1e400'", RESCUED),
            ("'-1e-400'", RESCUED),
            (f"'{_DIGITS}'", "1.2345678901234568E39"),
            ("'5e-324'", "4.9E-324"),
        ),
    ),
    (
        "j",
        "json",
        "VARIANT",
        (
            (r"""'{"b": 1.50, "a":[null]}'""", '{"a":[null],"b":1.5}'),
            ("'null'", "null"),
            ("""'{\"a\":1,\"a\":2}'""", RESCUED),
            ("'1e5'", RESCUED),
            (f"'[{_DIGITS}]'", RESCUED),
            (f"""'\"{_DIGITS}\"'""", f'"{_DIGITS}"'),
            (r"""'"\ud800"'""", RESCUED),
            (r"""'"\ud83d\ude00"'""", '"😀"'),
            (r"""'"\\ud800x"'""", r'"\\ud800x"'),
        ),
    ),
    ("b", "jsonb", "VARIANT", (("""'{"k":"ü"}'""", '{"k":"ü"}'), ("'123456789'", "123456789"))),
    ("s", "timestamp", "STRING", (("'infinity'", "infinity"),)),
    ("a", "text[]", "string", (("'{{a},{b}}'", "{{a},{b}}"), ("'{}'", "{}"))),
    (
        "i",
        "interval",
        "struct< months INT, days : int,microseconds  bigint >",
        tuple(
            (f"interval '{text}' - interval '0.000001 s'", PARTS)
            for text in (
                "0",
                "0.000001",
                "1 year 2 mons 3 days 04:05:06.7",
                "-1 year 2 mons -3 days +04:05:06.700001",
                "1 year -1 day",
                "-1 mons +1 day -00:00:00.000001",
                "-1 mons +00:00:01",
                "-178956970 years -8 mons -2147483647 days -2562047788:00:54.775807",
                "-2562047788:00:54.775807",
                "178956970 years 7 mons 2147483647 days 2562047788:00:54.775806",
            )
        ),
    ),
    # Chosen later.
    ("later", "numeric", "", (("'2.50'", "2.50"), ("'2.505'", "2.505"))),
)
_ENDLESS = (("'infinity'", RESCUED), ("'-infinity'", RESCUED), ("'1 day'", "{0, 1, 0}"))
OF_VERSIONS: dict[int, Cases] = {
    18: (
        ("v", "vector(3)", "ARRAY<FLOAT>", (("'[1,-2.5,3e-05]'", "[1.0, -2.5, 3.0E-5]"),)),
        ("x", "interval", "STRUCT<months:int,days:int,microseconds:bigint>", _ENDLESS),
        ("w", "halfvec", "array< float >", (("'[65504,-0]'", "[65504.0, -0.0]"),)),
    ),
    15: (
        (
            "h",
            "hstore",
            "MAP<STRING, STRING>",
            (
                ("''", "{}"),
                ("""'a=>1, b=>NULL, "NULL"=>"NULL"'""", "{a -> 1, b -> null, NULL -> NULL}"),
                (r"""'"\"=>\\,"=>"x=>y, \"z"'""", r'{"=>\, -> x=>y, "z}'),
                ("hstore('k', repeat('\"', 5000))", "{k -> " + '"' * 5000 + "}"),
            ),
        ),
        (
            "g",
            "geometry",
            "BINARY",
            (("'SRID=4326;POINT(1 2)'", "0101000020E6100000000000000000F03F0000000000000040"),),
        ),
    ),
}
_EXTENSIONS = ("vector", "hstore", "ltree", "postgis")


@pytest.fixture
def pipeline(
    server: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pipeline]:
    database = create_database(server)
    zone = RawZone(Lake(str(tmp_path_factory.mktemp("chosen") / "lake")), "types")
    try:
        for (name,) in database.query("select name from pg_available_extensions"):
            if name in _EXTENSIONS:
                database.execute(f"create extension {name}")
        yield Pipeline(database, zone, spark)
    finally:
        drop_database(database)


def _merge(pipeline: Pipeline, target: CdcTable) -> list[str]:
    """Merge one table, and return the sentences of failures."""
    found = []
    for scd in target.scd:
        for report in pipeline.merge(None, target.of_kinds([scd])).values():
            found += [str(report.error)] if isinstance(report, MergeFailure) else []
    return found


def _shown(
    pipeline: Pipeline, scd: int, types: Mapping[str, str]
) -> dict[str, dict[int, tuple[Any, Any]]]:
    """Return by column what Spark shows as values, and rescued texts, by row."""
    path = pipeline.path("t", scd)
    shown = ["id"]
    for name, chosen in types.items():
        value = {"VARIANT": f"to_json({name})", "BINARY": f"hex({name})"}.get(
            chosen.upper(), f"CAST({name} AS STRING)"
        )
        shown += [f"{value} AS {name}", f"try_element_at(_rescued, '{name}') AS {name}_text"]
    rows = pipeline.spark.read.format("delta").load(path).selectExpr(*shown).collect()
    return {name: {row["id"]: (row[name], row[f"{name}_text"]) for row in rows} for name in types}


@pytest.mark.sampled
@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.every_pg
def test_values_have_the_chosen_type_or_are_rescued(
    pipeline: Pipeline, server: EmbeddedServer, request: pytest.FixtureRequest, seed: int
) -> None:
    """G1, G6, G7, G8: and a changed choice has a defined result."""
    (there,) = pipeline.database.query("select array_agg(extname::text) from pg_extension")
    drawn = random.Random(seed)
    cases = [
        (*case[:3], (*case[3], *((f"'{draw_interval(drawn)}'", PARTS) for _ in range(3))))
        if case[1] == "interval"
        else case
        for case in BUILTIN
    ]
    for case in OF_VERSIONS.get(server.version, ()):
        if {"vector(3)": "vector", "halfvec": "vector", "geometry": "postgis"}.get(
            case[1], case[1]
        ) in there[0]:
            cases.append(case)
    columns = ", ".join(f"{name} {declared}" for name, declared, _, _ in cases)
    first: list[str] = []
    streamed: list[str] = []
    for row in range(max(len(values) for *_, values in cases)):
        given = ", ".join(values[row][0] if row < len(values) else "null" for *_, values in cases)
        first.append(f"insert into t values ({row}, 0, {given})")
        streamed.append(f"insert into t values ({row + 100}, 0, {given})")
    types = {name: chosen for name, _, chosen, _ in cases if chosen}
    target = CdcTable.parse("public.t", (1, 2), types=types)
    pipeline.start(f"create table t (id int primary key, n int, {columns})", *first)
    for statement in streamed:
        pipeline.database.execute(statement)
    pipeline.capture()
    assert _merge(pipeline, target) == []
    shown = [_shown(pipeline, scd, {case[0]: case[2] for case in cases}) for scd in (1, 2)]
    parts = dict(pipeline.database.query(_PARTS))
    for name, declared, _, values in cases:
        texts = dict(pipeline.database.query(f"select id, format('%s', {name}) from t"))
        for found in shown:
            for row, (literal, expected) in enumerate(values):
                for row_id in (row, row + 100):
                    wanted = (parts[row_id] if expected is PARTS else expected, None)
                    if expected is RESCUED:
                        wanted = (None, texts[row_id])
                    assert found[name][row_id] == wanted, (declared, literal)

    # An update of another column opens one version. An update of a MAP opens no version.
    pipeline.database.execute("update t set n = 1 where id = 0")
    with moment_of(pipeline) as moment:
        pipeline.capture()
        assert _merge(pipeline, target) == []
        (compared,) = compare_tables(
            pipeline.spark,
            pipeline.database.settings(),
            pipeline.zone,
            PUBLICATION,
            [target],
            moment,
        )
    assert isinstance(compared, Comparison) and compared.is_equal, compared
    if server.version == asked_versions(request.config)[0]:
        _check_changed_settings(pipeline, target)


def _check_changed_settings(pipeline: Pipeline, target: CdcTable) -> None:
    """A merge refuses a changed choice; a snapshot adopts it if the stored values allow."""
    pipeline.database.execute("update t set n = 2 where id = 0")
    pipeline.capture()
    more = {**target.types, "later": "DECIMAL(10,2)"}
    sentences = _merge(pipeline, replace(target, types=more))
    assert len(sentences) == 2
    for sentence in sentences:
        assert "column later: its type in the settings changed from STRING to DECIMAL(10,2)" in (
            sentence
        )
        assert "resnapshot" in sentence
    pipeline.copy("t")
    pipeline.capture()
    assert _merge(pipeline, replace(target, types=more)) == []
    for scd in (1, 2):
        found = _shown(pipeline, scd, {"later": "DECIMAL(10,2)"})["later"]
        assert (found[0], found[1]) == (("2.50", None), (None, "2.505"))

    fewer = {name: ddl for name, ddl in more.items() if name != "f"}
    pipeline.copy("t")
    pipeline.capture()
    (sentence,) = _merge(pipeline, replace(target, types=fewer))
    assert "changed from DOUBLE to STRING" in sentence and "pgcdc rebuild" in sentence
    assert _shown(pipeline, 1, {"f": "STRING"})["f"][1] == ("0.00", None)

    # The raw zone has the texts of the table that cannot be rewritten.
    texts = dict(pipeline.database.query("select id, f::text from t"))
    for scd in (1, 2):
        rebuild_table(pipeline.spark, pipeline.zone, replace(target, types=fewer), scd)
        found = _shown(pipeline, scd, {"f": "STRING"})["f"]
        assert found == {key: (text, None) for key, text in texts.items()}
    pipeline.database.execute("update t set n = 3 where id = 0")
    pipeline.capture()
    assert _merge(pipeline, replace(target, types=fewer)) == []


# Column, Postgres type, chosen type, and the SQL of a value over rows `i`.
_LARGE = (
    ("j", "jsonb", "VARIANT", "jsonb_object_agg(i, md5(i::text))"),
    ("twice", "json", "VARIANT", "('{' || string_agg('\"a\":' || i, ',') || '}')::json"),
    ("wide", "numeric", "DOUBLE", "(string_agg((i * 7919)::text, '') || '.5')::numeric"),
    ("h", "hstore", "", "string_agg(format('%s=>\"%s\"', i, md5(i::text)), ',')::hstore"),
    ("m", "hstore", "MAP<STRING,STRING>", "hstore(array_agg(i::text), array_agg(md5(i::text)))"),
    ("l", "ltree", "", "string_agg(md5(i::text), '.')::ltree"),
    ("g", "geometry", "BINARY", "st_makeline(st_makepoint(i, random()) order by i)"),
    ("v", "vector", "ARRAY<FLOAT>", "array_agg(i::real)::vector"),
    ("s", "sparsevec", "", "array_agg(i::real)::vector::sparsevec"),
)
_OF_EXTENSION = {
    "hstore": "hstore",
    "ltree": "ltree",
    "geometry": "postgis",
    "vector": "vector",
    "sparsevec": "vector",
}


@pytest.mark.sampled
@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.every_pg
def test_unchanged_toast_of_chosen_and_extension_types_stays(pipeline: Pipeline) -> None:
    """D7: by an update of the row, and by an update of its key, in SCD1 and SCD2."""
    found = {name for (name,) in pipeline.database.query("select extname::text from pg_extension")}
    columns = [each for each in _LARGE if _OF_EXTENSION.get(each[1]) in {None, *found}]
    declared = ", ".join(f"{name} {kind}" for name, kind, *_ in columns)
    external = ", ".join(f"alter {name} set storage external" for name, *_ in columns)
    values = ", ".join(value for *_, value in columns)
    pipeline.start(
        f"create table t (id int primary key, n int, {declared})",
        f"alter table t {external}",
        f"insert into t select 1, 0, {values} from generate_series(1, 1500) i",
    )
    target = CdcTable.parse(
        "public.t", (1, 2), types={name: chosen for name, _, chosen, _ in columns if chosen}
    )
    pipeline.database.execute("update t set n = 1")
    pipeline.database.execute("update t set id = 2, n = 2")
    with moment_of(pipeline) as moment:
        pipeline.capture()
        assert _merge(pipeline, target) == []
        settings = pipeline.database.settings()
        (compared,) = compare_tables(
            pipeline.spark, settings, pipeline.zone, PUBLICATION, [target], moment
        )
    assert isinstance(compared, Comparison) and compared.is_equal, compared
    changes = DeltaTable(pipeline.zone.changes.table.uri).scan(columns=["op", "unchanged"])
    rows = [row for batch in changes for row in pa.record_batch(batch).to_pylist()]
    unchanged = [row["unchanged"] for row in rows if row["op"] == "U"]
    assert unchanged == [list(range(2, len(columns) + 2))] * 2
    current, history = (
        _shown(pipeline, scd, {name: chosen for name, _, chosen, _ in columns}) for scd in (1, 2)
    )
    for name, *_ in columns:
        before = history[name][1]
        assert before != (None, None)
        assert (before[1] is not None) == (name in ("twice", "wide"))
        assert [current[name][2], history[name][2]] == [before] * 2


@pytest.mark.parametrize(
    ("described", "ddl", "sentence"),
    [
        (column("v", "int4"), "VARIANT", r"column \"v\" \(int4\), which can be STRING\."),
        (column("v", "numeric"), "BINARY", r"STRING or DECIMAL\(p,s\) or DOUBLE\."),
        (column("v", "_numeric", element_type="numeric"), "DOUBLE", r"which can be STRING\."),
        (
            column("v", "interval"),
            "BINARY",
            r"can be STRING or STRUCT<months: INT, days: INT, microseconds: BIGINT>\.",
        ),
        (column("v", "shop.hstore", kind="e"), "MAP<STRING,STRING>", r"which can be STRING\."),
        (column("id", "numeric"), "DOUBLE", r"part of the key\), which can be STRING\."),
    ],
)
def test_an_unsuitable_type_for_a_column_is_refused(
    described: Column, ddl: str, sentence: str
) -> None:
    columns = [described] if described.name == "id" else [column("id"), described]
    schema = build_schema([RelationVersion(1, 1, Lsn(1), relation(*columns))], None)
    with pytest.raises(MergeConflict, match=sentence):
        choose_types(schema, {described.name: ddl})
    assert choose_types(schema, {"gone": ddl}) == schema
