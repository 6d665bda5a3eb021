"""Generated columns: copy and stream have the same columns."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table, snapshot_tables
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.handover import copied_rows
from pgcdc_assets_tests.support.preflight import findings_of, problems_in

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize("option", ["", " with (publish_generated_columns = stored)"])
@pytest.mark.every_pg(since=18)
def test_a_virtual_column_is_in_neither_copy_nor_stream(capturing: Capturing, option: str) -> None:
    """F12: a stored column is in both if the publication has it, and the ordinary columns stay."""
    capturing.database.execute(
        "create table t (id int primary key, twice int generated always as (a * 2) virtual,"
        " a int, thrice int generated always as (a * 3) stored, v text);"
        "insert into t (id, a, v) values (1, 5, 'copied'), (2, null, 'null');"
        f"create publication pub for table t{option}"
    )
    [report] = snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")
    copied = sorted(copied_rows(capturing.zone, "t", report.snapshot_lsn))
    execute = capturing.database.execute
    execute("insert into t (id, a, v) values (3, 7, 'streamed'); update t set a = 8 where id = 1")
    execute("update t set a = 9 where id = 2")
    capturing.capture()
    columns = "id::text, a::text, thrice::text, v" if option else "id::text, a::text, v"
    first: list[list[str | None]] = [["1", "5", "15", "copied"], ["2", None, None, "null"]]
    if not option:
        first = [[row[0], row[1], row[3]] for row in first]
    assert copied == first
    rows: list[tuple[str, ...]] = capturing.database.query(f"select {columns} from t order by 1")
    source = [list(row) for row in rows]
    assert sorted(capturing.texts("t"), key=lambda row: str(row[0])) == source
    assert shown(poll(capturing)) == []
    execute("alter table t drop twice; update t set a = 10 where id = 3")
    capturing.capture()
    assert capturing.texts("t")[-1] == [*(["3", "10", "30"] if option else ["3", "10"]), "streamed"]


@pytest.mark.every_pg(since=18)
def test_a_generated_column_that_is_no_longer_sent_is_not_taken_for_a_dropped_one(
    capturing: Capturing,
) -> None:
    """The option is turned off, and a column of the same type dropped, within one backlog."""
    execute = capturing.database.execute
    execute(
        "create table t (id int primary key, twice int generated always as (id * 2) stored, x int);"
        "create publication pub for table t with (publish_generated_columns = stored)"
    )
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")
    execute("insert into t values (1, default, 3)")
    capturing.capture()
    execute("alter table t drop x")
    execute("insert into t values (2)")
    execute("alter publication pub set (publish_generated_columns = none)")
    capturing.capture()
    assert capturing.texts("t")[-1] == ["2", "4"]
    places = [
        column.attnum
        for version in capturing.zone.relations.versions(1)
        for column in version.relation.columns
        if column.name == "twice"
    ]
    assert 3 not in places


@pytest.mark.every_pg(since=18)
def test_another_expression_of_a_partition_needs_a_snapshot(capturing: Capturing) -> None:
    """F3, F12: ALTER TABLE rewrites the partition, and writes no row of the published table."""
    execute = capturing.database.execute
    execute(
        "create table t (id int primary key, g int generated always as (id * 2) stored)"
        " partition by range (id); create table p partition of t for values from (0) to (10);"
        "create table q partition of t for values from (10) to (20);"
        "insert into t values (1), (11);"
        "create publication pub for table t"
        " with (publish_via_partition_root, publish_generated_columns = stored)"
    )
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")
    execute("vacuum full p")
    assert shown(poll(capturing)) == []
    execute("alter table p alter g set expression as (id * 3)")
    assert shown(poll(capturing)) == ["t table_rewritten!"]
    execute("alter table t alter g set expression as (id * 4)")
    assert shown(poll(capturing)) == ["t table_rewritten!"]
    execute("alter table t alter g type bigint")
    assert shown(poll(capturing)) == ["t type_widened g", "t values_uncertain g"]


@pytest.mark.every_pg(since=17)
def test_another_expression_below_a_row_filter_needs_a_snapshot(capturing: Capturing) -> None:
    """D13, F3: rows pass the filter, or no longer pass, without a row change.

    Postgres refuses SET EXPRESSION of a virtual column of a published table.
    """
    execute = capturing.database.execute
    execute(
        "create table t (id int, v int default 1, g int generated always as (id * 2) stored);"
        "alter table t replica identity full; insert into t values (1), (2);"
        "create publication pub for table t where (g > 3)"
    )
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")
    for statement in ("alter table t alter v set default 2", "vacuum full t", "truncate t"):
        execute(statement)
        assert shown(poll(capturing)) == []
    execute("alter table t alter g set expression as (id * 4)")
    assert shown(poll(capturing)) == ["t publication_changed!"]
    assert poll(capturing) == []


@pytest.mark.every_pg(since=17)
def test_another_expression_of_a_partition_below_a_row_filter_needs_a_snapshot(
    capturing: Capturing,
) -> None:
    """D13, F3: the publication filters by the column, and does not send it."""
    execute = capturing.database.execute
    execute(
        "create table t (id int, g int generated always as (id * 2) stored)"
        " partition by range (id); create table p partition of t for values from (0) to (10);"
        "alter table p replica identity full; insert into t values (1), (2);"
        "create publication pub for table t where (g > 3) with (publish_via_partition_root)"
    )
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")
    execute("vacuum full p")
    assert shown(poll(capturing)) == []
    execute("alter table p alter g set expression as (id * 4)")
    assert shown(poll(capturing)) == ["t table_rewritten!"]


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("key", "options"),
    [
        pytest.param(
            "low text generated always as (lower(email)) stored, primary key (tenant, low)",
            "for table t",
            id="generated column",
        ),
        pytest.param(
            "low text not null default 'x', primary key (tenant, email)",
            "for table t (tenant, low) with (publish = 'insert')",
            id="column list",
        ),
    ],
)
def test_a_table_with_an_unsent_column_in_its_key_is_refused(
    capturing: Capturing, key: str, options: str
) -> None:
    """D10, F12: rows that differ in this column only would count as one."""
    if "(tenant" in options and capturing.database.server.version < 15:
        pytest.skip("column lists are of Postgres 15")
    execute = capturing.database.execute
    execute(f"create table t (tenant int, email text not null, {key})")
    execute("create table u (id int primary key)")
    execute("insert into t values (1, 'a'), (1, 'b')")
    execute(f"create publication pub {options}; alter publication pub add table u")
    arguments = (capturing.settings, capturing.zone, capturing.slot, "pub")
    outcomes = {o.table: o for o in snapshot_each_table(*arguments)}
    assert isinstance(outcomes["u"], SnapshotReport)
    refused = outcomes["t"]
    assert isinstance(refused, SnapshotFailure)
    remedy = 'alter table "public"."t" replica identity full'
    assert remedy in str(refused.error)
    problems = problems_in(findings_of(capturing.settings))
    assert any(table == "public.t" for _, table in problems)
    execute(remedy)
    [report] = snapshot_tables(*arguments)
    assert report.row_count == 2
    [relation] = [
        version.relation
        for version in capturing.zone.relations.versions(1)
        if version.relation.table == "t"
    ]
    assert relation.row_key == ()


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("primary key (id)", "drop constraint t_pkey, add primary key (id, low)"),
        ("unique (id)", "replica identity using index later"),
    ],
)
@pytest.mark.parametrize("is_announced", [True, False])
def test_a_key_that_gains_an_unsent_column_needs_a_snapshot(
    capturing: Capturing, before: str, after: str, is_announced: bool
) -> None:
    """F9, F12: the announced flags are as before, and the rest of the key identifies no row."""
    execute = capturing.database.execute
    execute(
        "create table t (id int not null, email text,"
        f" low text generated always as (coalesce(lower(email), '')) stored not null, {before});"
        "create unique index later on t (id, low)"
    )
    if before.startswith("unique"):
        execute("alter table t replica identity using index t_id_key")
    execute("create publication pub for table t")
    arguments = (capturing.settings, capturing.zone, capturing.slot, "pub")
    snapshot_tables(*arguments)
    execute("insert into t values (1, 'a')")
    capturing.capture()
    execute(f"alter table t {after}")
    if before.startswith("unique"):
        execute("alter table t drop constraint t_id_key")
    if is_announced:
        execute("insert into t values (1, 'b')")
    capturing.capture()
    assert "t key_changed!" in shown(capturing.zone.schema_events.read())
    count = len(capturing.zone.schema_events.read())
    execute("comment on table t is 'looked at again'")
    capturing.capture()
    assert len(capturing.zone.schema_events.read()) == count
    [refused] = snapshot_each_table(*arguments, [TableName("public", "t")])
    assert isinstance(refused, SnapshotFailure)
    assert "low in its replica identity" in str(refused.error)
