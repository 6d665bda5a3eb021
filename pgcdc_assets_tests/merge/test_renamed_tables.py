"""A merge follows a declared table by its OID, under each name of its changes (F8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.errors import SchemaChangeError
from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


def lake_rows(pipeline: Pipeline, table: str, scd: int, columns: str) -> list[tuple[Any, ...]]:
    """Return the rows of SCD1, or the current rows of SCD2, in order."""
    frame = pipeline.frame(table, scd)
    if scd == 2:
        frame = frame.where("_is_current")
    return sorted(tuple(row) for row in frame.selectExpr(*columns.split(", ")).collect())


def assert_equal(
    pipeline: Pipeline,
    table: str,
    source: str,
    columns: str = "id, v",
    scds: tuple[int, ...] = (1, 2),
) -> None:
    """Compare a table of the lake with the source under its current name."""
    wanted = sorted(pipeline.database.query(f"select {columns} from {source}"))
    for scd in (1, 2):
        assert lake_rows(pipeline, table, scd, columns) == wanted, f"scd{scd} of {table}"


def merged(pipeline: Pipeline, *targets: CdcTable) -> list[MergeReport]:
    reports = list(pipeline.merge(None, *targets).values())
    for report in reports:
        assert isinstance(report, MergeReport), report.error
    return reports  # type: ignore[return-value]


def versions(pipeline: Pipeline, table: str, condition: str = "true") -> list[Any]:
    """Return versions of a history in order."""
    frame = pipeline.frame(table, 2)
    return list(frame.where(condition).orderBy("id", "_valid_from_lsn", "_ordinal").collect())


def begin(pipeline: Pipeline, tables: list[str], *statements: str) -> None:
    """Create and publish tables, take their snapshots, and capture a first window."""
    for statement in ("create schema other", *statements):
        pipeline.database.execute(statement)
    pipeline.database.execute(
        "create publication pub for all tables with (publish_via_partition_root)"
    )
    pipeline.copy(*tables)
    pipeline.capture()


@pytest.mark.sampled
def test_changes_under_other_names_are_merged_into_the_declared_table(pipeline: Pipeline) -> None:
    """One backlog has renames, a move and rows of each name. Then the old name returns.

    At the end the asset gets the new name, and its history continues in the moved folder.
    """
    targets = [CdcTable("public", table, scd=(1, 2)) for table in ("t", "p")]
    begin(
        pipeline,
        ["t", "p"],
        "create table t (id int primary key, v text, big text)",
        "alter table t alter big set storage external",
        "insert into t select i, 'a', repeat('x', 9000) from generate_series(1, 20) i",
        "create table p (id int, v text, primary key (id)) partition by range (id)",
        "create table p1 partition of p for values from (0) to (10)",
        "create table p2 partition of p for values from (10) to (100)",
        "insert into p select i, 'a' from generate_series(1, 20) i",
    )
    merged(pipeline, *targets)
    database = pipeline.database
    database.execute("insert into t values (21, 'before', 'y')")
    database.execute("alter table t rename to u; alter table p rename to q")
    database.execute("insert into u values (22, 'renamed', 'y'); insert into q values (22, 'b')")
    database.execute("update u set v = 'updated' where id = 1; update q set v = 'c' where id = 2")
    database.execute("alter table u set schema other; alter table q set schema other")
    database.execute("delete from other.u where id = 2; update other.q set id = 50 where id = 3")
    database.transaction(
        "update other.u set v = 'two names' where id = 3",
        "alter table other.u rename to v",
        "update other.v set v = v || '!' where id = 3",
        "insert into other.v values (23, 'last', 'z')",
    )
    pipeline.capture()
    reports = {report.table: report for report in merged(pipeline, *targets)}
    assert reports["t"].changes_read == 7
    assert str(reports["t"].source_name) == "other.v"
    assert_equal(pipeline, "t", "other.v", "id, v, big")
    assert_equal(pipeline, "p", "other.q")
    assert len(versions(pipeline, "t", "id = 1")) == 2
    changed = [row.v for row in versions(pipeline, "t", "id = 3")]
    assert changed == ["a", "two names", "two names!"]

    database.execute("alter table other.v set schema public; alter table v rename to t")
    database.execute("alter table t add column w text default 'd'")
    database.execute("insert into t values (24, 'back', 'z', 'w')")
    database.execute("alter table t rename to u; truncate u; insert into u values (1, 'end')")
    pipeline.capture()
    merged(pipeline, *targets)
    assert_equal(pipeline, "t", "u", "id, v, big, w")
    assert len(versions(pipeline, "t", "id = 24")) == 1
    assert pipeline.compare("t").is_equal
    live = lake_rows(pipeline, "t", 1, "*")
    history = [tuple(row) for row in versions(pipeline, "t")]
    for scd in (1, 2):
        rebuild_table(pipeline.spark, pipeline.zone, targets[0], scd)
    assert lake_rows(pipeline, "t", 1, "*") == live
    assert [tuple(row) for row in versions(pipeline, "t")] == history

    lake, name = pipeline.zone.lake, pipeline.zone.name
    old, new = (Path(table_path(lake, name, "public", table, 2)) for table in ("t", "u"))
    old.rename(new)
    database.execute("insert into u values (2, 'old declaration')")
    pipeline.copy("u")
    database.execute("insert into u values (3, 'new declaration')")
    pipeline.capture()
    merged(pipeline, CdcTable("public", "u", scd=(2,)))
    assert lake_rows(pipeline, "u", 2, "id, v, big, w") == sorted(
        database.query("select id, v, big, w from u")
    )
    known = [tuple(row)[:5] for row in versions(pipeline, "u", "v not like '%declaration'")]
    assert known == [row[:5] for row in history]


@pytest.mark.sampled
def test_exchanged_names_stop_both_tables_until_a_new_snapshot(pipeline: Pipeline) -> None:
    """No row is merged into the wrong table, before or after the exchange of names."""
    targets = [CdcTable("public", "a", scd=(1, 2)), CdcTable("public", "b")]
    database = pipeline.database
    begin(
        pipeline,
        ["a", "b"],
        "create table a (id int primary key, v text)",
        "create table b (id int primary key, v text)",
        "insert into a values (1, 'a'); insert into b values (1, 'b')",
    )
    merged(pipeline, *targets)
    database.execute("insert into a values (2, 'a'); insert into b values (2, 'b')")
    database.execute(SWAP)
    database.execute("insert into b values (3, 'was a')")
    pipeline.capture()
    reports = pipeline.merge(None, *targets)
    assert "took the name public.b, which another table had" in str(error_of(reports["a"]))
    assert "Another table has the name public.b now" in waits_of(reports["b"])
    assert lake_rows(pipeline, "a", 1, "id, v") == [(1, "a"), (2, "a")]
    assert lake_rows(pipeline, "a", 2, "id, v") == [(1, "a"), (2, "a")]
    assert lake_rows(pipeline, "b", 1, "id, v") == [(1, "b"), (2, "b")]

    database.execute("insert into a values (4, 'was b')")
    pipeline.copy("a", "b")
    database.execute("update a set v = 'now a' where id = 4; delete from b where id = 1")
    pipeline.capture()
    merged(pipeline, *targets)
    assert_equal(pipeline, "a", "a")
    assert lake_rows(pipeline, "b", 1, "id, v") == sorted(database.query("select id, v from b"))
    assert not [row for row in versions(pipeline, "a") if row.v == "was a"]

    # The names are exchanged back, and the earlier relation versions are used again, which the
    # capture records as a change.
    database.execute(SWAP)
    database.execute("insert into a values (5, 'a'); insert into b values (5, 'b')")
    pipeline.capture()
    reports = pipeline.merge(None, *targets)
    for name in "ab":
        assert f"Another table has the name public.{name} now" in waits_of(reports[name])
    pipeline.copy("a", "b")
    # The relation of b gets a free name, and then a new table gets the name b.
    database.execute("alter table b rename to b_old; insert into b_old values (6, 'followed')")
    database.execute("create table b (id int primary key, v text); insert into b values (7, 'new')")
    database.execute("insert into b_old values (8, 'not followed')")
    pipeline.capture()
    reports = pipeline.merge(None, *targets)
    assert "Another table has the name public.b now" in waits_of(reports["b"])
    assert_equal(pipeline, "a", "a")
    assert (6, "followed") in lake_rows(pipeline, "b", 1, "id, v")
    assert not {7, 8} & {row[0] for row in lake_rows(pipeline, "b", 1, "id, v")}
    pipeline.copy("b")
    pipeline.capture()
    merged(pipeline, *targets)
    assert lake_rows(pipeline, "b", 1, "id, v") == [(7, "new")]


SWAP = "alter table a rename to c; alter table b rename to a; alter table c rename to b"


def error_of(report: MergeReport | MergeFailure) -> SchemaChangeError:
    """Return the error of a table whose merge detected the exchange."""
    assert isinstance(report, MergeFailure)
    assert isinstance(report.error, SchemaChangeError)
    return report.error


def waits_of(report: MergeReport | MergeFailure) -> str:
    """Return the reason to wait of a table, if the capture recorded an event of the exchange."""
    assert isinstance(report, MergeReport), report.error
    return report.waits_for
