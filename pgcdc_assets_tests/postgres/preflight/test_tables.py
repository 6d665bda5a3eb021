"""Pre-flight check of publication and tables (B9, B10, B13, B14, C14).

A finding names the problem and the remedy.
"""

from __future__ import annotations

import pytest
from psycopg2 import sql

from pgcdc_assets.postgres.catalog.publication import explain_unpublished
from pgcdc_assets.postgres.catalog.relations import published_relations
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.preflight import findings_of, problems_in, settings_as

pytestmark = pytest.mark.postgres


@pytest.mark.every_pg
def test_a_missing_publication_is_an_error_before_the_slot_is_created(database: Database) -> None:
    """B9."""
    problem = problems_in(findings_of(database.settings()))["publication", None]
    assert f"Publication pub does not exist in database {database.name}" in problem
    assert 'create publication "pub" for table' in problem


@pytest.mark.parametrize("may_be_empty", [False, True])
@pytest.mark.parametrize("options", ["", "for all tables"])
def test_an_empty_publication_is_an_error_unless_it_is_followed(
    database: Database, options: str, may_be_empty: bool
) -> None:
    """The remedy is a statement that Postgres accepts."""
    database.execute(f"create publication pub {options}")
    findings = findings_of(database.settings(), may_be_empty=may_be_empty)
    [found] = [finding for finding in findings if "has no tables" in finding.message]
    assert found.severity == ("warning" if may_be_empty else "error")
    database.execute("create schema a; create table a.t (id int primary key)")
    name = "a.u (id int primary key)" if options else "a.t"
    assert found.remedy is not None
    database.execute(found.remedy.replace("SCHEMA.TABLE (...)", name).replace("SCHEMA.TABLE", name))
    assert "publication" not in {code for code, _ in problems_in(findings_of(database.settings()))}


@pytest.mark.every_pg
def test_a_publication_of_inserts_only_is_a_warning(database: Database) -> None:
    """B10."""
    database.execute(
        "create table t (id int primary key);"
        "create publication pub for table t with (publish = 'insert')"
    )
    assert problems_in(findings_of(database.settings())) == {
        ("publish", None): "warning: Publication pub does not send update and delete and truncate: "
        'these changes never arrive. alter publication "pub" set (publish = \'insert, update, '
        "delete, "
        "truncate')"
    }


@pytest.mark.every_pg
def test_row_level_security_is_an_error(database: Database, role: str) -> None:
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


