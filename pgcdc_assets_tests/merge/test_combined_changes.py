"""Changes of the schema between rows of one transaction, and of the publication in a backlog.

The rows of a transaction are read by the columns and names of their time. Where the stream is not
enough, the tables of the open events get snapshots, as by a sync. Then each table equals the
source, and the current rows of its history are those of SCD1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.merge import MergeFailure
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.raw.relations.schema_events import open_events
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow, pytest.mark.sampled]

_STREAMING = CaptureLimits(
    stream=StreamSettings(
        wire=WireSettings(batch_bytes=100_000), plugin=PluginOptions(Streaming.ON)
    )
)
_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """Statements, and the tables that equal the source after them.

    Attributes:
        tables: names of the declared tables.
        setup: statements before the first snapshot.
        transactions: the backlog.
        publication: what the publication sends.
        since: the first version of Postgres with the statements.
    """

    tables: tuple[str, ...]
    setup: str
    transactions: tuple[tuple[str, ...], ...]
    publication: str = "for all tables"
    since: int = 14


_TWO = (
    "create table t (id int primary key, v text); create table u (id int primary key, v text);"
    "insert into t values (1, 't1'), (2, 't2'); insert into u values (1, 'u1'), (3, 'u3')"
)
_SWAP = "alter table t rename to x; alter table u rename to t; alter table x rename to u"
_SWAP_COLUMNS = (
    "alter table t rename a to c; alter table t rename b to a; alter table t rename c to b"
)
_PARTITIONED = (
    "create table t (id int primary key, v text) partition by range (id);"
    "create table p1 partition of t for values from (0) to (100);"
    "create table p2 partition of t for values from (100) to (200);"
    "create table s (id int primary key, v text);"
    "insert into t values (1, 'a'), (2, 'b'), (101, 'a'); insert into s values (205, 's')"
)
_ATTACH = (
    "insert into s values (210, 's2'); insert into t values (3, 'c')",
    "alter table t attach partition s for values from (200) to (300)",
    "insert into t values (220, 'new'); update t set v = 'updated' where id in (205, 1)",
    "delete from t where id = 210",
)
_LISTED = "create table t (id int primary key, a text, b text); insert into t values (1, 'a', 'b')"
_FILL = "insert into t select i, repeat(md5(i::text), 10) from generate_series({}, {}) i"

_CASES = {
    "two tables swap their names": Case(
        ("t", "u"),
        _TWO,
        (
            (
                "insert into t values (10, 'before'); update u set v = 'before' where id = 1",
                _SWAP,
                "insert into t values (20, 't'); insert into u values (20, 'u')",
                "delete from t where id = 1; delete from u where id = 1",
            ),
        ),
    ),
    "two tables swap their names and swap them back": Case(
        ("t", "u"),
        _TWO,
        (
            (
                "insert into t values (10, 'before')",
                _SWAP,
                "insert into t values (20, 'u'); insert into u values (21, 't')",
                _SWAP,
                "insert into t values (30, 't'); insert into u values (31, 'u')",
            ),
        ),
    ),
    "two columns of different types swap their names": Case(
        ("t",),
        "create table t (id int primary key, a text, b int); insert into t values (1, 'a', 1)",
        (
            (
                "insert into t values (2, 'a', 2)",
                _SWAP_COLUMNS,
                "insert into t (id, a, b) values (3, 3, 'b'); update t set a = 11 where id = 1",
            ),
        ),
    ),
    "the key and another column swap their names": Case(
        ("t",),
        "create table t (a int primary key, b int); insert into t values (1, 100), (2, 200)",
        (
            (
                "update t set b = 101 where a = 1",
                _SWAP_COLUMNS,
                "insert into t (a, b) values (300, 3); update t set a = 111 where b = 1",
                "delete from t where b = 2",
            ),
        ),
    ),
    "a table is dropped and created again": Case(
        ("t",),
        "create table t (id int primary key, v text); insert into t values (1, 'a')",
        (
            (
                "insert into t values (2, 'b')",
                "drop table t; create table t (v int, w text, id bigint primary key)",
                "insert into t values (3, 'c', 7)",
            ),
            ("insert into t values (4, 'd', 8)",),
        ),
    ),
    "a row filter changes": Case(
        ("t",),
        "create table t (id int primary key, v text); insert into t values (1, 'a'), (10, 'x')",
        (
            (
                "insert into t values (2, 'b'), (200, 'no')",
                "alter publication pub set table t where (id > 5)",
                "insert into t values (3, 'no'), (300, 'yes')",
            ),
            ("update t set v = 'u' where id in (1, 10)",),
            ("alter publication pub set table t where (id < 100)",),
            ("insert into t values (4, 'yes'), (400, 'no')",),
        ),
        "for table t where (id < 100)",
        since=15,
    ),
    "a column list changes and changes back": Case(
        ("t",),
        _LISTED,
        (
            (
                "insert into t values (2, 'a', 'b')",
                "alter publication pub set table t (id, b)",
                "insert into t values (3, 'a', 'b')",
                "alter publication pub set table t (id, a)",
                "insert into t values (4, 'a', 'b')",
            ),
        ),
        "for table t (id, a)",
        since=15,
    ),
    "a partition is attached to a published root": Case(
        ("t",), _PARTITIONED, (_ATTACH,), "for table t, s with (publish_via_partition_root)"
    ),
    "a partition is attached to a table whose leaves are published": Case(
        ("p1", "p2", "s"), _PARTITIONED, (_ATTACH,), "for table t, s"
    ),
    "a partition is detached, changed, and attached again": Case(
        ("t",),
        _PARTITIONED,
        (
            (
                "insert into t values (3, 'c'), (102, 'x')",
                "alter table t detach partition p2",
                "insert into p2 values (103, 'hidden'); delete from p2 where id = 101",
                "alter table t attach partition p2 for values from (100) to (200)",
                "insert into t values (104, 'd')",
            ),
        ),
        "for table t with (publish_via_partition_root)",
    ),
    "truncates and changed columns in savepoints": Case(
        ("t",),
        f"create table t (id int primary key, v text); {_FILL.format(1, 1000)}",
        (
            (
                _FILL.format(2001, 4000),
                "savepoint a; truncate t",
                _FILL.format(1, 2000),
                "rollback to a",
                _FILL.format(4001, 6000),
                "savepoint b; truncate t",
                _FILL.format(1, 3000),
                "release b; savepoint c; delete from t where id < 1000",
                "savepoint d; alter table t add w int default 3",
                _FILL.format(9001, 11000),
                "rollback to c; update t set v = 'changed' where id > 2500",
                "alter table t rename v to w",
                _FILL.format(20001, 22000),
            ),
        ),
    ),
    "generated columns are added, dropped and become ordinary ones": Case(
        ("t",),
        "create table t (id int primary key, a int, g int generated always as (a * 2) stored);"
        "insert into t (id, a) values (1, 1)",
        (
            (
                "insert into t (id, a) values (2, 2)",
                "alter table t add h int generated always as (a + 1) stored",
                "insert into t (id, a) values (3, 3); update t set a = 9 where id = 1",
                "alter table t drop g; insert into t (id, a) values (4, 4)",
                "alter table t alter h drop expression",
                "insert into t (id, a, h) values (5, 5, 50)",
            ),
        ),
        "for all tables with (publish_generated_columns = stored)",
        since=18,
    ),
}


@pytest.mark.every_pg
@pytest.mark.parametrize("streaming", [None, _STREAMING], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", _CASES)
def test_each_table_equals_the_source(
    pipeline: Pipeline, name: str, streaming: CaptureLimits | None
) -> None:
    """D14, E2, E5, F4, F6, F8, F12."""
    case, database = _CASES[name], pipeline.database
    if database.server.version < case.since:
        pytest.skip(f"Postgres {case.since} is the first version with these statements")
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    for statement in case.setup.split(";"):
        database.execute(statement)
    database.execute(f"create publication {PUBLICATION} {case.publication}")
    pipeline.copy()
    targets = [CdcTable("public", table, scd=(1, 2)) for table in case.tables]
    _merge(pipeline, targets, streaming)
    for statements in case.transactions:
        database.transaction(*statements)
    for _ in range(_ROUNDS):
        pipeline.capture(streaming)
        _merge_possible(pipeline, targets)
        stopped = _stopped(pipeline, case.tables)
        if not stopped:
            break
        pipeline.copy(*stopped)
    _merge(pipeline, targets, streaming)
    pipeline.assert_equal(*case.tables)
    for table in case.tables:
        assert _current(pipeline, table, 2) == _current(pipeline, table, 1)


def _merge(pipeline: Pipeline, targets: list[CdcTable], streaming: CaptureLimits | None) -> None:
    """Capture and merge, and check the success."""
    pipeline.capture(streaming)
    for report in pipeline.merge(None, *targets).values():
        assert not isinstance(report, MergeFailure), report.error


def _merge_possible(pipeline: Pipeline, targets: list[CdcTable]) -> None:
    """Merge. A table that stops has an open event."""
    reports = pipeline.merge(None, *targets)
    failed = {name for name, each in reports.items() if isinstance(each, MergeFailure)}
    assert failed <= set(_stopped(pipeline, tuple(target.table for target in targets)))


def _stopped(pipeline: Pipeline, tables: tuple[str, ...]) -> list[str]:
    """Return the tables that need a snapshot."""
    zone = pipeline.zone
    found = open_events(zone.schema_events.read(), zone.snapshots.complete_snapshots())
    return [name.table for name in found if name.schema == "public" and name.table in tables]


def _current(pipeline: Pipeline, table: str, scd: int) -> Counter[str]:
    """Return the current rows of a table, without its system columns."""
    zone = pipeline.zone
    frame = pipeline.spark.read.format("delta").load(
        table_path(zone.lake, zone.name, "public", table, scd)
    )
    columns = sorted(name for name in pipeline.frame(table).columns if not name.startswith("_"))
    rows = frame.where("_is_current") if scd == 2 else frame
    return Counter(str(tuple(row)) for row in rows.select(*columns).collect())
