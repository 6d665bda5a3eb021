"""A database with another encoding than UTF-8: its text is converted exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import DefiniteError
from pgcdc_assets.merge import MergeReport, rebuild_table
from pgcdc_assets.protocol.utf8 import bytes_as_text
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.encoded import encoded_database
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

# All characters of LATIN1 that a text may hold.
_ALL = "".join(map(chr, [*range(1, 0x80), *range(0xA0, 0x100)]))


@pytest.fixture
def latin1(database: Database) -> Iterator[Database]:
    """Create a database with encoding LATIN1."""
    with encoded_database(database, "LATIN1") as found:
        yield found


@pytest.mark.sampled
def test_a_latin1_database_is_merged_by_snapshot_and_by_stream(
    latin1: Database, spark: SparkSession, zone: RawZone
) -> None:
    """G7: names of columns, enum labels, keys, arrays, JSON and bytes."""
    pipeline = Pipeline(latin1, zone, spark)
    pipeline.start(
        "create type größe as enum ('groß', 'très petit')",
        'create table t (id text primary key, "prénom" text, a text[], j jsonb, b bytea, g größe)',
    )
    values = (_ALL, [_ALL, "é,ß", ""], '{"clé": "ÿ"}', b"\xe9\x00", "groß")
    insert = "insert into t values (%s, %s, %s, %s, %s, %s)"
    latin1.execute(insert, ("copié", *values))
    pipeline.copy("t")
    latin1.execute(insert, ("envoyé", *values))
    latin1.execute("update t set g = 'très petit' where id = 'copié'")
    pipeline.sync()
    rows = {row["id"]: row for row in pipeline.frame().collect()}
    for name, g in (("copié", "très petit"), ("envoyé", "groß")):
        row = rows[name]
        assert (row["prénom"], row["a"], row["j"], bytes(row["b"])) == values[:4]
        assert (row["g"], row["_rescued"]) == (g, None)
    assert verify(pipeline).is_equal


@pytest.mark.sampled
@pytest.mark.parametrize(("encoding", "stored"), [("WIN1252", "e981"), ("EUC_JP", "b4c1a9a1")])
def test_a_text_without_a_form_in_utf8_is_hex_in_each_table(
    database: Database, spark: SparkSession, zone: RawZone, encoding: str, stored: str
) -> None:
    """G6: by snapshot and by stream, as key, as value and in an array, in SCD1 and SCD2."""
    target = CdcTable("public", "t", (1, 2))
    bad, raw = f"'\\x{stored}'::bytea::text", bytes.fromhex(stored)
    row = f"{bad}, array[{bad}, 'b']"
    with encoded_database(database, encoding) as encoded:
        pipeline = Pipeline(encoded, zone, spark)
        pipeline.start(
            "create table t (id text primary key, v text, a text[])",
            f"insert into t values ('copied', {row}), ({bad}, '', null)",
        )
        encoded.execute(f"insert into t values ('sent', {row}), ('good', 'x', null)")
        encoded.execute(f"update t set v = 'u' where id = {bad}")
        reports = pipeline.merge(pipeline.capture(), target)
        assert isinstance(reports["t"], MergeReport), reports

        hexed = bytes_as_text(raw)
        array = bytes_as_text(b"{" + raw + b",b}")

        def shown(scd: int) -> dict[str, tuple[object, ...]]:
            path = table_path(zone.lake, zone.name, "public", "t", scd)
            rows = spark.read.format("delta").load(path)
            if scd == 2:
                rows = rows.where("_is_current")
            return {
                row["id"]: (row["v"], row["a"], (row["_rescued"] or {}).get("a"))
                for row in rows.collect()
            }

        expected = {
            "copied": (hexed, None, array),
            "sent": (hexed, None, array),
            hexed: ("u", None, None),
            "good": ("x", None, None),
        }
        assert shown(1) == shown(2) == expected
        for scd in (1, 2):
            rebuild_table(spark, zone, target, scd)
        assert shown(1) == shown(2) == expected
        if encoding == "WIN1252":
            assert verify(pipeline).is_equal
            return
        with pytest.raises(DefiniteError, match="a text that Postgres cannot convert"):
            verify(pipeline)
