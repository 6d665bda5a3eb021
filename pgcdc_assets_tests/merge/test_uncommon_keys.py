"""Keys whose equal values have several texts, keys outside the row, and keys that are not sent."""

from __future__ import annotations

import pytest

from pgcdc_assets.errors import ReplicaIdentityError
from pgcdc_assets.merge import MergeFailure
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

# Statements that make a table, and pairs of equal keys with different texts.
_EQUAL: dict[str, tuple[str, str, str]] = {
    "f": ("float8", "0", "-0"),
    "g": ("float4", "0", "-0"),
    "n": ("numeric", "1.0", "1.00"),
    "i": ("interval", "1 day", "24:00:00"),
    "r": ("numrange", "[1.0,2)", "[1,2.0)"),
    "j": ("jsonb", '{"a": 1.0}', '{"a": 1.00}'),
    "z": ("timetz", "12:00:00+00", "13:00:00+01"),
}
# The value is out of line, and the key of the index fits into a page.
_LONG = "repeat(md5('{}'), 75)"
_TOASTED = f"""
create table long (k text primary key, v text); alter table long alter k set storage external;
insert into long values ({_LONG.format(1)}, 'old'), ({_LONG.format(2)}, 'old')
"""
_TEMPORAL = """
create table t (r int4range, at daterange, v text, primary key (r, at without overlaps));
insert into t values ('[1,2)', '[2024-01-01,2024-02-01)', 'old'),
                     ('[1,2)', '[2024-02-01,2024-03-01)', 'old')
"""


def _check(pipeline: Pipeline) -> None:
    pipeline.assert_equal()
    for table in pipeline.tables:
        history = pipeline.frame(table, 2)
        count = pipeline.database.value(f"select count(*) from {table}")
        assert history.where("_is_current").count() == count, table


@pytest.mark.sampled
@pytest.mark.parametrize("apart", [False, True])
def test_equal_keys_with_other_texts_are_one_row(pipeline: Pipeline, apart: bool) -> None:
    """C8, D2, D4: the key gets an equal value, alone, with a column, and after a delete."""
    execute = pipeline.database.execute
    pipeline.tables = tuple(_EQUAL)
    for name, (key, one, _) in _EQUAL.items():
        execute(f"create table {name} (k {key} primary key, v text, w text)")
        execute(f"insert into {name} values ('{one}', 'old', 'w')")
    pipeline.start()
    targets = [CdcTable("public", name, scd=(1, 2)) for name in pipeline.tables]
    pipeline.sync(*targets)
    steps = (
        "update {t} set k = '{b}'",
        "update {t} set v = 'new'",
        "update {t} set k = '{a}', v = 'both'",
        "delete from {t}; insert into {t} values ('{b}', 'again', null)",
        "update {t} set k = '{a}'; delete from {t}",
        "insert into {t} values ('{a}', 'third', null)",
    )
    for step in steps:
        for name, (_, one, other) in _EQUAL.items():
            execute(step.format(t=name, a=one, b=other))
        if apart:
            pipeline.sync(*targets)
            _check(pipeline)
    pipeline.sync(*targets)
    _check(pipeline)


@pytest.mark.every_pg
@pytest.mark.sampled
def test_a_key_that_is_stored_out_of_line_identifies_its_row(pipeline: Pipeline) -> None:
    """D5: the new tuple lacks the unchanged key, which the old tuple has (Postgres 14.2)."""
    pipeline.tables = ("long",)
    pipeline.start(_TOASTED)
    target = CdcTable("public", "long", scd=(1, 2))
    pipeline.sync(target)
    execute = pipeline.database.execute
    execute(f"update long set v = 'new' where k = {_LONG.format(1)}")
    execute(f"insert into long values ({_LONG.format(3)}, 'in'); update long set v = v || '!'")
    pipeline.sync(target)
    _check(pipeline)
    execute(f"update long set k = {_LONG.format(4)} where k = {_LONG.format(3)}")
    execute(f"delete from long where k = {_LONG.format(2)}")
    pipeline.sync(target)
    _check(pipeline)


def test_a_key_without_overlaps_identifies_its_rows(pipeline: Pipeline) -> None:
    """D9: a temporal key of Postgres 18 is a replica identity."""
    if int(pipeline.database.value("show server_version_num")) < 180000:
        pytest.skip("temporal keys are of Postgres 18")
    pipeline.tables = ("t",)
    pipeline.start(_TEMPORAL)
    target = CdcTable("public", "t", scd=(1, 2))
    pipeline.sync(target)
    execute = pipeline.database.execute
    execute("update t set v = 'new' where lower(at) = '2024-02-01'")
    execute("update t set at = '[2024-01-01,2024-01-15]' where lower(at) = '2024-01-01'")
    execute("insert into t values ('[1,2)', '[2024-03-01,)', 'open'), ('[5,6)', '(,)', 'ever')")
    execute("delete from t where v = 'ever'")
    pipeline.sync(target)
    _check(pipeline)


def test_a_null_in_an_identity_whose_constraint_is_not_valid_stops_the_table(
    pipeline: Pipeline,
) -> None:
    """D9: Postgres 18 accepts an index of such a column. One delete would remove both rows."""
    if int(pipeline.database.value("show server_version_num")) < 180000:
        pytest.skip("NOT NULL constraints are NOT VALID since Postgres 18")
    pipeline.start(
        "create table t (id int, v text); insert into t values (null, 'a'), (null, 'b'), (1, 'c');"
        "alter table t add constraint filled not null id not valid;"
        "create unique index on t (id); alter table t replica identity using index t_id_idx"
    )
    execute = pipeline.database.execute
    execute("delete from t where id = 1")
    execute("delete from t where v = 'a'")
    pipeline.capture()
    (failure,) = pipeline.merge().values()
    assert isinstance(failure, MergeFailure)
    assert isinstance(failure.error, ReplicaIdentityError)
    execute("update t set id = 2; alter table t validate constraint filled")
    pipeline.copy("t")
    pipeline.sync(CdcTable("public", "t"))
    pipeline.assert_equal()


@pytest.mark.every_pg
def test_a_table_whose_key_is_not_sent_is_a_multiset_with_a_full_identity(
    pipeline: Pipeline,
) -> None:
    """D11, F12: before Postgres 18, a generated column is no reason to refuse an update."""
    if int(pipeline.database.value("show server_version_num")) >= 180000:
        pytest.skip("Postgres 18 refuses the update")
    pipeline.tables = ("t",)
    pipeline.start(
        "create table t (tenant int, email text,"
        " low text generated always as (lower(email)) stored, primary key (tenant, low))",
        "alter table t replica identity full; insert into t values (1, 'A'), (1, 'B'), (2, 'A')",
    )
    target = CdcTable("public", "t")
    pipeline.sync(target)
    execute = pipeline.database.execute
    execute("insert into t values (1, 'C'), (2, 'D'); delete from t where email = 'B'")
    execute("update t set email = 'E' where email = 'D'")
    pipeline.sync(target)
    pipeline.assert_equal()
