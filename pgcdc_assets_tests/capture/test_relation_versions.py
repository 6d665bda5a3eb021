"""The relation version of a row, also in a backlog that is read late (F6)."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.proxy import TcpProxy

pytestmark = pytest.mark.postgres


def _attnums_by_row(capturing: Capturing) -> list[dict[str, int | None]]:
    """Return the attnums of each captured row's columns, in stream order."""
    versions = {
        (v.relation.relation_id, v.version): {c.name: c.attnum for c in v.relation.columns}
        for v in capturing.zone.relations.versions(1)
    }
    return [versions[row["relation_id"], row["relation_version"]] for row in capturing.rows()]


def test_a_column_dropped_and_added_again_is_another_column_from_there_on(
    capturing: Capturing,
) -> None:
    """F4."""
    capturing.begin("create table t (id int primary key, a int, b int)")
    database = capturing.database
    database.execute("insert into t values (1, 10, 20)")
    capturing.capture()
    database.execute("insert into t values (2, 10, 20)")
    database.execute("alter table t drop column b")
    database.execute("alter table t add column b int")
    database.execute("insert into t values (3, 10, 30)")
    capturing.capture()
    before, after = {"id": 1, "a": 2, "b": 3}, {"id": 1, "a": 2, "b": 4}
    assert _attnums_by_row(capturing) == [before, before, after]


def test_two_columns_that_swap_their_names_keep_their_numbers(capturing: Capturing) -> None:
    capturing.begin("create table t (id int primary key, a int, b int)")
    database = capturing.database
    database.execute("insert into t values (1, 10, 20)")
    capturing.capture()
    database.execute("insert into t values (2, 10, 20)")
    database.transaction(
        "alter table t rename a to c",
        "alter table t rename b to a",
        "alter table t rename c to b",
    )
    database.execute("insert into t values (3, 10, 20)")
    capturing.capture()
    before, after = {"id": 1, "a": 2, "b": 3}, {"id": 1, "b": 2, "a": 3}
    assert _attnums_by_row(capturing) == [before, before, after]


def test_a_schema_that_recurs_within_a_backlog_is_identified_by_its_transactions(
    capturing: Capturing,
) -> None:
    """F6: a column is renamed, another one gets its name, and the first is dropped, all unread."""
    capturing.begin("create table t (id int primary key, b int)")
    database = capturing.database
    database.execute("insert into t values (1, 20)")
    capturing.capture()
    database.execute("insert into t values (2, 20)")
    database.execute("alter table t rename b to old")
    database.execute("alter table t add column b int")
    database.execute("alter table t drop column old")
    database.execute("insert into t values (3, 30)")
    report = capturing.capture()
    before, after = {"id": 1, "b": 2}, {"id": 1, "b": 3}
    assert _attnums_by_row(capturing) == [before, before, after]
    assert not report.warnings


def test_rows_that_a_transaction_writes_on_both_sides_of_its_own_ddl_are_warned_of(
    capturing: Capturing,
) -> None:
    capturing.begin("create table t (id int primary key, b int)")
    database = capturing.database
    database.execute("insert into t values (1, 20)")
    capturing.capture()
    database.transaction(
        "insert into t values (2, 20)",
        "alter table t drop column b",
        "alter table t add column b int",
        "insert into t values (3, 30)",
    )
    report = capturing.capture()
    assert any("is not certain" in warning for warning in report.warnings), report.warnings


def test_a_table_that_is_announced_hundreds_of_times_is_looked_up_over_one_connection(
    capturing: Capturing, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pgcdc_assets.raw.relations import RelationRegistry

    tables = 3
    capturing.begin(*(f"create table t{i} (id int primary key)" for i in range(tables)))
    with capturing.database.connect() as connection, connection.cursor() as cursor:
        for number in range(100):
            for i in range(tables):
                cursor.execute(f"truncate t{i}; insert into t{i} values ({number})")
    scans = []
    read = RelationRegistry._read

    def recorded(registry: RelationRegistry) -> Any:
        scans.append(1)
        return read(registry)

    monkeypatch.setattr(RelationRegistry, "_read", recorded)
    report = capturing.through(proxy.conninfo(capturing.conninfo)).capture()
    assert report.row_count == 200 * tables
    # Connections of the lease, the stream and the catalog.
    assert proxy.connection_count <= 4
    # The resolver reads the versions, the first look at the catalog, and the flush.
    assert len(scans) <= 3
