"""A database with another encoding than UTF-8: its text is converted exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg2 import sql
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import Database, drop_database
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

# All characters of LATIN1 that a text may hold.
_ALL = "".join(map(chr, [*range(1, 0x80), *range(0xA0, 0x100)]))


@pytest.fixture
def latin1(database: Database, server: EmbeddedServer) -> Iterator[Database]:
    """Create a database with encoding LATIN1."""
    found = Database(server, f"{database.name}_l")
    database.execute(
        sql.SQL(
            "create database {} encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'"
        ).format(sql.Identifier(found.name))
    )
    try:
        yield found
    finally:
        drop_database(found)


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
