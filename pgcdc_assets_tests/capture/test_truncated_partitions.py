"""TRUNCATE of partitions that are published as their root: Postgres sends nothing (E4)."""

from __future__ import annotations

import pytest

from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

# Partitions with and without a TOAST table.
_COLUMNS = {"toasted": "id int primary key, v text", "narrow": "id int primary key, v int"}


@pytest.fixture(params=_COLUMNS)
def rooted(request: pytest.FixtureRequest, capturing: Capturing) -> Capturing:
    """Return a capture of a partitioned table with rows, whose catalog was polled."""
    capturing.begin(
        f"create table root ({_COLUMNS[request.param]}) partition by range (id)",
        "create table low partition of root for values from (0) to (10)",
        "create table mid partition of root for values from (10) to (30) partition by range (id)",
        "create table inner_low partition of mid for values from (10) to (20)",
        "create table inner_high partition of mid for values from (20) to (30)",
        "insert into root values (1), (2), (11), (21)",
    )
    capturing.database.execute("alter publication pub set (publish_via_partition_root = true)")
    poll(capturing)
    return capturing


def test_a_truncated_partition_needs_a_snapshot(rooted: Capturing) -> None:
    execute = rooted.database.execute
    execute("truncate low")
    (event,) = poll(rooted)
    assert shown([event]) == ["root partition_truncated!"]
    assert "public.low." in event.detail
    assert poll(rooted) == []
    execute("truncate mid")
    (event,) = poll(rooted)
    assert "public.inner_high, public.inner_low." in event.detail
    execute("truncate low; insert into root values (3)")
    execute("truncate root")
    assert poll(rooted) == []


def test_a_partition_that_was_loaded_again_needs_a_snapshot(rooted: Capturing) -> None:
    """A load ends with ANALYZE, which counts the rows. Only the TOAST table has a trace then."""
    has_toast = rooted.database.value("select reltoastrelid <> 0 from pg_class where relname='low'")
    rooted.database.transaction("truncate low", "insert into root values (3)")
    rooted.database.execute("analyze low")
    assert shown(poll(rooted)) == ["root partition_truncated!"] * has_toast


def test_a_partition_that_a_transaction_truncates_beside_other_changes_needs_a_snapshot(
    rooted: Capturing,
) -> None:
    """A constraint writes the rows of all partitions in the catalog, and keeps their files."""
    rooted.database.transaction("alter table root add check (id >= 0)", "truncate low")
    assert shown(poll(rooted)) == ["root partition_truncated!"]


def test_a_partition_that_is_altered_after_truncate_of_the_root_needs_no_snapshot(
    rooted: Capturing,
) -> None:
    """The TOAST table has the trace of TRUNCATE still."""
    has_toast = rooted.database.value("select reltoastrelid <> 0 from pg_class where relname='low'")
    rooted.database.execute("truncate root")
    rooted.database.execute("grant select on low to public; alter table low add check (id < 10)")
    assert shown(poll(rooted)) == [] if has_toast else ["root partition_truncated!"]


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_truncate_beside_a_rewrite_for_a_column_that_is_not_sent_needs_a_comparison(
    rooted: Capturing, is_first: bool
) -> None:
    """The column gives all partitions another file, and another TOAST table if they have one."""
    has_toast = rooted.database.value("select reltoastrelid <> 0 from pg_class where relname='low'")
    statements = ["truncate low", "alter table root add g int generated always as (id * 2) stored"]
    for statement in statements if is_first else reversed(statements):
        rooted.database.execute(statement)
    if has_toast:
        assert shown(poll(rooted)) == ["root values_uncertain"]
    elif not is_first:
        assert shown(poll(rooted)) == ["root partition_truncated!"]


def test_other_files_of_partitions_need_no_snapshot(rooted: Capturing) -> None:
    """The stream has TRUNCATE of the root; the others change no row."""
    execute = rooted.database.execute
    rooted.database.transaction("truncate root", "insert into root values (1), (21)")
    execute("analyze low")
    assert poll(rooted) == []
    rooted.database.transaction("delete from root", "truncate root", "truncate low")
    assert poll(rooted) == []
    for table in ("low", "inner_low", "inner_high"):
        execute(f"vacuum full {table}")
        execute(f"cluster {table} using {table}_pkey")
    assert poll(rooted) == []
    execute("truncate root")
    execute("create table new partition of root for values from (30) to (40)")
    assert shown(poll(rooted)) == ["root partition_attached"]


@pytest.mark.every_pg(since=15)
def test_a_partition_in_another_tablespace_needs_no_snapshot(rooted: Capturing) -> None:
    execute = rooted.database.execute
    space = f"space_{rooted.database.name}"
    with rooted.database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("set allow_in_place_tablespaces = on")
        cursor.execute(f"create tablespace {space} location ''")
    try:
        execute(f"alter table low set tablespace {space}")
        assert poll(rooted) == []
    finally:
        execute("alter table low set tablespace pg_default")
        execute(f"drop tablespace {space}")