@pytest.mark.every_pg
def test_only_the_unreadable_table_is_an_error(database: Database, role: str) -> None:
    """B14."""
    for n in range(3):
        database.execute(f"create table t{n} (id int primary key); grant select on t{n} to {role}")
    database.execute(f"alter role {role} replication; create publication pub for all tables")
    database.execute(f"revoke select on t1 from {role}; grant select (id) on t2 to {role}")
    assert problems_in(findings_of(settings_as(database, role))) == {
        ("privilege", "public.t1"): "error: This role has no SELECT on table public.t1, so the "
        f'table cannot be copied. grant select on "public"."t1" to "{role}"'
    }


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("create view x as select 1", "is a view"),
        ("create materialized view x as select 1", "is a materialized view"),
        ("create unlogged table x (id int primary key)", "is unlogged"),
        ("create sequence x", "is a sequence"),
        (
            "create table x (id int primary key)",
            'add the table with: alter publication "pub" add table',
        ),
        ("select 1", "does not exist"),
        (
            "create table x (id int primary key) partition by range (id);"
            "create table x1 partition of x default; alter publication pub add table x",
            "publish_via_partition_root = true",
        ),
    ],
)
def test_a_table_that_cannot_be_captured_is_an_error_with_the_reason(
    database: Database, made: str, reason: str
) -> None:
    """C14."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    database.execute(made)
    findings = findings_of(database.settings(), [("public", "t"), ("public", "x")])
    problems = problems_in(findings)
    problems.pop(("undeclared", None), None)
    assert list(problems) == [("table", "public.x")]
    assert reason in problems["table", "public.x"]


def test_the_statement_that_adds_a_table_has_its_names_in_quotes(database: Database) -> None:
    publication, schema, table = 'p"ub %s', "a.b", 'x"y\n'
    names = {name: sql.Identifier(name) for name in (publication, schema, table)}
    for text, used in (
        ("create publication {}", (publication,)),
        ("create schema {}", (schema,)),
        ("create table {}.{} (id int primary key)", (schema, table)),
    ):
        database.execute(sql.SQL(text).format(*(names[name] for name in used)))
    with query_connection(database.settings(), "test") as conn:
        reason = explain_unpublished(conn, publication, schema, table)
        database.execute(reason.partition("add the table with: ")[2])
        (published,) = published_relations(conn, publication)
    assert published.name == (schema, table)


def test_the_check_names_published_tables_that_are_not_declared(database: Database) -> None:
    for name in ("a", "b", "c"):
        database.execute(f"create table {name} (id int primary key)")
    database.execute("create publication pub for all tables")
    problems = problems_in(findings_of(database.settings(), [("public", "a")]))
    assert list(problems) == [("undeclared", None)]
    assert "2 tables that are not declared: public.b, public.c." in problems["undeclared", None]
    assert problems_in(findings_of(database.settings())) == {}


def test_a_missing_usage_privilege_is_one_error_with_one_grant(
    database: Database, role: str
) -> None:
    database.execute(f"create schema s; alter role {role} replication")
    for n in range(3):
        database.execute(f"create table s.t{n} (id int primary key)")
        database.execute(f"grant select on s.t{n} to {role}")
    database.execute("create publication pub for all tables")
    findings = findings_of(settings_as(database, role))
    assert problems_in(findings) == {
        ("privilege", None): "error: This role has no USAGE on schema s, so its 3 tables cannot be "
        f'copied. grant usage on schema "s" to "{role}"'
    }
    assert not any("is ready" in finding.message for finding in findings)


def test_a_declared_key_with_a_missing_column_is_an_error(database: Database) -> None:
    database.execute("create table t (id int primary key, v text)")
    database.execute("create publication pub for table t")
    findings = findings_of(database.settings(), keys={("public", "t"): ("nope", "v")})
    assert problems_in(findings)["key", "public.t"] == (
        "error: The declared key of table public.t names nope, but the table's published columns "
        "are id, v. Correct `key` of this table in the capture's settings."
    )


def test_a_declared_key_that_may_be_null_is_an_error(database: Database) -> None:
    """NOT NULL of a domain counts too; an index as replica identity has no NULLs."""
    database.execute("create domain code as text not null")
    database.execute("create table t (id int, c code, v text)")
    database.execute("create table u (id int primary key)")
    database.execute("alter table t replica identity full; create publication pub for all tables")
    keys = {("public", "t"): ("id", "c"), ("public", "u"): ("id",)}
    problems = problems_in(findings_of(database.settings(), keys=keys))
    assert problems["key", "public.t"] == (
        "error: The declared key of table public.t has columns that may be NULL: id. A merge "
        'refuses rows with a NULL in the key. alter table "public"."t" alter column "id" set not '
        "null"
    )
    assert ("key", "public.u") not in problems
    database.execute("alter table t alter column id set not null")
    assert ("key", "public.t") not in problems_in(findings_of(database.settings(), keys=keys))


@pytest.mark.every_pg
def test_the_check_names_a_generated_column_that_is_not_published(database: Database) -> None:
    database.execute(
        "create table t (id int primary key, twice int generated always as (id * 2) stored)"
    )
    database.execute("create publication pub for table t")
    problem = problems_in(findings_of(database.settings()))["generated", "public.t"]
    assert (
        "generated column twice is not published, so the lake does not contain this column"
        in problem
    )
    if database.value("select current_setting('server_version_num')::int") < 180000:
        assert "Postgres 18" in problem
        return
    database.execute(problem.rpartition("does not contain this column. ")[2])
    assert problems_in(findings_of(database.settings())) == {}
    database.execute("drop publication pub; create publication pub for table t (id)")
    assert problems_in(findings_of(database.settings())) == {}


@pytest.mark.every_pg
def test_partitions_whose_changes_are_not_sent_are_a_warning(database: Database) -> None:
    database.execute(
        """
        create table t (id int) partition by list (id);
        create table a partition of t for values in (1);
        create unlogged table b partition of t for values in (2);
        create foreign data wrapper nothing;
        create server nowhere foreign data wrapper nothing;
        create foreign table c partition of t for values in (3) server nowhere;
        create table plain (id int primary key);
        create publication pub for table t, plain with (publish_via_partition_root = true);
        alter table a replica identity full;
        insert into t values (1), (2)
        """
    )
    problems = problems_in(findings_of(database.settings()))
    assert ("replica_identity", "public.t") not in problems
    database.execute("update t set id = 1 where id = 1; update t set id = 2 where id = 2")
    assert "(public.b, public.c)" in problems["unsent_partition", "public.t"]
    assert "set logged" in problems["unsent_partition", "public.t"]
    database.execute("alter table b set logged; alter table t detach partition c")
    codes = {code for code, _ in problems_in(findings_of(database.settings()))}
    assert "unsent_partition" not in codes


@pytest.mark.every_pg
def test_unpublished_tables_that_inherit_are_a_warning(database: Database) -> None:
    """E7: a query of the parent returns their rows, and neither copy nor stream has them."""
    database.execute(
        """
        create table t (id int primary key); create table a () inherits (t);
        create table b () inherits (a); insert into b values (1);
        create publication pub for table only t
        """
    )
    problems = problems_in(findings_of(database.settings()))
    assert "(public.a, public.b)" in problems["unsent_child", "public.t"]
    database.execute("alter publication pub add table a, b")
    codes = {code for code, _ in problems_in(findings_of(database.settings()))}
    assert "unsent_child" not in codes
