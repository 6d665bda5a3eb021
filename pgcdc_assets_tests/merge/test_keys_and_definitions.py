"""Keys of several types, altered types, constraints and generated columns, from a real server."""

from __future__ import annotations

import pytest

from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_TYPES = """
create type mood as enum ('sad', 'so so'); create type pair as (n int, t text);
create domain amount as numeric(10, 2)
"""
# The rows differ in a part of the key, often in a detail that a wrong comparison ignores.
_KEYS = """
create table k (
    name text collate "C", other text, f float8, f4 float4, u uuid, n oid, m mood, at timestamp,
    v text, primary key (name, other, f, f4, u, n, m, at)
);
insert into k
select name, other, f, f4, md5(u)::uuid, n, m::mood, at, 'old'
  from (values ('', 'a'), (' ', 'a'), ('a', ''), ('a', ' '), ('A', 'a'), ('a', 'A'), ('a ', 'a'),
               ('ä', 'a'), ('null', 'NULL')) names(name, other),
       (values ('NaN'::float8, 'NaN'::float4), ('Infinity', 0.1), (0.1, 'NaN'), (1e308, 0))
               floats(f, f4),
       (values ('a', 1, 'sad', 'infinity'::timestamp), ('b', 4294967295, 'so so', '0044-03-15 BC'),
               ('b', 1, 'sad', '2024-01-01 00:00:00.000001'), ('b', 1, 'sad', '2024-01-01'))
               more(u, n, m, at)
"""
_DEFINED = """
create table d (id int primary key, m mood, ms mood[], p pair, x amount, v text not null);
insert into d
select i, 'sad', '{sad,NULL}', row(i, 'a')::pair, 1.5, 'v' from generate_series(1, 4) i
"""
_GENERATED = """
create table g (id int primary key, a int, twice int generated always as (a * 2) stored);
insert into g (id, a) values (1, 1), (2, 2)
"""
_CHANGES = """
update k set v = 'new' where f = 'NaN' and name in ('', ' ');
delete from k where f4 = 'NaN' and at = 'infinity';
update k set f = 'NaN', name = name || '!' where f = 0.1 and n = 1;
alter type mood add value 'new' before 'sad';
insert into d values (5, 'new', '{new}', row(5, null)::pair, 2.5, 'v');
alter table d alter v drop not null; update d set v = null where id = 1;
create type later as enum ('x'); create domain late as later[]; alter table d add l late;
insert into d values (6, 'new', null, null, null, null, '{x}');
alter domain amount add check (value < 100);
alter table d alter m set not null; update d set x = 99 where id = 2;
alter type mood rename to feeling; create schema moved; alter type pair set schema moved;
insert into d values (8, 'new', '{new}', row(8, 'b')::moved.pair, 3, 'v');
update g set a = 7 where id = 1; insert into g (id, a) values (3, 3)
"""


@pytest.mark.sampled
def test_keys_definitions_and_generated_columns_follow_the_source(pipeline: Pipeline) -> None:
    """C8, F10, F11, F12: SCD1 and SCD2 have the rows by snapshot and by stream."""
    pipeline.tables = ("k", "d", "g")
    pipeline.start(_TYPES, _KEYS, _DEFINED, _GENERATED)
    targets = [CdcTable("public", name, scd=(1, 2)) for name in pipeline.tables]
    pipeline.sync(*targets)
    pipeline.assert_equal()

    for statement in _CHANGES.split(";"):
        pipeline.database.execute(statement)
    pipeline.sync(*targets)

    pipeline.assert_equal()
    for table in pipeline.tables:
        count = pipeline.database.value(f"select count(*) from {table}")
        history = pipeline.frame(table, 2)
        assert history.where("_is_current").count() == count, table
    assert "twice" not in pipeline.frame("g").columns

    # No row shows that stored values have other texts.
    pipeline.database.execute("alter type feeling rename value 'sad' to 'unhappy'")
    pipeline.database.execute("alter type moved.pair add attribute more int")
    pipeline.database.execute("insert into d values (7, 'unhappy', null, row(7, 'a', 1), 1, 'v')")
    pipeline.capture()
    events = pipeline.zone.schema_events.read()
    assert {event.table.table for event in events if event.needs_snapshot} == {"k", "d"}
    pipeline.copy("k", "d")
    pipeline.sync(*targets)
    pipeline.assert_equal()
