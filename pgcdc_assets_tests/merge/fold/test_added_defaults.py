"""ADD COLUMN ... DEFAULT: earlier rows get the default, as at the source (F2)."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from deltalake import DeltaTable

from pgcdc_assets import failpoints
from pgcdc_assets.capture.schema_watch import poll_catalog
from pgcdc_assets.lsn import Position
from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.session import own_sessions
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify import Rule, check_all, check_merged
from pgcdc_assets_tests.support.merge.pipeline import EACH_KIND, PUBLICATION, Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

_ADDED = (
    "add n int not null default 5, add x numeric(6,2) default 'NaN', "
    "add at timestamptz default '2024-01-02 03:04:05.5+00', "
    "add tags text[] default '{a,\"b,c\",NULL}', add s text default 'it''s \\ \"so\"'"
)
_DEFAULTS = (
    5,
    None,
    dt.datetime(2024, 1, 2, 3, 4, 5, 500_000),
    ["a", "b,c", None],
    'it\'s \\ "so"',
    {"x": "NaN"},
)
_COLUMNS = ("n", "x", "at", "tags", "s", "_rescued")


def _rows(pipeline: Pipeline, target: CdcTable, scd: int, *more: str) -> list[tuple[Any, ...]]:
    frame = pipeline.frame(target.table, scd).select("id", *more, *_COLUMNS)
    return sorted((tuple(row) for row in frame.collect()), key=repr)


def _missing_defaults(pipeline: Pipeline, target: CdcTable, scd: int) -> int:
    """Count the rows that lack a default."""
    with own_sessions(pipeline.spark, 1) as (session,):
        return check_all(session, pipeline.zone, target, scd).violations[Rule.MISSING_DEFAULTS]


@pytest.mark.sampled
def test_every_kind_of_table_fills_earlier_rows(pipeline: Pipeline) -> None:
    """Rows of earlier merges and earlier tuples of the same merge get the default."""
    tables = [target.table for target in EACH_KIND]
    pipeline.start(
        *(
            f"create table {t} (id int {'primary key' if t in ('t', 'kept') else ''}, v text);"
            f"alter table {t} replica identity full; insert into {t} values (1, 'a'), (2, 'a')"
            for t in tables
        )
    )
    database = pipeline.database
    for t in tables:
        database.execute(f"insert into {t} values (3, 'a'), (4, 'a'); delete from {t} where id = 4")
    pipeline.sync(*EACH_KIND)
    for t in tables:
        database.execute(f"insert into {t} values (5, 'b')")
        database.execute(f"alter table {t} {_ADDED}")
        database.execute(f"alter table {t} alter n set default 6")
        database.execute(f"insert into {t} (id, v) values (6, 'c')")
        database.execute(f"update {t} set n = 7 where id = 1")
        database.execute(f"delete from {t} where id = 2")
        database.execute(f"update {t} set v = v where id = 5")
    reports = pipeline.sync(*EACH_KIND).values()
    assert {report.columns_filled for report in reports} == {("n", "x", "at", "tags", "s")}
    pipeline.assert_equal("t")

    merged = {}
    for target in EACH_KIND:
        for scd in target.scd:
            more = {2: ("_is_current",)}.get(scd, ())
            found = _rows(pipeline, target, scd, *more)
            old = [row for row in found if row[0] in (2, 3, 4, 5)]
            assert old, target
            for row in old:
                assert row[-len(_DEFAULTS) :] == _DEFAULTS, (target, row)
            merged[target.table, scd] = found
    assert [row[:2] for row in merged["t", 2]] == [
        *[(1, False), (1, True), (2, False), (3, True), (4, False), (5, True), (6, True)]
    ]
    assert merged["bag", 1] == merged["t", 1]
    rebuild_table(pipeline.spark, pipeline.zone, EACH_KIND[0], 2)
    assert _rows(pipeline, EACH_KIND[0], 2, "_is_current") == merged["t", 2]

    for target in EACH_KIND:
        for scd in target.scd:
            path = pipeline.path(target.table, scd)
            DeltaTable(path).update(predicate="id = 3", updates={"n": "null"})
            assert _missing_defaults(pipeline, target, scd) == 1, target


@pytest.mark.sampled
def test_the_next_merge_fills_a_column_after_a_kill(pipeline: Pipeline, kills: list[str]) -> None:
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    pipeline.database.execute("alter table t add n int default 5, add s text default 'x'")
    pipeline.database.execute("insert into t values (2, 'b', 6, null)")
    pipeline.capture()
    kills += [failpoints.AFTER_COLUMNS_ADDED]
    (failure,) = pipeline.merge().values()
    assert isinstance(failure, MergeFailure)
    assert not kills
    assert pipeline.rows(columns="id, n, s") == [(1, None, None)]

    (report,) = pipeline.merge().values()
    assert isinstance(report, MergeReport)
    assert report.columns_filled == ("n", "s")
    assert pipeline.rows(columns="id, n, s") == [(1, 5, "x"), (2, 6, None)]
    pipeline.database.execute("update t set n = null where id = 1")
    pipeline.sync()
    assert pipeline.rows(columns="id, n, s") == [(1, None, "x"), (2, 6, None)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("tracked", "missing_in_history"), [(None, 3), (("v",), 0)], ids=["all", "one column"]
)
def test_the_check_after_a_merge_finds_missing_defaults(
    pipeline: Pipeline,
    monkeypatch: pytest.MonkeyPatch,
    tracked: tuple[str, ...] | None,
    missing_in_history: int,
) -> None:
    """NULL from an update is no violation, even if the update opens no version."""
    target = CdcTable("public", "t", scd=(1, 2), tracked=tracked)
    pipeline.start(
        "create table t (id int primary key, v text)", "insert into t values (1, 'a'), (4, 'a')"
    )
    pipeline.sync(target)
    pipeline.database.execute("insert into t values (2, 'b')")
    pipeline.database.execute("alter table t add n int default 5")
    pipeline.database.execute("insert into t values (3, 'c')")
    pipeline.database.execute("update t set n = null where id in (3, 4)")
    pipeline.database.execute("update t set v = 'B', n = null where id = 2")
    with monkeypatch.context() as patched:
        patched.setattr("pgcdc_assets.merge.fold.schema.find_added_default", lambda *_: None)
        pipeline.sync(target)
    assert pipeline.rows(columns="id, n") == [(1, None), (2, None), (3, None), (4, None)]
    found = [_missing_defaults(pipeline, target, scd) for scd in (1, 2)]
    # If the history does not track the column, an update may have written NULL into a version.
    assert found == [1, missing_in_history]
    with own_sessions(pipeline.spark, 1) as (session,):
        begin = Position(1, pipeline.windows[-1].start)
        touched = check_merged(session, pipeline.zone, target, 1, begin, whole_below_bytes=-1)
        assert touched.violations[Rule.MISSING_DEFAULTS] == 1
        later = Position(1, pipeline.windows[-1].end)
        touched = check_merged(session, pipeline.zone, target, 1, later, whole_below_bytes=-1)
        assert Rule.MISSING_DEFAULTS not in touched.violations, "no merge touched the older rows"
    for scd in (1, 2):
        rebuild_table(pipeline.spark, pipeline.zone, target, scd)
        assert _missing_defaults(pipeline, target, scd) == 0
    assert pipeline.rows(columns="id, n") == [(1, 5), (2, None), (3, None), (4, None)]


@pytest.mark.sampled
def test_rows_of_a_partitioned_table_have_the_default(pipeline: Pipeline) -> None:
    """The catalog stores the default of each partition, but changes have the root's name."""
    pipeline.database.execute(
        "create table t (id int primary key, v text) partition by range (id);"
        "create table t1 partition of t for values from (0) to (10);"
        "create table t2 partition of t for values from (10) to (20);"
        "insert into t values (1, 'a'), (11, 'a')"
    )
    pipeline.database.execute(
        f"create publication {PUBLICATION} for table t with (publish_via_partition_root)"
    )
    pipeline.copy()
    pipeline.sync()
    pipeline.database.execute("alter table t add n int default 5, add b box default '(3,4),(1,2)'")
    pipeline.database.execute("insert into t values (12, 'b', 6, null)")
    pipeline.sync()
    pipeline.assert_equal("t")
    box = "(3,4),(1,2)"
    assert pipeline.rows(columns="id, n, b") == [(1, 5, box), (11, 5, box), (12, 6, None)]


