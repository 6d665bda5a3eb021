"""A table that is dropped, renamed or emptied between a killed snapshot and its continuation."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.handover import copied_rows
from pgcdc_assets_tests.support.resumed_copies import TABLE, copy_t

pytestmark = pytest.mark.postgres

# Another table, with the same definition, keys and pages, and with other values.
_AGAIN = (
    "create table t (id int primary key, n int, note text, pad text);"
    "alter table t alter note set storage external, alter pad set storage plain;"
    "insert into t select i, 1, repeat(md5('again ' || i), 80), repeat('q', 700)"
    " from generate_series(1, 400) i;"
    "alter publication pub add table t"
)
_CHANGES = {
    "dropped and created again": "drop table t; " + _AGAIN,
    "another table has the name": "alter table t rename to moved; " + _AGAIN,
    "truncated": "truncate t",
    "truncated and filled": "truncate t; insert into t values (5, 5, 'new', 'new')",
    "renamed": "alter table t rename to moved",
    "renamed and renamed back": "alter table t rename to moved; alter table moved rename to t",
    "moved": "create schema s; alter table t set schema s",
}


@pytest.mark.sampled
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", _CHANGES)
def test_a_continued_snapshot_has_the_rows_of_the_table_as_it_is_now(
    database: Database, zone: RawZone, name: str, is_first: bool
) -> None:
    """C3, C13, F8: the ranges that were read before the change are not used."""
    database.execute(TABLE.format(rows=400))
    if not is_first:
        assert isinstance(copy_t(database, zone), SnapshotReport)
    assert copy_t(database, zone, interrupt_after=4) is None
    assert len(zone.ranges.all()) >= 4
    for statement in _CHANGES[name].split(";"):
        database.execute(statement)
    outcome = copy_t(database, zone)
    if isinstance(outcome, SnapshotFailure):
        # No snapshot says which table has the declared name, unless the table keeps the name.
        assert is_first
        assert "public.t" in str(outcome.error)
        database.execute("alter table if exists moved rename to t")
        database.execute("alter table if exists s.t set schema public")
        outcome = copy_t(database, zone)
    assert isinstance(outcome, SnapshotReport), outcome
    source = database.value(
        "select coalesce(to_regclass('t'), to_regclass('moved'), to_regclass('s.t'))::text"
    )
    rows = copied_rows(zone, "t", outcome.snapshot_lsn)
    expected = database.query(f"select id::text, n::text, note, pad from {source}")
    assert sorted(map(tuple, rows)) == sorted(expected)
    assert len(rows) == outcome.row_count
    assert outcome.ranges_continued == 0
    assert zone.ranges.all() == []
