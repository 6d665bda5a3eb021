"""Schema changes that the stream cannot replay: the tables heal by an automatic re-snapshot."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.cli import main
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.orchestration.checks.schema_changes import SCHEMA_CHANGES
from pgcdc_assets.orchestration.jobs.sync import sync_capture
from pgcdc_assets.orchestration.sensors.snapshot_requests import EVENT_TAG, REASON_TAG
from pgcdc_assets.orchestration.state import read_gates, read_state
from pgcdc_assets.raw.relations.schema_events import CATALOG, SchemaChange, SchemaEvent
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.orchestration.conftest import LIMITS, NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

A = TableName("public", "a")


def with_policy(orchestrated: Orchestrated, policy: str) -> Orchestrated:
    tables = (
        CdcTable("public", "a", (1, 2), on_schema_change=policy),
        CdcTable("public", "b"),
    )
    return replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))


def catalog_event(orchestrated: Orchestrated, *columns: str) -> SchemaEvent:
    """Record an event at the end of the WAL, as a poll of the catalog does."""
    ((lsn, oid),) = orchestrated.database.query(
        "select pg_current_wal_lsn()::text, 'a'::regclass::oid::int"
    )
    event = SchemaEvent(
        1,
        Lsn.parse(lsn),
        A,
        oid,
        SchemaChange.COLUMN_ADDED,
        columns,
        "The column has a volatile default, so the table was rewritten.",
        True,
        CATALOG,
    )
    orchestrated.zone.schema_events.record([event])
    return event


def request_for(orchestrated: Orchestrated, job: str) -> dg.RunRequest:
    """Return the lag sensor's request of a run of a job."""
    requests: list[dg.RunRequest] = orchestrated.tick("lag", one_shot=True).run_requests
    (request,) = [request for request in requests if request.job_name == f"{NAME}_{job}"]
    return request


def resnapshots(orchestrated: Orchestrated) -> list[dg.DagsterRun]:
    """Return the automatic re-snapshots, newest first."""
    runs = orchestrated.instance.get_runs(dg.RunsFilter(job_name=f"{NAME}_snapshot"))
    return [run for run in runs if EVENT_TAG in run.tags]


def rows_of(
    orchestrated: Orchestrated, spark: SparkSession, scd: int, condition: str = "true"
) -> list[tuple[str, ...]]:
    path = table_path(orchestrated.lake, NAME, "public", "a", scd)
    rows = spark.read.format("delta").load(path).where(condition)
    names = [name for name in rows.columns if not name.startswith("_")]
    return sorted(tuple(str(value) for value in row) for row in rows.select(*names).collect())


def current_versions(orchestrated: Orchestrated, spark: SparkSession) -> list[tuple[str, ...]]:
    return rows_of(orchestrated, spark, 2, "_is_current")


def source_rows(orchestrated: Orchestrated) -> list[tuple[str, ...]]:
    rows = orchestrated.database.query("select * from a")
    return sorted(tuple(str(value) for value in row) for row in rows)


