"""Histories and soft deletes heal: of tables that lose their key, get it back, or get another one,
and of tables that are dropped and created again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.merge import rebuild_table
from pgcdc_assets.merge.kinds.base import TableKind
from pgcdc_assets.orchestration.state import read_gates
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.relations.schema_events import SchemaChange
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify import check_all
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

HISTORY = CdcTable("public", "a", (1, 2))
KEPT = CdcTable("public", "b", soft_deletes=True)
OTHER = CdcTable("public", "c")

# With a row before the loss of the key, and a row after the loss.
LOSE_KEY = (
    "update {0} set v = 'before' where id = 1",
    "alter table {0} drop constraint {0}_pkey",
    "insert into {0} values (11, 'without a key')",
)


def with_kinds(orchestrated: Orchestrated, *tables: CdcTable) -> Orchestrated:
    """Declare a history, soft deletes and a further table, with equal rows in `a` and `b`."""
    orchestrated.database.execute(
        "create table c (id int primary key); alter publication pub add table c; "
        "alter table b drop n, add v text; insert into b select * from a"
    )
    declared = tables or (HISTORY, KEPT, OTHER)
    return replace(orchestrated, capture=replace(orchestrated.capture, tables=declared))


def in_both(orchestrated: Orchestrated, *statements: str) -> None:
    """Run statements for `a` and for `b`, each in a transaction."""
    for table in ("a", "b"):
        for statement in statements:
            orchestrated.database.execute(statement.format(table))


def stored(
    orchestrated: Orchestrated, spark: SparkSession, target: CdcTable, scd: int
) -> list[tuple[str, ...]]:
    """Return all rows of a table with their system columns."""
    path = table_path(orchestrated.lake, NAME, "public", target.table, scd)
    rows = spark.read.format("delta").load(path)
    return sorted(tuple(map(str, row)) for row in rows.select(*sorted(rows.columns)).collect())


def selected(
    orchestrated: Orchestrated, spark: SparkSession, target: CdcTable, scd: int, *columns: str
) -> list[tuple[Any, ...]]:
    path = table_path(orchestrated.lake, NAME, "public", target.table, scd)
    rows = spark.read.format("delta").load(path).selectExpr(*columns).collect()
    return sorted((tuple(row) for row in rows), key=repr)


def newest_snapshot_lsn(orchestrated: Orchestrated, table: str) -> int:
    snapshots = orchestrated.zone.snapshots.complete_snapshots()
    return max(int(s.snapshot_lsn) for s in snapshots if s.table == table)


def assert_healed(orchestrated: Orchestrated, spark: SparkSession) -> None:
    """Compare with the source and with a rebuild from raw, and check that a sync does nothing."""
    for table in ("a", "b", "c"):
        assert orchestrated.equals_source(table), table
    names = [
        name
        for (name,) in orchestrated.database.query(
            "select attname from pg_attribute where attrelid = 'a'::regclass and attnum > 0 "
            "and not attisdropped order by attnum"
        )
    ]
    source = sorted(orchestrated.database.query(f"select {', '.join(names)} from a"), key=repr)
    path = table_path(orchestrated.lake, NAME, "public", "a", 2)
    current = spark.read.format("delta").load(path).where("_is_current").select(*names).collect()
    assert sorted(map(tuple, current), key=repr) == source
    assert read_gates(orchestrated.zone, orchestrated.capture) == {}
    snapshots = len(orchestrated.zone.snapshots.complete_snapshots())
    assert orchestrated.sync().merge_count == 0
    assert len(orchestrated.zone.snapshots.complete_snapshots()) == snapshots
    for target, scd in ((orchestrated.capture.tables[0], 2), (orchestrated.capture.tables[1], 1)):
        findings = check_all(spark, orchestrated.zone, target, scd)
        assert findings.is_sound, (target.table, findings)
        before = stored(orchestrated, spark, target, scd)
        rebuild_table(spark, orchestrated.zone, target, scd)
        assert stored(orchestrated, spark, target, scd) == before, target.table


@pytest.mark.soak
@pytest.mark.parametrize("key", [None, ("id",)], ids=["key of the source", "configured key"])
def test_a_lost_key_that_is_added_again_heals_by_one_snapshot(
    orchestrated: Orchestrated, spark: SparkSession, key: tuple[str, ...] | None
) -> None:
    tables = replace(HISTORY, key=key), replace(KEPT, key=key), OTHER
    orchestrated = with_kinds(orchestrated, *tables)
    database = orchestrated.database
    orchestrated.sync()
    in_both(orchestrated, *LOSE_KEY)
    versions = "id, v, _is_current, _op".split(", ")
    for number in (1, 2):
        database.execute(f"insert into c values ({number})")
        with pytest.raises(PgcdcError, match=r"public\.a has .*ADD PRIMARY KEY") as raised:
            orchestrated.sync()
        assert "public.b has " in str(raised.value)
        assert orchestrated.equals_source("c")
        # The changes from before the loss are there, and no others.
        found = selected(orchestrated, spark, tables[0], 2, *versions)
        assert len(found) == 11
        assert (1, "before", True, "U") in found
        assert (1, "before") in selected(orchestrated, spark, tables[1], 1, "id", "v")
    waiting = len(orchestrated.zone.snapshots.complete_snapshots())
    if key is None:
        source = sorted(database.query("select id, v from a"), key=repr)
        assert selected(orchestrated, spark, tables[0], 1, "id", "v") == source
        rebuild_table(spark, orchestrated.zone, tables[0], 2)
        assert selected(orchestrated, spark, tables[0], 2, *versions) == found
    in_both(
        orchestrated,
        "alter table {0} replica identity full",
        "update {0} set v = 'changed' where id = 2",
        "delete from {0} where id = 3",
        "alter table {0} add primary key (id), replica identity default",
        "update {0} set v = 'after' where id = 4",
    )
    orchestrated.sync()
    assert len(orchestrated.zone.snapshots.complete_snapshots()) <= waiting + 2
    lsn = newest_snapshot_lsn(orchestrated, "a")
    columns = "id", "v", "_op", f"_valid_from_lsn = {lsn}", f"_valid_to_lsn = {lsn}"
    found = selected(orchestrated, spark, tables[0], 2, *columns)
    assert [row for row in found if row[0] in (1, 2, 3, 4, 5, 11)] == [
        (1, "before", "U", False, None),
        (1, "row 1", "S", False, False),
        (11, "without a key", "S", True, None),
        (2, "changed", "S", True, None),
        (2, "row 2", "S", False, True),
        (3, "row 3", "S", False, True),
        (4, "after", "S", True, None),
        (4, "row 4", "S", False, True),
        (5, "row 5", "S", False, None),
    ]
    kept = selected(orchestrated, spark, tables[1], 1, "id", "v", "_deleted")
    assert [row for row in kept if row[0] in (2, 3, 11)] == [
        (11, "without a key", False),
        (2, "changed", False),
        (3, "row 3", True),
    ]
    assert_healed(orchestrated, spark)


@pytest.mark.soak
def test_a_key_is_dropped_and_added_again_in_one_backlog(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """The stream announces the loss; the catalog has the key again when it is read."""
    orchestrated = with_kinds(orchestrated)
    orchestrated.sync()
    in_both(
        orchestrated,
        *LOSE_KEY,
        "alter table {0} add primary key (id)",
        "update {0} set v = 'after' where id = 2; delete from {0} where id = 3",
    )
    orchestrated.sync()
    assert_healed(orchestrated, spark)
    found = selected(orchestrated, spark, HISTORY, 2, "id", "v", "_op")
    assert (1, "before", "U") in found


@pytest.mark.soak
def test_rows_without_a_value_of_their_own_of_the_new_key_end_at_the_snapshot(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """Stored rows have NULL, the same value, or a value of their own as the new key."""
    orchestrated = with_kinds(orchestrated)
    # The further columns have names that the statements of the merge might use.
    in_both(
        orchestrated, "alter table {0} add k int, add place text, add lacks_key text, add _0 int"
    )
    in_both(orchestrated, "update {0} set k = 50 + id / 4 where id > 2")
    orchestrated.sync()
    in_both(orchestrated, "delete from {0} where id in (8, 9)")
    orchestrated.sync()
    in_both(
        orchestrated,
        "alter table {0} drop constraint {0}_pkey, replica identity full",
        "update {0} set k = id where id <> 3",
        "alter table {0} add primary key (k), replica identity default",
    )
    orchestrated.sync()
    assert_healed(orchestrated, spark)
    # Row 3 alone has its key as before, and keeps its version.
    found = selected(orchestrated, spark, HISTORY, 2, "id", "k", "_is_current", "_op")
    assert [row for row in found if row[0] in (1, 3, 4, 8)] == [
        (1, 1, True, "S"),
        (1, None, False, "S"),
        (3, 50, True, "S"),
        (4, 4, True, "S"),
        (4, 51, False, "S"),
        (8, 52, False, "S"),
    ]
    kept = selected(orchestrated, spark, KEPT, 1, "id", "k", "_deleted")
    assert [row for row in kept if not row[2]] == [
        (i, 50 if i == 3 else i, False) for i in (1, 10, 2, 3, 4, 5, 6, 7)
    ]


_NEW_TABLE = (
    "create table {0} (id int primary key, v text)",
    "alter publication pub add table {0}",
    "insert into {0} select i, 'row ' || i from generate_series(3, 5) i",
)


def assert_ended(orchestrated: Orchestrated, spark: SparkSession, ends: dict[str, int]) -> None:
    """Check that all rows of the old tables ended at an LSN, and the others began at a snapshot."""
    began = newest_snapshot_lsn(orchestrated, "a")
    columns = "id", "v", "_valid_from_lsn", "_valid_to_lsn"
    found = selected(orchestrated, spark, HISTORY, 2, *columns)
    assert [row for row in found if row[3] is None] == [
        (i, "new" if i == 3 else f"row {i}", began, None) for i in (3, 4, 5, 6)
    ]
    ended = [row for row in found if row[3] == ends["a"]]
    assert sorted(row[0] for row in ended) == list(range(1, 11))
    assert (1, "before") in [row[:2] for row in ended]
    assert len(found) == len(ended) + 4 + 1
    kept = selected(orchestrated, spark, KEPT, 1, "id", "v", "_deleted_at_lsn")
    assert {row[0] for row in kept if row[2] is None} == {3, 4, 5, 6}
    assert {row[2] for row in kept if row[0] not in (3, 4, 5, 6)} == {ends["b"]}


@contextmanager
def failing_once() -> Iterator[list[str]]:
    """Let the first merge of each table fail before the rows of a later snapshot.

    Yield the paths of the tables that failed.
    """
    real = TableKind.follow_relation
    failed: list[str] = []

    def follow(kind: TableKind, *given: Any) -> Any:
        found = real(kind, *given)
        if kind.task.path not in failed:
            failed.append(kind.task.path)
            raise TransientError(reason="The server ended.")
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TableKind, "follow_relation", follow)
        yield failed


@pytest.mark.sampled
@pytest.mark.parametrize("fails", [False, True], ids=["at once", "after a failure"])
def test_the_rows_of_a_dropped_table_end_with_the_transaction_that_created_it_again(
    orchestrated: Orchestrated, spark: SparkSession, *, fails: bool
) -> None:
    orchestrated = with_kinds(orchestrated)
    orchestrated.sync()
    in_both(orchestrated, "update {0} set v = 'before' where id = 1")
    for table in ("a", "b"):
        statements = (
            "set local synchronous_commit = on",
            f"drop table {table}",
            *(
                statement.format(table)
                for statement in (_NEW_TABLE[0], _NEW_TABLE[2], _NEW_TABLE[1])
            ),
        )
        orchestrated.database.transaction(*statements)
    in_both(
        orchestrated,
        "update {0} set v = 'new' where id = 3",
        "insert into {0} values (6, 'row 6')",
    )
    if fails:
        with failing_once() as failed, suppress(TransientError):
            orchestrated.sync()
        assert len(failed) == 2
    orchestrated.sync()
    ends = {}
    for table in ("a", "b"):
        (oid,) = orchestrated.database.query(f"select '{table}'::regclass::oid::bigint")[0]
        batches = scan_changes(
            orchestrated.zone.changes.table, epoch=1, start=0, end=2**63 - 1, relation_id=oid
        )
        ends[table], committed_at = min(
            (row["commit_lsn"], row["commit_ts"]) for batch in batches for row in batch.to_pylist()
        )
        if table == "a":
            shown = selected(orchestrated, spark, HISTORY, 2, "_valid_to", "_valid_to_lsn")
            assert {str(at) for at, lsn in shown if lsn == ends["a"]} == {
                str(committed_at.replace(tzinfo=None))
            }
    assert ends["a"] < newest_snapshot_lsn(orchestrated, "a")
    assert_ended(orchestrated, spark, ends)
    assert_healed(orchestrated, spark)


@pytest.mark.soak
def test_the_rows_of_a_dropped_table_end_with_the_first_look_that_misses_it(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """The sensor looks between the drop and the new table, whose rows come later."""
    orchestrated = with_kinds(orchestrated)
    orchestrated.sync()
    in_both(orchestrated, "update {0} set v = 'before' where id = 1", "drop table {0}")
    names = [table.name for table in orchestrated.capture.tables]
    with query_connection(orchestrated.database.settings(), "poll") as conn:
        events = poll_catalog(conn, orchestrated.zone, names, "pub")
    assert {event.change for event in events} == {SchemaChange.TABLE_DROPPED}
    in_both(
        orchestrated,
        *_NEW_TABLE,
        "update {0} set v = 'new' where id = 3; insert into {0} values (6, 'row 6')",
    )
    orchestrated.sync()
    assert_ended(orchestrated, spark, {e.table.table: int(e.lsn) for e in events})
    shown = selected(orchestrated, spark, HISTORY, 2, "_valid_to", "_is_current")
    at = {e.table.table: e.seen_at for e in events}["a"]
    assert at is not None
    assert str(at.replace(tzinfo=None)) in {str(ended) for ended, is_current in shown}
    assert_healed(orchestrated, spark)


# Each has the same columns as the key before. The rows in between are updated by their key.
_SAME_KEY = (
    "alter table {0} drop constraint {0}_pkey, add primary key (k, id)",
    "alter table {0} rename k to k2",
    "create unique index {0}_same on {0} (id, k2)",
    "alter table {0} drop constraint {0}_pkey, add primary key using index {0}_same",
    "create unique index {0}_again on {0} (k2, id)",
    "alter table {0} replica identity using index {0}_again",
    "alter table {0} drop constraint {0}_same",
    "alter table {0} replica identity full, add primary key (id, k2)",
    "alter table {0} replica identity default",
    "alter table {0} replica identity nothing",
    "alter table {0} replica identity default",
)


@pytest.mark.soak
def test_the_same_columns_as_key_need_no_snapshot(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """Another order, names, constraint or index, FULL and back, and NOTHING while rows come."""
    orchestrated = with_kinds(orchestrated)
    in_both(
        orchestrated,
        "alter table {0} add k int not null default 7",
        "alter table {0} drop constraint {0}_pkey, add primary key (id, k)",
    )
    orchestrated.sync()
    taken = len(orchestrated.zone.snapshots.complete_snapshots())
    for number, statement in enumerate(_SAME_KEY):
        in_both(orchestrated, statement)
        key = "id, k" if number == 0 else "id, k2"
        in_both(orchestrated, f"insert into {{0}} ({key}, v) values ({100 + number}, 1, 'new')")
        if not statement.endswith("nothing"):
            in_both(
                orchestrated,
                f"update {{0}} set v = 'changed {number}' where id in (1, {99 + number})",
                f"update {{0}} set id = {200 + number} where id = {100 + number}",
                "delete from {0} where id = (select max(id) from {0} where id < 100)",
            )
        if number % 4 == 2:
            orchestrated.sync()
    orchestrated.sync()
    assert len(orchestrated.zone.snapshots.complete_snapshots()) == taken
    assert not any(event.needs_snapshot for event in orchestrated.zone.schema_events.read())
    assert_healed(orchestrated, spark)
    found = selected(orchestrated, spark, HISTORY, 2, "id", "v")
    assert {v for i, v in found if i == 1} == {
        "row 1",
        *(f"changed {n}" for n, s in enumerate(_SAME_KEY) if not s.endswith("nothing")),
    }
