"""A table that is dropped, renamed or emptied while rows of it are read by a predicate."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.snapshots.partial import PartialSnapshot
from pgcdc_assets.capture.snapshots.pool import SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.resumed_copies import T, slot_of
from pgcdc_assets_tests.support.snapshot_copies import act_before_range

pytestmark = pytest.mark.postgres

_TABLE = """
create table t (id int primary key, v text);
insert into t select i, 'row ' || i from generate_series(1, 100) i;
create publication pub for table t
"""
_AGAIN = (
    "create table t (id int primary key, v text); insert into t values (1, 'again');"
    "alter publication pub add table t"
)
# The sentence of the refusal, or the rows that are landed, by the change of the table.
_CHANGES: dict[str, tuple[str, str | list[list[str | None]]]] = {
    "dropped": ("drop table t", "does not exist"),
    "dropped and created again": (f"drop table t; {_AGAIN}", "waits for a snapshot of all rows"),
    "another table has the name": (
        f"alter table t rename to moved; {_AGAIN}", "waits for a snapshot of all rows",
    ),
    "renamed": ("alter table t rename to moved", "no row with the new definition is captured"),
    "truncated": ("truncate t", []),
    "truncated and filled": (
        "truncate t; insert into t values (2, 'new'), (99, 'other')", [["2", "new"]],
    ),
    "rewritten": ("vacuum full t", [["1", "row 1"], ["2", "row 2"], ["3", "row 3"]]),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", _CHANGES)
def test_rows_of_a_table_that_changes_before_they_are_read_are_exact_or_refused(
    database: Database, zone: RawZone, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """C12, C13, F8: a table without its rows in an older snapshot never looks empty."""
    database.execute(_TABLE)
    snapshot_tables(database.settings(), zone, slot_of(database), "pub")
    statements, expected = _CHANGES[name]

    def change() -> None:
        for statement in statements.split(";"):
            database.execute(statement)

    reads = act_before_range(monkeypatch, change, number=1)
    request = PartialSnapshot(
        database.settings(), zone, slot_of(database), "pub", T, "id between 1 and 3"
    )
    landed = []
    try:
        report = request.take()
    except PgcdcError as error:
        assert isinstance(expected, str), error
        assert expected in str(error)
        assert "public.t" in str(error)
        assert "between" not in str(error)
        assert len(reads) == 1
    else:
        assert isinstance(report, SnapshotReport)
        assert len(reads) == 2, "a snapshot before the change was read"
        table = zone.partial_snapshots.table.load()
        assert table is not None
        landed = sorted(table.to_pyarrow_table()["new"].to_pylist())
        assert landed == expected
        assert report.row_count == len(landed)
    assert len(zone.partial_snapshots.complete_snapshots()) == bool(landed)
