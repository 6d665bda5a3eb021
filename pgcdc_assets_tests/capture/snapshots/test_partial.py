"""Requests for partial snapshots: refused before a row is read, or landed in one commit."""

from __future__ import annotations

import pytest

from pgcdc_assets.errors import ConfigurationError, DefiniteError, PgcdcError, TransientError
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets_tests.support.handover import without_plain_snapshots
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.partial_snapshots import partial_snapshot, take

pytestmark = pytest.mark.postgres

SECRET = "topsecret"

REFUSED = {
    "": "SyntaxError",
    "id =": "SyntaxError",
    "nope = 1": "UndefinedColumn",
    "topsecret = v": "UndefinedColumn",
    "id": "DatatypeMismatch",
    "id = 1, id = 2": "DatatypeMismatch",
    "id = $1": "UndefinedParameter",
    "v = 'topsecret": "SyntaxError",
    "'topsecret'::int = id": "InvalidTextRepresentation",
    "sum(id) > 1": "GroupingError",
    "select true": "SyntaxError",
    "id = 1 union select 1": "SyntaxError",
    "id = 1; drop table t": "SyntaxError",
    "true) or (true": "SyntaxError",
    "true) or (v <> 'topsecret'": "SyntaxError",
    "true])[1]) or ((array[true": "SyntaxError",
    "true); drop table t; select (true": "SyntaxError",
    "true])[1]); drop table t; select 1 where ((array[true": "SyntaxError",
    "true); commit; drop table t; --": "SyntaxError",
    "true /* topsecret": "SyntaxError",
    "v = $x$topsecret": "SyntaxError",
    "no_such_function(v)": "UndefinedFunction",
    "id in (select id from public.unreadable)": "UndefinedTable",
    "v = '\udcff'": "not valid UTF-8",
}

ACCEPTED = {
    "id = 1": 1,
    "id <= 2 -- the first two": 2,
    "id = 1 or id = 3": 2,
    "v = '(' or v in (')', ']', ';', '--', '/*')": 6,
    "v = $$)$$": 1,
    "id in (select id from public.u)": 1,
    "id = any(array[1, 2]) /* both */": 2,
    "(id) = ((1))\n": 1,
    "\"id\" = 1 and v ~ E'\\\\('": 1,
    "id % 2 = 0": 3,
}


@pytest.fixture
def keyed(pipeline: Pipeline) -> Pipeline:
    """A table with six rows of six, and a table without a key."""
    pipeline.start(
        "create table t (id int primary key, v text)",
        "create table u (id int)",
        "insert into t values (1, '('), (2, ')'), (3, ']'), (4, ';'), (5, '--'), (6, '/*')",
        "insert into u values (3)",
    )
    return pipeline


@pytest.mark.sampled
def test_a_predicate_is_one_condition_and_errors_do_not_quote_it(keyed: Pipeline) -> None:
    """C12: a refused request reads nothing, changes nothing and shows no value."""
    for predicate, reason in REFUSED.items():
        with pytest.raises(ConfigurationError) as refused:
            take(keyed, predicate)
        assert reason in str(refused.value), (predicate, str(refused.value))
        assert "public.t" in str(refused.value)
        assert SECRET not in str(refused.value), predicate
        assert SECRET not in repr(partial_snapshot(keyed, predicate))
        cause = refused.value.__cause__
        assert cause is None or SECRET not in str(cause), predicate
    assert keyed.database.value("select count(*) from t") == 6
    assert keyed.zone.partial_snapshots.complete_snapshots() == []

    for predicate, count in ACCEPTED.items():
        assert take(keyed, predicate).row_count == count, predicate
    landed = keyed.zone.partial_snapshots.complete_snapshots()
    assert [snapshot.row_count for snapshot in landed] == list(ACCEPTED.values())
    assert len(keyed.zone.snapshots.complete_snapshots()) == 2

    with pytest.raises(DefiniteError, match="SQLSTATE 22012") as failed:
        take(keyed, f"1 / (id - 3) = 0 and v <> '{SECRET}'")
    assert SECRET not in str(failed.value)
    assert failed.value.__cause__ is None
    assert len(keyed.zone.partial_snapshots.complete_snapshots()) == len(ACCEPTED)


