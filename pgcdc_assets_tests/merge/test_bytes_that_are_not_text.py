"""A database with encoding SQL_ASCII: any byte is landed, by snapshot and by stream."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import pytest
from psycopg2 import sql
from pyspark.sql import SparkSession

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.preflight.run import run_preflight
from pgcdc_assets.protocol.utf8 import bytes_as_text
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import Database, drop_database
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = pytest.mark.postgres


@pytest.fixture
def ascii_capturing(capturing: Capturing) -> Iterator[Capturing]:
    """Create a capture of a database with encoding SQL_ASCII."""
    database = Database(capturing.database.server, f"{capturing.database.name}_a")
    capturing.database.execute(
        sql.SQL(
            "create database {} encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'"
        ).format(sql.Identifier(database.name))
    )
    try:
        yield capturing.of(database)
    finally:
        drop_database(database)


def test_a_value_that_is_not_utf8_is_landed_as_hex(
    ascii_capturing: Capturing,
) -> None:
    capturing = ascii_capturing.begin(
        "create table t (id text primary key, v text)", "alter table t replica identity full"
    )
    database = capturing.database
    latin = "convert_from('\\xe9'::bytea, 'SQL_ASCII')"
    database.execute(f"insert into t values ('1', {latin}), ({latin}, '\\xe9')")
    database.execute("update t set v = 'ok' where id = '1'")
    report = capturing.capture()
    bad = bytes_as_text(b"\xe9")
    assert capturing.texts("t") == [["1", bad], [bad, "\\xe9"], ["1", "ok"]]
    assert capturing.rows()[2]["old"] == ["1", bad]
    assert report.warnings == {"public.t: values that are not UTF-8, landed as hex": 3}

    (copied,) = snapshot_tables(
        capturing.settings, capturing.zone, capturing.slot, capturing.publication
    )
    assert copied.rescued_count == 1


def test_a_name_that_is_not_utf8_is_refused_and_stops_no_other_table(
    ascii_capturing: Capturing,
) -> None:
    """The publication of all tables has such names of a schema, table, column and type."""
    capturing = ascii_capturing.begin("create table good (id int primary key, v text)")
    database = capturing.database
    database.execute("insert into good values (1, 'a')")
    capturing.capture()
    with psycopg2.connect(database.conninfo) as conn, conn.cursor() as cursor:
        for statement in (
            b'create schema "s\xe9"',
            b'create table "s\xe9"."t\xe9" (id int primary key)',
            b'create table named (id int primary key, "pr\xe9nom" text)',
            b"create type \"m\xe9\" as enum ('x')",
            b'create table typed (id int primary key, m "m\xe9")',
            b'insert into "s\xe9"."t\xe9" values (1)',
            b"insert into named values (1, 'a')",
            b"insert into typed values (1, 'x')",
            b"insert into good values (2, 'b')",
        ):
            cursor.execute(statement)

    report = capturing.capture()

    assert capturing.texts("good") == [["1", "a"], ["2", "b"]]
    assert capturing.texts("named") == [["1", "a"]]
    assert capturing.texts("typed") == [["1", "x"]]
    assert capturing.texts(bytes_as_text(b"t\xe9")) == [["1"]]
    assert report.row_count == 4
    relations = {v.relation.table: v.relation for v in capturing.zone.relations.versions(1)}
    assert [c.attnum for c in relations["good"].columns] == [1, 2]
    assert [c.name for c in relations["named"].columns] == ["id", bytes_as_text(b"pr\xe9nom")]
    for check in (
        lambda: run_preflight(capturing.settings, "pub", capturing.slot),
        lambda: snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub"),
    ):
        with pytest.raises(ConfigurationError, match=r"is not UTF-8.* take its table out of the"):
            check()
    database.execute("drop publication pub")
    database.execute("create publication pub for table good")
    assert "error" not in {f.severity for f in run_preflight(capturing.settings, "pub", "other")}


@pytest.mark.sampled
@pytest.mark.spark
def test_values_that_are_not_utf8_are_compared_byte_by_byte(
    ascii_capturing: Capturing, spark: SparkSession
) -> None:
    """In keys, columns and arrays. A text that looks like the hex form is different."""
    pipeline = Pipeline(ascii_capturing.database, ascii_capturing.zone, spark)
    bad = "convert_from('\\xe9'::bytea, 'SQL_ASCII')"
    good = "convert_from('\\xc3a9'::bytea, 'SQL_ASCII')"
    cut = "convert_from('\\xe282'::bytea, 'SQL_ASCII')"
    pipeline.start(
        "create table t (id text primary key, v text, a text[])",
        f"insert into t values ('1', {bad}, array['a', {bad}]), ({bad}, '\\xe9', '{{}}')",
        f"insert into t values ({good}, '2xe9', array[{good}]), ({cut}, null, null)",
    )
    pipeline.sync()
    pipeline.database.execute(f"insert into t values ('new', 'a' || {cut} || 'b', null)")
    pipeline.sync()
    assert verify(pipeline).is_equal
    pipeline.assert_equal("t")
    update = f"UPDATE {delta_table(pipeline.path())} SET v = %s WHERE v = %s"
    pipeline.spark.sql(update % (r"'\u0000\\xe8'", r"'\u0000\\xe9'"))
    found = verify(pipeline)
    (difference,) = found.differences
    assert difference.columns == ("v",)
    pipeline.spark.sql(
        f"UPDATE {delta_table(pipeline.path())} SET v = concat(left(v, 3), 'e8') WHERE id = '1'"
    )
    found = verify(pipeline)
    (difference,) = found.differences
    assert (difference.key, difference.columns) == (("1",), ("v",))
    pipeline.spark.sql(
        f"DELETE FROM {delta_table(pipeline.path())} WHERE id = concat('\\u0000', '\\\\xe9')"
    )
    found = verify(pipeline)
    assert (found.missing, found.differing) == (1, 1)
    assert ("\\xe9",) in {difference.key for difference in found.differences}
