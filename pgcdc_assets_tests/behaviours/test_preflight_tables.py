"""The pre-flight of publication and tables: what is missing is named, with what mends it (B9, B10,
B13, B14, C14, D10, D13)."""

from __future__ import annotations

import re

import psycopg2
import pytest

from pgcdc_assets_tests.fixtures.database import Database
from pgcdc_assets_tests.fixtures.preflight import findings_of, problems_in, settings_as

pytestmark = pytest.mark.postgres


@pytest.mark.every_pg
def test_a_missing_publication_is_named_before_the_slot_is_made(database: Database) -> None:
    """B9."""
    problem = problems_in(findings_of(database.settings()))["publication", None]
    assert f"Publication pub does not exist in database {database.name}" in problem
    assert 'create publication "pub" for table' in problem


def test_an_empty_publication_is_an_error(database: Database) -> None:
    database.execute("create publication pub")
    assert "has no tables" in problems_in(findings_of(database.settings()))["publication", None]


def test_a_publication_of_inserts_only_is_warned_about(database: Database) -> None:
    """B10."""
    database.execute(
        "create table t (id int primary key);"
        "create publication pub for table t with (publish = 'insert')"
    )
    assert problems_in(findings_of(database.settings())) == {
        ("publish", None): "warning: Publication pub does not send update and delete and truncate: "
        'such changes never arrive. alter publication "pub" set (publish = \'insert, update, '
        "delete, "
        "truncate')"
    }


def test_row_level_security_is_refused_up_front(database: Database, role: str) -> None:
    """B13."""
    database.execute(
        f"""
        create table t (id int primary key); create publication pub for table t;
        alter table t enable row level security;
        alter role {role} replication; grant select on t to {role}
        """
    )
    problems = problems_in(findings_of(settings_as(database, role)))
    assert list(problems) == [("row_security", "public.t")]
    assert f'alter role "{role}" bypassrls' in problems["row_security", "public.t"]
    database.execute(f"alter role {role} bypassrls")
    assert problems_in(findings_of(settings_as(database, role))) == {}


def test_a_table_that_may_not_be_read_is_named_alone(database: Database, role: str) -> None:
    """B14."""
    for n in range(3):
        database.execute(f"create table t{n} (id int primary key); grant select on t{n} to {role}")
    database.execute(f"alter role {role} replication; create publication pub for all tables")
    database.execute(f"revoke select on t1 from {role}; grant select (id) on t2 to {role}")
    assert problems_in(findings_of(settings_as(database, role))) == {
        ("privilege", "public.t1"): "error: This role may not read table public.t1, so it cannot "
        "be "
        f'copied. grant select on "public"."t1" to "{role}"'
    }


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            "id int",
            "no primary key: .*UPDATE and DELETE on it fail.*add primary key",
        ),
        (
            "id int primary key deferrable",
            'a deferrable primary key.*alter table "public"."t" replica identity full',
        ),
        (
            "id int primary key); alter table t replica identity nothing; select (1",
            "replica identity NOTHING.*replica identity default",
        ),
    ],
)
def test_a_table_without_a_key_is_refused_before_its_updates_fail(
    database: Database, table: str, sentence: str
) -> None:
    """D10."""
    database.execute(f"create table t ({table}); create publication pub for table t")
    problems = problems_in(findings_of(database.settings()))
    assert list(problems) == [("replica_identity", "public.t")]
    assert re.search(sentence, problems["replica_identity", "public.t"])
    database.execute("insert into t values (1)")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState):
        database.execute("update t set id = 2")


@pytest.mark.every_pg
def test_a_table_without_a_key_that_sends_whole_rows_is_a_bag(database: Database) -> None:
    """D11."""
    database.execute("create table t (id int); alter table t replica identity full")
    database.execute("create publication pub for table t")
    problems = problems_in(findings_of(database.settings()))
    assert list(problems) == [("key", "public.t")]
    sentence = problems["key", "public.t"]
    assert re.match("warning: .*bag.*add primary key.*without_key: log", sentence)
    assert problems_in(findings_of(database.settings(), keyed={("public", "t")})) == {}


