"""Unchanged TOAST in SCD1: a value that the stream omits keeps its newest value."""

from __future__ import annotations

import pytest

from pgcdc_assets.errors import SnapshotNeeded, TransientError
from pgcdc_assets.merge import MergeFailure
from pgcdc_assets_tests.support.merge.pipeline import KEY_SWAP, PUBLICATION, Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_TABLE = "create table t (id int primary key, v text, n int not null default 0)"
# Stored out of line without compression: values of this size are always TOASTed.
_EXTERNAL = "alter table t alter v set storage external"


def _big(seed: str) -> str:
    return f"(select string_agg(md5({seed} || i), '') from generate_series(1, 300) i)"


_A, _B, _C, _NEW, _CHANGED = (_big(f"'{seed}'") for seed in ("a", "b", "c", "new", "changed"))
_BY_ID = _big("id::text")


@pytest.mark.sampled
def test_an_unchanged_value_of_a_snapshot_row_is_kept(pipeline: Pipeline) -> None:
    """D5: a row of the snapshot with DEFAULT identity. The raw zone has `unchanged`, not NULL."""
    pipeline.start(_TABLE, _EXTERNAL, f"insert into t values (1, {_A}), (2, {_B})")
    pipeline.database.execute("update t set n = 1 where id = 1")
    pipeline.database.execute("update t set n = 1, v = null where id = 2")
    pipeline.sync()
    pipeline.assert_equal()
    assert pipeline.frame().where("length(v) = 9600 AND n = 1").count() == 1
    assert pipeline.frame().where("v IS NULL AND n = 1").count() == 1


def test_an_unchanged_value_is_the_newest_known_value_of_the_batch(pipeline: Pipeline) -> None:
    """D6: unchanged after an insert, after an update, and between an update and NULL."""
    pipeline.start(_TABLE, _EXTERNAL, f"insert into t values (1, {_A}), (2, {_B})")
    pipeline.database.transaction(
        f"insert into t values (3, {_C})", "update t set n = 1 where id = 3"
    )
    pipeline.database.execute(f"update t set v = {_NEW} where id = 1")
    pipeline.database.execute("update t set n = n + 1 where id = 1")
    pipeline.database.execute(f"update t set v = {_NEW} where id = 2")
    pipeline.database.execute("update t set n = n + 1 where id = 2")
    pipeline.database.execute("update t set v = null where id = 2")
    pipeline.sync()
    pipeline.assert_equal()


@pytest.mark.sampled
def test_an_unchanged_value_follows_its_row_to_another_key(pipeline: Pipeline) -> None:
    """D4, D5, D6: chains, swaps and a reused key, in the table and within the batch."""
    pipeline.start(
        _TABLE,
        _EXTERNAL,
        f"insert into t select id, {_BY_ID} from generate_series(1, 6) id",
    )
    pipeline.sync()
    pipeline.database.transaction(*KEY_SWAP)
    pipeline.database.execute("update t set id = 30 where id = 3")
    pipeline.database.execute("update t set id = 31, n = 5 where id = 30")
    pipeline.database.execute("insert into t values (3, 'small')")
    pipeline.database.execute(f"update t set v = {_CHANGED} where id = 4")
    pipeline.database.execute("update t set id = 40 where id = 4")
    pipeline.database.execute("update t set n = 7 where id = 40")
    pipeline.database.transaction("delete from t where id = 5", "update t set id = 5 where id = 6")
    pipeline.sync()
    pipeline.assert_equal()
    assert [row[0] for row in pipeline.rows()] == [1, 2, 3, 5, 31, 40]