def test_the_row_filter_of_the_publication_holds(pipeline: Pipeline) -> None:
    pipeline.database.execute("create table t (id int primary key, v text, secret text)")
    pipeline.database.execute("insert into t select n, n, n from generate_series(1, 9) n")
    pipeline.database.execute("create publication pub for table t (id, v) where (id > 5)")
    pipeline.copy()
    report = take(pipeline, "id < 8 or id = 1")
    assert (report.epoch, report.row_count) == (1, 2)
    with pytest.raises(ConfigurationError, match="SyntaxError"):
        take(pipeline, "true) or (true")


def test_the_statement_ends_at_its_limit_and_no_row_is_landed(keyed: Pipeline) -> None:
    """C15: `snapshot.statement_timeout_seconds` bounds a partial snapshot too."""
    policy = SnapshotPolicy(statement_timeout_seconds=0.3)
    request = partial_snapshot(keyed, "pg_sleep(0.2)::text is not null", policy=policy)
    with pytest.raises(TransientError, match="statement timeout"):
        request.take()
    assert keyed.zone.partial_snapshots.complete_snapshots() == []


def test_without_a_proof_a_temporary_slot_exports_the_snapshot(
    keyed: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: as while the table is written to all the time."""
    without_plain_snapshots(monkeypatch)
    assert take(keyed, "id <= 2").row_count == 2
    slots = "select slot_name from pg_replication_slots where database = current_database()"
    assert keyed.database.query(slots) == [(keyed.slot,)]


def refusal(pipeline: Pipeline, table: str = "t") -> str:
    with pytest.raises(PgcdcError) as refused:
        take(pipeline, "true", table)
    return str(refused.value)


def test_a_table_whose_rows_cannot_be_replaced_is_refused(keyed: Pipeline) -> None:
    database = keyed.database
    assert "public.u cannot be replaced by a predicate: it has no key" in refusal(keyed, "u")
    assert "pgcdc resnapshot" in refusal(keyed, "u")
    # The command asks before it starts a run.
    with pytest.raises(ConfigurationError, match="it has no key"):
        partial_snapshot(keyed, "id = 3", "u").check()
    assert "public.nope" in refusal(keyed, "nope")
    database.execute("create table later (id int primary key)")
    assert "public.later has no complete snapshot yet" in refusal(keyed, "later")
    database.execute("alter table t add column n int")
    keyed.capture()
    assert "no row with the new definition is captured yet" in refusal(keyed)
    assert keyed.zone.relations.versions(1)[0].version == 1
    database.execute("update t set n = 1 where id = 1")
    keyed.capture()
    assert take(keyed, "n = 1").row_count == 1
    database.execute("alter table t alter column v type int using id")
    assert "waits for a snapshot of all rows" in refusal(keyed)


def test_rows_beside_kept_rows_of_a_detached_partition_can_be_replaced(pipeline: Pipeline) -> None:
    """C12, E3: by default the detachment needs a snapshot of all rows."""
    execute = pipeline.database.execute
    execute(
        "create table t (id int primary key) partition by range (id);"
        "create table low partition of t for values from (0) to (10);"
        "create table high partition of t for values from (10) to (20);"
        "insert into t values (1), (11);"
        "create publication pub for table t with (publish_via_partition_root)"
    )
    pipeline.copy()
    execute("alter table t detach partition low")
    assert "waits for a snapshot of all rows" in refusal(pipeline)
    assert partial_snapshot(pipeline, "true", keeps_partitions=True).take().row_count == 1


def test_without_a_first_snapshot_nothing_is_created(pipeline: Pipeline) -> None:
    pipeline.database.execute("create table t (id int primary key)")
    pipeline.database.execute("create publication pub for table t")
    assert "Run `pgcdc sync` first" in refusal(pipeline)
    assert pipeline.zone.epochs.latest() is None
    assert (
        pipeline.database.query(
            "select slot_name from pg_replication_slots where slot_name = %s", (pipeline.slot,)
        )
        == []
    )
