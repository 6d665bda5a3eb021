"""The publication of a table is read in the snapshot of the table."""

from __future__ import annotations

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres

_JOINING = {
    "a table is added": (
        "create publication pub for table t",
        "alter publication pub add table u",
    ),
    "its schema is added": (
        "create publication pub for table t",
        "alter publication pub add tables in schema public",
    ),
    "a row filter is dropped": (
        "create publication pub for table t, u where (id < 2)",
        "alter publication pub set table t, u",
    ),
    "a column list is widened": (
        "create publication pub for table t, u (id)",
        "alter publication pub set table t, u",
    ),
    "inserts are published": (
        "create publication pub for table t, u with (publish = 'delete')",
        "alter publication pub set (publish = 'insert, update, delete, truncate')",
    ),
    "the publication is made again": (
        "create publication pub for table t, u",
        "drop publication pub; create publication pub for table t, u",
    ),
    "the table is attached": (
        "create table root (id int, n int) partition by range (id);"
        "create publication pub for table t, root",
        "alter table root attach partition u for values from (0) to (100)",
    ),
}

# The same query detects the other cases.
_SHORT = ("a table is added", "a row filter is dropped", "the table is attached")


@pytest.mark.parametrize(
    "how",
    [
        how if how in _SHORT else pytest.param(how, marks=pytest.mark.soak, id=how)
        for how in _JOINING
    ],
)
def test_a_table_that_joins_while_the_snapshot_starts_loses_no_row(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """C9: the table gets a separate snapshot, and the other tables use the slot's snapshot."""
    published, joining = _JOINING[how]
    database.execute("create table t (id int primary key); insert into t values (1)")
    database.execute("create table u (id int primary key, n int); insert into u values (1, 1)")
    database.execute(published)
    slot = f"s_{database.name}"

    def join(name: str) -> None:
        if name == "after_slot_creation":
            # This is after the slot's snapshot, and before the stream publishes the table.
            database.execute("insert into u values (2, 2)")
            database.execute(joining)
            database.execute("insert into u values (3, 3)")

    monkeypatch.setattr(failpoints, "reach", join)
    copies = {
        report.table: report for report in snapshot_tables(database.settings(), zone, slot, "pub")
    }
    epoch = zone.epochs.latest()
    assert epoch is not None
    assert copies["u"].snapshot_lsn > epoch.start_lsn
    if "table is" in how:
        assert copies["t"].snapshot_lsn == epoch.start_lsn
    stored = zone.snapshots.table.load()
    assert stored is not None
    rows = stored.to_pyarrow_table(filters=[("table", "=", "u")], columns=["new"])
    assert sorted(rows.column("new").to_pylist()) == [["1", "1"], ["2", "2"], ["3", "3"]]


def test_a_change_of_the_publication_of_another_table_needs_no_second_snapshot(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("create table t (id int primary key); create table u (id int primary key)")
    database.execute("create publication pub for table t")

    def join(name: str) -> None:
        if name == "after_slot_creation":
            database.execute("alter publication pub add table u; analyze t")

    monkeypatch.setattr(failpoints, "reach", join)
    [report] = snapshot_tables(
        database.settings(), zone, f"s_{database.name}", "pub", [TableName("public", "t")]
    )
    epoch = zone.epochs.latest()
    assert epoch is not None
    assert report.snapshot_lsn == epoch.start_lsn


def test_a_later_snapshot_of_only_an_unpublished_table_fails(
    database: Database, zone: RawZone
) -> None:
    """No slot is created for the table, so the server holds no snapshot."""
    database.execute("create table t (id int primary key); create table u (id int primary key)")
    database.execute("create publication pub for table t")
    slot = f"s_{database.name}"
    snapshot_tables(database.settings(), zone, slot, "pub")
    with pytest.raises(ConfigurationError, match=r"public\.u is not in publication pub"):
        snapshot_tables(database.settings(), zone, slot, "pub", [TableName("public", "u")])