@pytest.mark.sampled
def test_one_sync_heals_a_change_that_cannot_be_replayed(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """F5, F3: a column with another type, then a rewritten table that only the catalog shows."""
    orchestrated = with_policy(orchestrated, "follow")
    database = orchestrated.database
    orchestrated.sync()
    database.execute("update a set v = 'before' where id = 1")
    database.execute("alter table a alter column v type int using id")
    database.execute("update a set v = 70 where id = 2; insert into b values (1, 1)")
    orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")
    assert current_versions(orchestrated, spark) == source_rows(orchestrated)
    (first,) = resnapshots(orchestrated)
    assert "public.a" in first.tags[REASON_TAG]
    path = table_path(orchestrated.lake, NAME, "public", "a", 2)
    history = spark.read.format("delta").load(path)
    # The update before the schema change is a version too.
    assert history.where("id = 1").count() == 3

    database.execute("alter table a add column n float default random()")
    orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert current_versions(orchestrated, spark) == source_rows(orchestrated)
    assert read_gates(orchestrated.zone, orchestrated.capture) == {}
    newest = max(
        (e for e in orchestrated.zone.schema_events.read() if e.needs_snapshot),
        key=lambda event: event.position,
    )
    assert (newest.table, newest.columns) == (A, ("n",))
    second, *_ = resnapshots(orchestrated)
    assert newest.detail in second.tags[REASON_TAG]
    entry = orchestrated.instance.get_latest_materialization_event(dg.AssetKey([NAME, "snapshot"]))
    assert entry is not None
    assert entry.asset_materialization is not None
    metadata = entry.asset_materialization.metadata
    assert newest.detail in str(metadata["reason"].value)
    assert Lsn.parse(str(metadata["snapshot_lsn"].value)) >= newest.lsn

    done = len(resnapshots(orchestrated))
    assert orchestrated.sync().merge_count == 0
    assert len(resnapshots(orchestrated)) == done
    assert all(run.is_success for run in orchestrated.instance.get_runs())


@pytest.mark.soak
def test_a_sync_with_nothing_to_capture_merges_the_snapshot_that_it_takes(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """The snapshot is above the end of the WAL at the start of the sync."""
    orchestrated = with_policy(orchestrated, "follow")
    orchestrated.sync()
    orchestrated.sync()
    event = catalog_event(orchestrated, "v")
    orchestrated.sync()
    [newest] = {
        snapshot.position
        for snapshot in orchestrated.zone.snapshots.complete_snapshots()
        if snapshot.name == A and snapshot.position >= event.position
    }
    states = read_state(orchestrated.zone, orchestrated.capture).tables
    marks = [state.watermark for state in states if state.table.name == A]
    assert all(mark is not None and mark >= newest for mark in marks), (newest, marks)


def shown(orchestrated: Orchestrated) -> tuple[dg.AssetCheckEvaluation, dict[str, object]]:
    """Return the check of the table, and the newest observation of its source asset."""
    check = dg.AssetCheckKey(dg.AssetKey([NAME, "scd1", "public", "a"]), SCHEMA_CHANGES)
    storage = orchestrated.instance.event_log_storage
    record = storage.get_latest_asset_check_execution_by_key([check])[check]
    assert isinstance(record.evaluation, dg.AssetCheckEvaluation)
    source = dg.AssetKey([NAME, "source", "public", "a"])
    (newest,) = orchestrated.instance.fetch_observations(source, limit=1).records
    assert newest.asset_observation is not None
    return record.evaluation, {k: v.value for k, v in newest.asset_observation.metadata.items()}


def status_of(orchestrated: Orchestrated, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "pgcdc_assets.cli.status"
    monkeypatch.setattr(f"{module}.load_location", lambda _: orchestrated.location)
    monkeypatch.setattr(f"{module}.open_instance", lambda: nullcontext(orchestrated.instance))
    assert main(["status"]) == 0


@pytest.mark.soak
def test_a_waiting_table_folds_earlier_changes_and_others_continue(
    orchestrated: Orchestrated,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    orchestrated = with_policy(orchestrated, "follow")
    orchestrated.sync()
    orchestrated.commit("update a set v = 'before' where id = 1; insert into b values (1, 1)")
    event = catalog_event(orchestrated, "v")
    orchestrated.commit("update a set v = 'after' where id = 2; insert into b values (2, 2)")
    assert orchestrated.execute(request_for(orchestrated, "capture"), "capture").success
    (request,) = orchestrated.tick("merges").run_requests
    result = orchestrated.execute(request, "merge")
    assert result.success
    events = result.get_asset_materialization_events()
    assert {e.asset_key.path[-1] for e in events if e.asset_key} == {"b"}
    assert orchestrated.equals_source("b")
    path = table_path(orchestrated.lake, NAME, "public", "a", 1)
    rows = spark.read.format("delta").load(path)
    assert rows.where("v = 'before'").count() == 1
    assert rows.where("v = 'after'").count() == 0
    key = dg.AssetKey([NAME, "scd1", "public", "a"])
    (record,) = orchestrated.instance.fetch_observations(key, limit=5).records
    assert record.asset_observation is not None
    said = {k: v.value for k, v in record.asset_observation.metadata.items()}
    assert str(event.lsn) in str(said["waits_for"])
    assert Lsn.parse(str(said["watermark"])) == event.lsn - 1

    evaluation, observed = shown(orchestrated)
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert str(event.lsn) in (evaluation.description or "")
    assert str(event.lsn) in str(observed["open_changes"])
    columns = observed["dagster/column_schema"]
    assert isinstance(columns, dg.TableSchema)
    assert [column.name for column in columns.columns] == ["id", "v"]
    status_of(orchestrated, monkeypatch)
    out = capsys.readouterr().out
    assert "SCHEMA CHANGE public.a: column_added (v) at " in out
    assert "The lag sensor requests a re-snapshot." in out
    assert out.count("waits for a re-snapshot") == 2

    # No merge of the table is requested before its snapshot, which the lag sensor requests.
    waiting = orchestrated.tick("merges")
    assert waiting.run_requests == []
    assert waiting.skip_message == "waiting for a re-snapshot: public.a"
    orchestrated.commit("insert into a values (500, 'later')")
    assert orchestrated.execute(request_for(orchestrated, "capture"), "capture").success
    assert orchestrated.tick("merges").run_requests == []
    assert orchestrated.execute(request_for(orchestrated, "snapshot"), "snapshot").success
    orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert current_versions(orchestrated, spark) == source_rows(orchestrated)
    assert orchestrated.tick("merges").skip_message == (
        "every table is merged through the newest window"
    )
    evaluation, observed = shown(orchestrated)
    assert (evaluation.passed, observed["open_changes"]) == (True, "none")
    assert str(event.lsn) in (evaluation.description or "")


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["ask", "stop"])
def test_with_ask_a_change_that_the_stream_does_not_show_stops_the_table(
    orchestrated: Orchestrated, spark: SparkSession, policy: str
) -> None:
    orchestrated = with_policy(orchestrated, policy)
    orchestrated.sync()
    event = catalog_event(orchestrated, "v")
    orchestrated.commit("update a set v = 'after' where id = 2; insert into b values (2, 2)")
    with pytest.raises(PgcdcError, match=rf"volatile.*{event.lsn}.*resnapshot t public\.a"):
        orchestrated.sync()
    assert orchestrated.equals_source("b")
    assert resnapshots(orchestrated) == []
    sync_capture(
        orchestrated.instance,
        orchestrated.location,
        orchestrated.location.captures[NAME],
        limits=LIMITS,
        resnapshot=orchestrated.capture.tables[:1],
    )
    assert orchestrated.equals_source("a")


@pytest.mark.sampled
def test_a_change_that_was_merged_with_another_setting_does_not_stop_the_table(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    following, database = with_policy(orchestrated, "follow"), orchestrated.database
    following.sync()
    database.execute("alter table a add column n int default 7")
    following.commit("update a set v = 'changed' where id = 1")
    following.sync()

    stopping = with_policy(orchestrated, "stop")
    stopping.commit("insert into a values (11, 'new', 8)")
    stopping.sync()
    assert stopping.equals_source("a")
    assert current_versions(stopping, spark) == source_rows(stopping)
    assert read_gates(stopping.zone, stopping.capture) == {}
    for scd in (1, 2):
        rebuild_table(spark, stopping.zone, stopping.capture.tables[0], scd)
    assert stopping.equals_source("a")
    assert current_versions(stopping, spark) == source_rows(stopping)

    database.execute("alter table a add column m int")
    stopping.commit("update a set m = 1 where id = 1")
    with pytest.raises(PgcdcError, match="column_added"):
        stopping.sync()
    (gate,) = read_gates(stopping.zone, stopping.capture).values()
    assert {event.columns for event in gate.events} == {("m",)}
    path = table_path(stopping.lake, NAME, "public", "a", 1)
    assert "m" not in spark.read.format("delta").load(path).columns
    with pytest.raises(PgcdcError, match="column_added"):
        rebuild_table(spark, stopping.zone, stopping.capture.tables[0], 1)


@pytest.mark.soak
def test_a_sync_ends_while_schema_changes_continue(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """A16: schema changes after the start are healed by the next sync."""
    orchestrated = with_policy(orchestrated, "follow")
    orchestrated.sync()
    database = orchestrated.database
    database.execute("alter table a add column n float default random()")
    added = 0

    def alter(line: str) -> None:
        nonlocal added
        if not line.startswith(f"{NAME}_merge") and added < 6:
            added += 1
            database.execute(f"alter table a add column n{added} float default random()")
            database.execute("update a set v = v || 'x' where id = 1")

    orchestrated.sync(alter)
    assert added < 6
    assert len(resnapshots(orchestrated)) == 1
    assert read_gates(orchestrated.zone, orchestrated.capture)
    orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert current_versions(orchestrated, spark) == source_rows(orchestrated)
    assert len(resnapshots(orchestrated)) == 2


@pytest.mark.soak
def test_assets_of_tables_with_exchanged_names_follow_the_names(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """Each asset follows the table with its declared name. The rows of the previous table end."""
    orchestrated = with_policy(orchestrated, "follow")
    database = orchestrated.database
    orchestrated.sync()
    database.execute("update a set v = 'before' where id = 1; insert into b values (100, 1.5)")
    database.execute(
        "alter table a rename to tmp; alter table b rename to a; alter table tmp rename to b"
    )
    # Now `a` has the numbers and `b` has the texts.
    database.execute("insert into a values (101, 2.5); update b set v = 'after' where id = 2")
    orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")
    path = table_path(orchestrated.lake, NAME, "public", "a", 2)
    history = spark.read.format("delta").load(path)
    current = history.where("_is_current").selectExpr("id", "CAST(n AS STRING)").collect()
    assert sorted(map(tuple, current)) == [(100, "1.50"), (101, "2.50")]
    # Ended versions are from the table that had the name, with the update before the exchange.
    past = history.where("NOT _is_current")
    assert past.select("id").distinct().count() == 10
    assert past.where("v = 'before'").count() == 1
    assert past.where("v = 'after'").count() == 0
    assert read_gates(orchestrated.zone, orchestrated.capture) == {}
    database.execute("insert into a values (102, 3.5); delete from b where id = 3")
    orchestrated.sync()
    assert orchestrated.equals_source("a")
    assert orchestrated.equals_source("b")


@pytest.mark.soak
def test_a_resnapshot_heals_a_changed_key(orchestrated: Orchestrated, spark: SparkSession) -> None:
    """F9: a key of another column, a unique index in place of the key, and no key."""
    orchestrated = with_policy(orchestrated, "follow")
    database = orchestrated.database
    database.execute("alter table a add column other int, add column text_key text")
    database.execute("update a set other = 1000 - id, text_key = 'k' || id")
    orchestrated.sync()

    def heals(*statements: str) -> None:
        for statement in statements:
            database.execute(statement)
        orchestrated.sync()
        assert orchestrated.equals_source("a"), statements
        assert current_versions(orchestrated, spark) == source_rows(orchestrated), statements
        assert read_gates(orchestrated.zone, orchestrated.capture) == {}
        changes = {event.change for event in orchestrated.zone.schema_events.read()}
        assert SchemaChange.TYPE_CHANGED not in changes

    heals(
        "alter table a drop constraint a_pkey, add primary key (other)",
        "update a set id = 7 where other = 999; delete from a where other = 998",
    )
    heals(
        "alter table a alter text_key set not null; create unique index by_text on a (text_key)",
        "alter table a replica identity using index by_text",
        "update a set other = other + 5000 where text_key = 'k3'; delete from a where id = 4",
    )
    # The history needs a key, but the current image does not.
    database.execute("drop index by_text; alter table a drop constraint a_pkey")
    database.execute("alter table a replica identity full; insert into a select * from a")
    database.execute("update a set v = 'all' where id = 5; delete from a where id = 6")
    with pytest.raises(PgcdcError, match=r"public\.a has .* no primary key.*ADD PRIMARY KEY"):
        orchestrated.sync()
    assert rows_of(orchestrated, spark, 1) == source_rows(orchestrated)