def test_a_unique_index_as_identity_is_a_key(database: Database) -> None:
    """D9."""
    database.execute(
        "create table t (id int not null); create unique index i on t (id);"
        "alter table t replica identity using index i; create publication pub for table t"
    )
    assert problems_in(findings_of(database.settings())) == {}
    database.execute("drop index i")
    assert (
        "index that is gone"
        in problems_in(findings_of(database.settings()))["replica_identity", "public.t"]
    )


def test_a_table_without_a_key_is_fine_when_only_inserts_are_sent(database: Database) -> None:
    """D10: nothing of the application fails then; the merge still needs a key."""
    database.execute(
        "create table t (id int); create publication pub for table t with (publish = 'insert')"
    )
    assert list(problems_in(findings_of(database.settings()))) == [
        ("publish", None),
        ("key", "public.t"),
    ]


def test_a_column_list_without_the_identity_is_refused(database: Database) -> None:
    database.execute(
        "create table t (id int primary key, a text); create publication pub for table t (a)"
    )
    problem = problems_in(findings_of(database.settings()))["column_list", "public.t"]
    assert "leaves out id of its replica identity" in problem


@pytest.mark.every_pg
def test_a_row_filter_outside_the_identity_is_refused_before_updates_fail(
    database: Database,
) -> None:
    """D10, D13."""
    database.execute(
        """
        create table t (id int primary key, kind text, "Size" int, v text);
        insert into t values (1, 'a', 1, 'v');
        create publication pub for table t where (kind <> 'x' and id > 0 and "Size" is not null)
        """
    )
    problem = problems_in(findings_of(database.settings()))["row_filter", "public.t"]
    assert "uses Size, kind, which the replica identity of public.t does not have" in problem
    with pytest.raises(psycopg2.Error, match="replica identity"):
        database.execute("update t set v = 'w'")
    database.execute("alter table t replica identity full")
    assert not problems_in(findings_of(database.settings()))
    database.execute("update t set v = 'w'")


@pytest.mark.every_pg
def test_a_row_filter_is_held_against_the_identity_of_each_partition(database: Database) -> None:
    """D10, D13: ALTER TABLE of the root does not reach them."""
    database.execute(
        """
        create table t (id int primary key, kind text) partition by range (id);
        create table t1 partition of t for values from (0) to (10);
        create table t2 partition of t default;
        alter table t1 replica identity full; alter table t replica identity full;
        insert into t values (1, 'a'), (20, 'a');
        create publication pub for table t where (kind <> 'x')
            with (publish_via_partition_root = true)
        """
    )
    problem = problems_in(findings_of(database.settings()))["row_filter", "public.t"]
    assert "uses kind, which the replica identity of public.t2 does not have" in problem
    database.execute("update t set kind = 'b' where id = 1")
    with pytest.raises(psycopg2.Error, match="replica identity"):
        database.execute("update t set kind = 'b' where id = 20")
    database.execute("alter table t2 replica identity full; alter table t replica identity default")
    assert not problems_in(findings_of(database.settings()))
    database.execute("update t set kind = 'b'")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("create view x as select 1", "is a view"),
        ("create materialized view x as select 1", "is a materialized view"),
        ("create unlogged table x (id int primary key)", "is unlogged"),
        ("create sequence x", "is a sequence"),
        ("create table x (id int primary key)", 'add it with: alter publication "pub" add table'),
        ("select 1", "does not exist"),
        (
            "create table x (id int primary key) partition by range (id);"
            "create table x1 partition of x default; alter publication pub add table x",
            "publish_via_partition_root = true",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_reason(
    database: Database, made: str, reason: str
) -> None:
    """C14."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    database.execute(made)
    findings = findings_of(database.settings(), [("public", "t"), ("public", "x")])
    problems = problems_in(findings)
    assert list(problems) == [("table", "public.x")]
    assert reason in problems["table", "public.x"]
