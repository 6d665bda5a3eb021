"""SCD1 and every kind of change: the table equals the source."""

from __future__ import annotations

import pytest

from pgcdc_assets_tests.support.merge.pipeline import KEY_SWAP, Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.sampled
def test_a_row_inserted_and_deleted_in_one_batch_leaves_no_row(pipeline: Pipeline) -> None:
    """D1: insert, update and delete, in one transaction and in several transactions of a batch."""
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (9, 'old')")
    pipeline.database.transaction(
        "insert into t values (1, 'a')",
        "update t set v = 'b' where id = 1",
        "delete from t where id = 1",
    )
    for statement in (
        "insert into t values (2, 'a')",
        "update t set v = 'b' where id = 2",
        "delete from t where id = 2",
    ):
        pipeline.database.execute(statement)
    report = pipeline.sync()["t"]
    assert pipeline.rows() == [(9, "old")]
    assert (report.changes_read, report.rows_inserted, report.rows_deleted) == (6, 1, 0)


@pytest.mark.sampled
def test_delete_then_insert_of_a_key_leaves_the_new_row(pipeline: Pipeline) -> None:
    """D2: the two changes are in one transaction, or in two transactions of a batch."""
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t values (1, 'old'), (2, 'old')",
    )
    pipeline.database.transaction("delete from t where id = 1", "insert into t values (1, 'new')")
    pipeline.database.execute("delete from t where id = 2")
    pipeline.database.execute("insert into t values (2, 'new')")
    pipeline.sync()
    assert pipeline.rows() == [(1, "new"), (2, "new")]


@pytest.mark.sampled
def test_a_key_updated_a_thousand_times_in_one_batch_is_one_row(pipeline: Pipeline) -> None:
    """D3: MERGE has one source row per key."""
    pipeline.start("create table t (id int primary key, v int)", "insert into t values (1, 0)")
    pipeline.database.execute(
        "do $$ begin for i in 1..1000 loop update t set v = i where id = 1; end loop; end $$"
    )
    report = pipeline.sync()["t"]
    assert pipeline.rows() == [(1, 1000)]
    assert (report.changes_read, report.rows_updated) == (1000, 1)


@pytest.mark.sampled
def test_changed_keys_move_their_rows(pipeline: Pipeline) -> None:
    """D4: keys change to free keys, in chains, in swaps over a third key, and are reused."""
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t values (1, 'one'), (2, 'two'), (3, 'three'), (4, 'four')",
    )
    pipeline.database.transaction(*KEY_SWAP)
    pipeline.database.execute("update t set id = 30 where id = 3")
    pipeline.database.execute("update t set id = 300, v = 'moved' where id = 30")
    pipeline.database.execute("insert into t values (3, 'reused')")
    pipeline.database.transaction(
        "update t set id = 40 where id = 4", "delete from t where id = 40"
    )
    pipeline.sync()
    assert pipeline.rows() == [(1, "two"), (2, "one"), (3, "reused"), (300, "moved")]
    pipeline.assert_equal()


def test_two_rows_swap_their_keys_with_a_deferred_constraint(pipeline: Pipeline) -> None:
    """D4: both rows have one key temporarily; Postgres requires REPLICA IDENTITY FULL."""
    pipeline.start(
        "create table t (id int primary key deferrable initially deferred, v text)",
        "alter table t replica identity full",
        "insert into t values (1, 'one'), (2, 'two'), (5, 'five'), (6, 'six')",
    )
    pipeline.database.transaction(
        "update t set id = 3 - id where id in (1, 2)",
        # The key of a row passes the key of another, unchanged row.
        "update t set id = 6 where id = 5",
        "update t set id = 7 where v = 'five'",
    )
    pipeline.sync()
    assert pipeline.rows() == [(1, "two"), (2, "one"), (6, "six"), (7, "five")]


@pytest.mark.sampled
def test_replica_identity_may_be_an_index_or_full_or_change(pipeline: Pipeline) -> None:
    """D9: old keys are read from the columns of the identity, in the table's order."""
    pipeline.tables = ("t", "u")
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t values (1, 'a'), (2, 'b'), (3, 'c')",
        "create table u (v text, b int not null, a text not null)",
        "create unique index u_key on u (a, b)",
        "alter table u replica identity using index u_key",
        "insert into u values ('x', 1, 'p'), ('y', 2, 'p'), ('z', 1, 'q')",
    )
    pipeline.database.execute("update t set v = 'default' where id = 1")
    pipeline.database.execute("alter table t replica identity full")
    pipeline.database.execute("update t set id = 20, v = 'full' where id = 2")
    pipeline.database.execute("delete from t where id = 1")
    pipeline.database.execute("alter table t replica identity default")
    pipeline.database.execute("update t set id = 30 where id = 3")
    pipeline.database.execute("update u set b = 7 where a = 'p' and b = 1")
    pipeline.database.execute("delete from u where a = 'q'")
    pipeline.sync()
    assert pipeline.rows() == [(20, "full"), (30, "c")]
    assert pipeline.rows("u", "a, b, v") == [("p", 2, "y"), ("p", 7, "x")]


@pytest.mark.sampled
def test_a_delete_with_only_the_key_deletes_a_row_with_not_null_columns(
    pipeline: Pipeline,
) -> None:
    """D15."""
    pipeline.start(
        "create table t (v text not null, n numeric(5,2) not null, id int primary key)",
        "insert into t values ('a', 1, 1), ('b', 2, 2)",
    )
    pipeline.database.execute("delete from t where id = 1")
    report = pipeline.sync()["t"]
    assert pipeline.rows() == [(2, "b")]
    assert report.rows_deleted == 1


@pytest.mark.sampled
def test_a_truncate_empties_the_table_at_its_position_in_the_stream(pipeline: Pipeline) -> None:
    """D14: TRUNCATE of one table and of three tables, with CASCADE, and before an insert."""
    pipeline.tables = ("t", "a", "b", "parent", "child")
    made = "create table {} (id int primary key, v text)"
    pipeline.start(
        *(made.format(table) for table in ("t", "a", "b", "parent")),
        "create table child (id int primary key, v text, parent int references parent)",
        *(f"insert into {table} values (1, 'old'), (2, 'old')" for table in ("t", "a", "b")),
        "insert into parent values (1, 'old')",
        "insert into child values (1, 'old', 1)",
    )
    pipeline.sync()
    pipeline.database.transaction(
        "insert into t values (3, 'gone')", "truncate t", "insert into t values (1, 'new')"
    )
    pipeline.database.execute("update t set v = 'newer' where id = 1")
    pipeline.database.execute("truncate a, b")
    pipeline.database.execute("insert into b values (2, 'new')")
    pipeline.database.execute("truncate parent cascade")
    reports = pipeline.sync()
    assert pipeline.rows() == [(1, "newer")]
    assert pipeline.rows("a") == []
    assert pipeline.rows("b") == [(2, "new")]
    assert pipeline.rows("parent") == pipeline.rows("child") == []
    assert (reports["t"].rows_inserted, reports["t"].rows_deleted) == (1, 2)
    assert (reports["a"].rows_deleted, reports["a"].row_count) == (2, 0)
