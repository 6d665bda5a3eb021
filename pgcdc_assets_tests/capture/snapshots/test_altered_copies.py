"""A table that is dropped, renamed or emptied while its ranges are copied, beside another table."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table
from pgcdc_assets.errors import TableChanged
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.postgres.copy.reader import SnapshotReader
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.handover import copied_rows
from pgcdc_assets_tests.support.resumed_copies import PAGE, slot_of
from pgcdc_assets_tests.support.snapshot_copies import act_before_range

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

T, U = TableName("public", "t"), TableName("public", "u")
_TABLES = """
create table t (id int primary key, note text);
create table u (id int primary key, note text);
insert into t select i, repeat(md5(i::text), 20) from generate_series(1, 900) i;
insert into u select i, repeat(md5(i::text), 20) from generate_series(1, 900) i;
create publication pub for table t, u
"""
_AGAIN = (
    "create table t (id int primary key, n int, note text); insert into t values (1, 2, 'again');"
    "alter publication pub add table t"
)
_CHANGES = {
    "dropped and created again": f"drop table t; {_AGAIN}",
    "renamed": "alter table t rename to moved",
    "moved": "create schema s; alter table t set schema s",
    "renamed, and its name is another table's": f"alter table t rename to moved; {_AGAIN}",
    "truncated": "truncate t",
    "truncated and filled": "truncate t; insert into t values (5, 'new'), (6, 'new')",
}


def _copy(database: Database, zone: RawZone) -> dict[str, SnapshotReport | SnapshotFailure]:
    outcomes = snapshot_each_table(
        database.settings(), zone, slot_of(database), "pub", [T, U],
        policy=SnapshotPolicy(1, 8 * PAGE),
    )  # fmt: skip
    return {outcome.table: outcome for outcome in outcomes}


def _source(database: Database, oid: int) -> list[list[str | None]]:
    name = database.value(f"select {oid}::oid::regclass::text")
    rows = database.query(f"select * from {name}")
    return sorted(([str(value) for value in row] for row in rows), key=repr)


@pytest.mark.sampled
@pytest.mark.parametrize("first", ["first copy", "later copy"])
@pytest.mark.parametrize("name", _CHANGES)
def test_a_table_that_changes_between_two_ranges_is_copied_as_it_is_afterwards(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch, name: str, first: str
) -> None:
    """C3, C13, F8: at once, or with the next attempt after an error of the table alone."""
    database.execute(_TABLES)
    if first == "later copy":
        assert all(isinstance(each, SnapshotReport) for each in _copy(database, zone).values())

    def change() -> None:
        for statement in _CHANGES[name].split(";"):
            database.execute(statement)

    with monkeypatch.context() as patched:
        reads = act_before_range(patched, change)
        outcomes = _copy(database, zone)
        assert len(reads) > 3
    assert isinstance(outcomes["u"], SnapshotReport), outcomes
    if isinstance(outcomes["t"], SnapshotFailure):
        if first == "first copy" and "another" not in name and "again" not in name:
            # No snapshot says which OID the declared table has.
            database.execute("alter table if exists moved rename to t")
            database.execute("alter table if exists s.t set schema public")
        outcomes = _copy(database, zone)
    report = outcomes["t"]
    assert isinstance(report, SnapshotReport), outcomes
    oid = next(
        s.relation_id
        for s in zone.snapshots.complete_snapshots()
        if s.table == "t" and s.snapshot_lsn == report.snapshot_lsn
    )
    names = "'public.t'), to_regclass('moved'), to_regclass('s.t'"
    declared = database.value(f"select coalesce(to_regclass({names}))::oid::bigint")
    assert oid == declared
    newest = max(s.snapshot_lsn for s in zone.snapshots.complete_snapshots() if s.table == "t")
    rows = sorted(copied_rows(zone, "t", newest), key=repr)
    assert rows == _source(database, declared)
    assert zone.ranges.all() == []


def test_a_table_that_changes_during_each_copy_fails_after_three_and_delays_no_other_table(
    database: Database,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    database.execute(_TABLES)
    original = SnapshotReader.read

    def read(reader: SnapshotReader, table: PublishedTable, *arguments: Any) -> Any:
        if table.declared_name == T:
            database.execute("truncate t; insert into t values (1, 'again')")
        return original(reader, table, *arguments)

    monkeypatch.setattr(SnapshotReader, "read", read)
    outcomes = _copy(database, zone)
    failure = outcomes["t"]
    assert isinstance(failure, SnapshotFailure)
    assert isinstance(failure.error, TableChanged)
    assert caplog.text.count("Retrying with a new snapshot") == 2
    assert isinstance(outcomes["u"], SnapshotReport)
    assert {s.table for s in zone.snapshots.complete_snapshots()} == {"u"}
    assert zone.ranges.all() == []
