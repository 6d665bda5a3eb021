"""Partitioned and inherited tables: snapshot and stream have each row once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.handover import copied_rows

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

Rows = list[list[str | None]]

# Leaf `p2` has another order of columns, and `child` has a further column.
_PARTITIONED = """
create table p (id int, region int, v text, primary key (id, region)) partition by list (region);
create table p1 partition of p for values in (1);
create table p2 (v text, region int not null, id int not null, primary key (id, region));
alter table p attach partition p2 for values in (2);
insert into p values (1, 1, 'a'), (2, 2, 'b'), (4, 1, 'd')
"""
_INHERITED = """
create table parent (id int primary key, v text);
create table child (extra int, primary key (id)) inherits (parent);
insert into parent values (1, 'a'), (2, 'b');
insert into child values (1, 'a', 10), (3, 'c', 30)
"""

# Options of the publication, and its tables with the columns of their keys.
_PUBLICATIONS: dict[str, tuple[str, dict[str, Sequence[int]]]] = {
    "root": ("for table p with (publish_via_partition_root = true)", {"p": (0, 1)}),
    "root and leaf": (
        "for table p, p1 with (publish_via_partition_root = true)", {"p": (0, 1)},
    ),
    "leaves": ("for table p, p1", {"p1": (0, 1), "p2": (2, 1), "p3": (0, 1)}),
}  # fmt: skip


def _start(capturing: Capturing, tables: str, publication: str) -> dict[str, Rows]:
    """Create tables and publication, take the first snapshot, and return its rows by table."""
    capturing.database.execute(tables)
    capturing.database.execute(f"create publication pub {publication}")
    reports = snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")
    return {r.table: copied_rows(capturing.zone, r.table, r.snapshot_lsn) for r in reports}


def replayed(
    capturing: Capturing, rows: Rows, table: str, key: Sequence[int], since: int = 0
) -> Rows:
    """Fold the landed changes of a table into its snapshot, and check that each row exists."""

    def identity(row: Sequence[str | None]) -> tuple[str | None, ...]:
        return tuple(row[index] for index in key)

    state = {identity(row): row for row in rows}
    assert len(state) == len(rows)
    for change in capturing.rows():
        if change["table"] != table or change["commit_lsn"] < since:
            continue
        if change["op"] == "T":
            state.clear()
        if change["op"] in "UD":
            del state[identity(change["old"] or change["new"])]
        if change["new"] is not None:
            assert identity(change["new"]) not in state
            state[identity(change["new"])] = change["new"]
    return sorted(state.values(), key=repr)


def _source(capturing: Capturing, table: str) -> Rows:
    rows = capturing.database.query(f"select * from only {table}" if table != "p" else "table p")
    texts = [[None if value is None else str(value) for value in row] for row in rows]
    return sorted(texts, key=repr)


@pytest.mark.sampled
@pytest.mark.parametrize("name", _PUBLICATIONS)
def test_rows_of_partitions_have_the_published_name_and_occur_once(
    capturing: Capturing, name: str
) -> None:
    """E1, E2, E6, C7: a leaf is created later, and rows move to other leaves."""
    publication, published = _PUBLICATIONS[name]
    copied = _start(capturing, _PARTITIONED, publication)
    assert set(copied) == set(published) - {"p3"}
    execute = capturing.database.execute
    execute("create table p3 partition of p for values in (3)")
    execute("insert into p values (3, 3, 'c'), (5, 1, 'e'), (6, 2, 'f')")
    execute("update p set region = 2 where id = 1")
    execute("update p set region = 3, v = 'moved' where id = 2")
    execute("update p set v = v || '!' where id in (1, 3)")
    capturing.database.transaction(
        "delete from p where id = 4", "update p set region = 1 where id = 6"
    )

    capturing.capture()

    landed = {row["table"] for row in capturing.rows() if row["op"] != "M"}
    assert landed == set(published)
    for table, key in published.items():
        found = replayed(capturing, copied.get(table, []), table, key)
        assert found == _source(capturing, table), table
    moved = [row["op"] for row in capturing.rows() if "moved" in (row["new"] or [])]
    assert moved == ["I"], "a row that moves to another leaf is a delete and an insert"


def test_an_old_row_that_has_the_key_only_is_not_whole(capturing: Capturing) -> None:
    """D9: the root has FULL and p1 has not. Postgres marks all old rows by the root's identity."""
    execute = capturing.database.execute
    capturing.begin(
        "create table p (id int primary key, v text, w text) partition by range (id);"
        "create table p1 partition of p for values from (0) to (100);"
        "create table p2 partition of p default;"
        "alter table p replica identity full; alter table p2 replica identity full;"
        "insert into p values (1, 'a'), (2, 'b'), (101, 'a'), (103, null);"
        "insert into p values (102, null, 'b')"
    )
    execute("alter publication pub set (publish_via_partition_root = true)")
    execute("delete from p where id in (1, 101, 103)")
    execute("update p set id = id + 3 where id in (2, 102)")
    capturing.capture()
    assert [(row["op"], row["old_kind"], row["old"]) for row in capturing.rows()] == [
        ("D", "K", ["1", None, None]),
        ("D", "O", ["101", "a", None]),
        # A whole row without other values is no more than its key.
        ("D", "K", ["103", None, None]),
        ("U", "K", ["2", None, None]),
        ("U", "O", ["102", None, "b"]),
    ]


def test_rows_of_a_child_table_are_not_in_its_parent(
    capturing: Capturing,
) -> None:
    """E7, C7: the publication of a parent publishes the children with all of their columns."""
    copied = _start(capturing, _INHERITED, "for table parent")
    assert copied["child"] == [["1", "a", "10"], ["3", "c", "30"]]
    execute = capturing.database.execute
    execute("insert into parent values (5, 'e'); insert into child values (5, 'ee', 50)")
    execute("update parent set v = v || '!' where id in (1, 3)")
    execute("delete from parent where id in (2, 5)")
    execute("insert into child values (6, 'f', null)")

    capturing.capture()

    for table in ("parent", "child"):
        found = replayed(capturing, copied[table], table, (0,))
        assert found == _source(capturing, table)
    assert [row[-1] for row in _source(capturing, "child")] == ["10", "30", None]
    execute("truncate parent")
    capturing.capture()
    truncated = [row["table"] for row in capturing.rows() if row["op"] == "T"]
    assert sorted(truncated) == ["child", "parent"]