@pytest.mark.sampled
@pytest.mark.parametrize("identity", ["default", "full"])
def test_toasted_values_of_every_kind_are_kept(pipeline: Pipeline, identity: str) -> None:
    """D7: arrays of several types, bytea, json, jsonb, numeric, and rescued values."""
    columns = {
        "texts": ("text[]", "array_agg(md5(i::text))"),
        "chars": ("bpchar[]", "array_agg(md5(i::text)::bpchar)"),
        "dates": ("date[]", "array_agg(date '2024-01-01' + i)"),
        "ints": ("int[]", "array_agg(i)"),
        "bigints": ("bigint[]", "array_agg(i::bigint)"),
        "uuids": ("uuid[]", "array_agg(md5(i::text)::uuid)"),
        "bytes": ("bytea", "decode(string_agg(md5(i::text), ''), 'hex')"),
        "doc": ("json", "json_agg(md5(i::text))"),
        "docb": ("jsonb", "jsonb_agg(md5(i::text))"),
        "wide": ("numeric", "(string_agg((i * 7919)::text, '') || '.5')::numeric"),
        "grid": ("int[]", "array[array_agg(i), array_agg(i)]"),
    }
    declared = ", ".join(f"{name} {kind}" for name, (kind, _) in columns.items())
    values = ", ".join(value for _, value in columns.values())
    external = ", ".join(f"alter {name} set storage external" for name in columns if name != "wide")
    pipeline.start(
        f"create table t (id int primary key, v int, {declared})",
        f"alter table t {external}, alter wide set storage external",
        f"alter table t replica identity {identity}",
        f"insert into t select 1, 0, {values} from generate_series(1, 1500) i",
    )
    pipeline.database.execute("update t set v = 1")
    pipeline.sync()
    pipeline.database.execute("update t set id = 2, v = 2")
    pipeline.sync()
    pipeline.assert_equal()
    assert pipeline.rows() == [(2, 2)]
    assert [set(row[0]) for row in pipeline.rows(columns="_rescued")] == [{"grid"}]


@pytest.mark.sampled
def test_a_row_that_returns_into_the_row_filter_keeps_no_value_from_before(
    pipeline: Pipeline,
) -> None:
    """Postgres sends it as an insert without the value, which has changed outside the filter."""
    pipeline.database.execute(
        "create table t (id int, shown bool, v text, n int default 0, primary key (id, shown));"
        f"{_EXTERNAL}; insert into t values (1, true, {_A}), (2, true, {_B});"
        f"create publication {PUBLICATION} for table t where (shown)"
    )
    pipeline.copy()
    pipeline.sync()
    pipeline.database.execute("update t set shown = false")
    pipeline.database.execute(f"update t set v = {_CHANGED}")
    pipeline.database.execute("update t set shown = true")
    # A later change has the value of the second row.
    pipeline.database.execute(f"update t set v = {_NEW} where id = 2")
    pipeline.capture()
    (failure,) = pipeline.merge().values()
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, SnapshotNeeded), failure.error
    pipeline.database.execute(f"update t set v = {_NEW} where id = 1")
    pipeline.sync()
    pipeline.assert_equal()


def test_a_row_that_only_the_awaited_snapshot_has_needs_no_command(pipeline: Pipeline) -> None:
    """C11: the rows of a table that was published again change before its snapshot."""
    pipeline.tables = ("t", "bag")
    pipeline.database.execute(
        f"{_TABLE}; {_EXTERNAL}; create table bag (v text); alter table bag replica identity full;"
        f"create publication {PUBLICATION} for table t, bag"
    )
    pipeline.copy()
    pipeline.sync()
    pipeline.database.execute(f"alter publication {PUBLICATION} drop table t, bag")
    pipeline.database.execute(f"insert into t values (1, {_A}); insert into bag values ('a')")
    pipeline.database.execute(f"alter publication {PUBLICATION} add table t, bag")
    pipeline.database.execute("update t set n = 1; delete from bag")
    pipeline.capture()
    for table, failure in pipeline.merge().items():
        assert isinstance(failure, MergeFailure), table
        assert isinstance(failure.error, TransientError), failure.error
        text = str(failure.error)
        assert "resnapshot" not in text
        assert "which the lag sensor or the next pgcdc sync takes. publication_changed" in text
    pipeline.copy("t", "bag")
    pipeline.sync()
    pipeline.assert_equal()
