"""Tables that are read in parallel, in ranges of pages, in one snapshot."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.errors import TableChanged
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.encoded import encoded_database
from pgcdc_assets_tests.support.snapshot_copies import (
    PAGE_BYTES,
    act_before_range,
    await_no_sessions,
    copy_all,
    is_everything_copied,
    snapshot_files,
    snapshot_rows,
)

pytestmark = pytest.mark.postgres


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.parametrize("parallelism", [1, 3])
def test_each_row_of_a_table_in_ranges_is_read_once(
    database: Database, zone: RawZone, parallelism: int
) -> None:
    """C7: a bloated table with empty pages, an empty table, and a table of one page."""
    database.execute(
        """
        create table bloated (id int primary key, note text);
        create table empty (id int primary key, note text);
        create table single (id int primary key, note text);
        create publication pub for all tables;
        insert into bloated select i, repeat(md5(i::text), 20) from generate_series(1, 3000) i;
        delete from bloated where id % 3 = 0 or id between 500 and 900;
        update bloated set note = note || '!' where id % 7 = 0;
        insert into single values (1, null)
        """
    )
    outcomes = list(copy_all(database, zone, parallelism))
    assert {o.table: o.row_count for o in outcomes if isinstance(o, SnapshotReport)} == {
        "bloated": database.value("select count(*) from bloated"),
        "empty": 0,
        "single": 1,
    }
    for table in ("bloated", "empty", "single"):
        assert is_everything_copied(database, zone, table)
    files = snapshot_files(zone)
    assert sum(file.partition["table"] == "bloated" for file in files) > 10
    assert len(zone.snapshots.complete_snapshots()) == 3
    await_no_sessions(database)


def test_the_figures_of_a_snapshot_are_the_sums_of_its_ranges(
    database: Database, zone: RawZone
) -> None:
    """G6: each row has a value that is not UTF-8."""
    with encoded_database(database, "SQL_ASCII") as other:
        other.execute(
            "create table t (id int primary key, note text); create publication pub for table t;"
            "insert into t select i, '\\xff'::bytea::text || repeat('x', 700)"
            " from generate_series(1, 100) i"
        )
        [divided] = copy_all(other, zone, range_bytes=PAGE_BYTES)
        [whole] = copy_all(other, zone, range_bytes=1 << 30)
    assert isinstance(divided, SnapshotReport) and isinstance(whole, SnapshotReport)
    assert (divided.ranges > 5, whole.ranges) == (True, 1)
    assert divided.rescued_count == whole.rescued_count == 100
    assert divided.bytes == pytest.approx(whole.bytes, rel=0.1)


@pytest.mark.sampled
@pytest.mark.every_pg
def test_ranges_of_a_partitioned_table_cover_every_partition(
    database: Database, zone: RawZone
) -> None:
    """C7, E1: partitions of different sizes, of which one is empty."""
    database.execute(
        """
        create table p (id int primary key, note text) partition by range (id);
        create table p1 partition of p for values from (0) to (100);
        create table p2 partition of p for values from (100) to (5000);
        create table p3 partition of p for values from (5000) to (6000);
        create publication pub for table p with (publish_via_partition_root = true);
        insert into p select i, repeat(md5(i::text), 20) from generate_series(1, 2000) i
        """
    )
    [report] = copy_all(database, zone)
    assert isinstance(report, SnapshotReport)
    assert report.row_count == 2000
    assert is_everything_copied(database, zone, "p")


@pytest.mark.parametrize(
    "change",
    [
        "alter table p attach partition p9 for values from (6000) to (7000)",
        "alter table p detach partition p1",
    ],
)
def test_a_partition_attached_or_detached_between_two_ranges_is_detected(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """E3, E5: only some ranges would have the rows of the partition."""
    database.execute(
        """
        create table p (id int primary key, note text) partition by range (id);
        create table p1 partition of p for values from (0) to (1000);
        create table p2 partition of p for values from (1000) to (6000);
        create table p9 (id int primary key, note text);
        create publication pub for table p with (publish_via_partition_root = true);
        insert into p select i, repeat(md5(i::text), 20) from generate_series(1, 2000) i;
        insert into p9 select i, repeat(md5(i::text), 20) from generate_series(6000, 6900) i
        """
    )
    act_before_range(monkeypatch, lambda: database.execute(change))
    [failure] = copy_all(database, zone, parallelism=1)
    assert isinstance(failure, SnapshotFailure)
    assert isinstance(failure.error, TableChanged)
    assert zone.snapshots.complete_snapshots() == []


def test_ranges_and_row_filter_apply_together(database: Database, zone: RawZone) -> None:
    """D13: a filter with OR has a lower precedence than the range."""
    database.execute(
        """
        create table t (id int primary key, note text);
        insert into t select i, repeat('x', 700) from generate_series(1, 1000) i;
        create publication pub for table t where (id < 10 or id > 990)
        """
    )
    [report] = copy_all(database, zone)
    assert isinstance(report, SnapshotReport)
    assert report.row_count == 19


def test_a_role_with_privileges_on_columns_reads_a_large_table(
    database: Database, zone: RawZone
) -> None:
    """B14: a role with privileges on columns may not read ctid."""
    role = f"role_{database.name}"
    database.execute(f"create role {role} login replication")
    try:
        database.execute(
            f"""
            create table t (id int primary key, note text, secret text);
            insert into t select i, repeat('x', 700) from generate_series(1, 1000) i;
            grant select (id, note) on t to {role};
            create publication pub for table t (id, note)
            """
        )
        [report] = copy_all(database, zone, role=role)
        assert isinstance(report, SnapshotReport), report
        assert report.row_count == 1000
        assert is_everything_copied(database, zone, "t")
    finally:
        database.execute(f"drop owned by {role}; drop role {role}")


def test_rows_written_during_a_snapshot_are_not_in_it(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: rows are deleted, moved to other pages and added between two ranges."""
    database.execute(
        """
        create table t (id int primary key, note text);
        insert into t select i, repeat('x', 700) from generate_series(1, 1000) i;
        create publication pub for table t
        """
    )
    before = database.query("select array[id::text, note] from t order by id")
    reads = act_before_range(
        monkeypatch,
        lambda: database.execute(
            "delete from t where id % 5 = 0; update t set note = repeat('y', 900);"
            "insert into t select i, 'new' from generate_series(1001, 2000) i"
        ),
    )
    [report] = copy_all(database, zone)
    assert isinstance(report, SnapshotReport)
    assert len(reads) > 10
    found = sorted(snapshot_rows(zone, "t"), key=lambda row: int(row[0] or 0))
    assert found == [list(row[0]) for row in before]


def test_a_row_larger_than_each_buffer_is_read(database: Database, zone: RawZone) -> None:
    """D16: 20 MB in one value, between two small rows."""
    database.execute(
        "create table t (id int primary key, note text); create publication pub for table t;"
        "alter table t alter note set storage external;"
        "insert into t values (1, 'a'), (2, repeat('0123456789', 2000000)), (3, 'b')"
    )
    [report] = copy_all(database, zone)
    assert isinstance(report, SnapshotReport)
    assert {row[0]: len(row[1] or "") for row in snapshot_rows(zone, "t")} == {
        "1": 1,
        "2": 20_000_000,
        "3": 1,
    }