@pytest.mark.sampled
def test_rows_have_the_default_if_a_snapshot_shows_the_column_before_the_stream(
    pipeline: Pipeline,
) -> None:
    """The LSN of the snapshot is above that of the first row with the column."""
    history, kept = CdcTable("public", "t", scd=(2,)), CdcTable("public", "kept", soft_deletes=True)
    pipeline.start(
        *(
            f"create table {t} (id int primary key, v text); insert into {t} values (1, 'a'), "
            "(2, 'a')"
            for t in ("t", "kept")
        )
    )
    for t in ("t", "kept"):
        pipeline.database.execute(f"delete from {t} where id = 2")
    pipeline.sync(history, kept)
    for t in ("t", "kept"):
        pipeline.database.execute(f"alter table {t} add n int default 5")
        pipeline.database.execute(f"insert into {t} values (3, 'c', 6)")
    pipeline.copy("t", "kept")
    reports = pipeline.sync(history, kept).values()
    assert {report.columns_filled for report in reports} == {("n",)}
    found = {}
    for target, scd, flag in ((history, 2, "_is_current"), (kept, 1, "_deleted")):
        frame = pipeline.frame(target.table, scd).select("id", "n", flag)
        found[scd] = sorted(map(tuple, frame.collect()))
    assert found[2] == [(1, 5, True), (2, 5, False), (3, 6, True)], "no version begins or ends"
    assert found[1] == [(1, 5, False), (2, 5, True), (3, 6, False)]


@pytest.mark.sampled
def test_rows_have_the_default_if_the_table_was_rewritten_before_the_first_row(
    pipeline: Pipeline,
) -> None:
    """A poll has seen the column. VACUUM FULL then clears the default in the catalog."""
    table = TableName("public", "t")
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    pipeline.database.execute("alter table t add n int default 5")
    with query_connection(pipeline.database.settings(), "poll") as conn:
        [event] = poll_catalog(conn, pipeline.zone, [table], PUBLICATION)
    assert not event.needs_snapshot
    pipeline.database.execute("vacuum full t")
    pipeline.database.execute("insert into t values (2, 'b', 6)")
    assert pipeline.sync()["t"].columns_filled == ("n",)
    pipeline.assert_equal("t")
    assert pipeline.rows(columns="id, n") == [(1, 5), (2, 6)]
