"""A snapshot of a standby is exact at its LSN, without a pause of the replay (C1, C2)."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConfigurationError, ConnectionLost, SnapshotEnded, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.relations import published_tables
from pgcdc_assets.postgres.connection import connect, query_connection
from pgcdc_assets.postgres.copy.reader import SnapshotReader, begin_at
from pgcdc_assets.postgres.copy.transport import copy_chunks
from pgcdc_assets.postgres.preflight.snapshot_standby import examine_snapshot_standby
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets.postgres.snapshots import standby as standby_snapshot
from pgcdc_assets.postgres.snapshots.standby import check_standby, export_standby_snapshot
from pgcdc_assets.postgres.stream.transport import ServerError
from pgcdc_assets.postgres.wal import stream as wal_stream
from pgcdc_assets.postgres.wal.records import WalRange
from pgcdc_assets_tests.support.database import Database, create_database, drop_database
from pgcdc_assets_tests.support.handover import writers
from pgcdc_assets_tests.support.postgres.wire import peek
from pgcdc_assets_tests.support.preflight import findings_of, problems_in
from pgcdc_assets_tests.support.standby import Source
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

Rows = Counter[tuple[str | None, ...]]

# Writers pause, so that some snapshots are between two commits. The table `bag` has no key.
STATEMENTS = (
    "insert into t values (%s, 1) on conflict do nothing",
    "update t set n = n + 1 where id = %s",
    "delete from t where id = %s",
    "insert into bag values (%s %% 5, 1)",
    "update bag set n = n + 1 where id = %s %% 5",
    "delete from bag where ctid = (select ctid from bag where id = %s %% 5 limit 1)",
    "select pg_sleep(0.0005 * (%s %% 8))",
)


def _rows_at(changes: list[Any], table: str, lsn: Lsn) -> Rows:
    """Return the rows of a table that began empty, as of an LSN."""
    rows: Rows = Counter()
    for change in changes:
        if change.table == table and change.commit_lsn < lsn:
            if change.op in "UD":
                old = change.key if table == "public.bag" else None
                key = (change.key or change.new)[0]
                gone = tuple(old) if old else next(row for row in rows if row[0] == key)
                assert rows[gone]
                rows[gone] -= 1
                rows += Counter()
            if change.op in "IU":
                rows[tuple(change.new)] += 1
    return rows


def _export(source: Source) -> tuple[dict[str, Rows], Lsn]:
    """Return the rows of a snapshot of the standby, and its LSN."""
    standby = source.standby.settings()
    with (
        export_standby_snapshot(source.primary.settings(), standby) as snapshot,
        query_connection(standby, "test") as conn,
        conn.cursor() as cursor,
    ):
        begin_at(conn, snapshot.snapshot_name)
        found = {}
        for table in ("t", "bag"):
            cursor.execute(f"select id::text, n::text from public.{table}")
            found[f"public.{table}"] = Counter(cursor.fetchall())
        return found, snapshot.consistent_point


@contextlib.contextmanager
def _streamed(source: Source) -> Iterator[list[Any]]:
    """Create two tables and a slot, and add all changes at the end of the block."""
    database = source.primary
    database.execute(
        "create table t (id int primary key, n int); create table bag (id int, n int); "
        "alter table bag replica identity full; create publication pub for table t, bag"
    )
    changes: list[Any] = []
    with create_slot(database.settings(), f"s_{database.name}"):
        pass
    yield changes
    with query_connection(database.settings(), "test", statement_timeout_ms=0) as conn:
        changes += peek(conn, f"s_{database.name}", "pub").changes


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.parametrize("delay", ["", " from pg_sleep(0.004)"], ids=["fast", "slow"])
def test_snapshots_of_a_standby_are_exact_while_writers_commit(
    source: Source, seed: int, monkeypatch: pytest.MonkeyPatch, delay: str
) -> None:
    """C2: with a delay after the snapshot, most attempts have a commit in between."""
    position = "pg_last_wal_replay_lsn()::text"
    head, export = standby_snapshot._ATTEMPT.rsplit(position, 1)
    slow = f"{head}(select {position}{delay}){export}"
    monkeypatch.setattr(standby_snapshot, "_ATTEMPT", slow)
    # Each commit is sent at once, and not with others from time to time.
    source.primary.execute(f"alter database {source.primary.name} set synchronous_commit = on")
    with _streamed(source) as changes:
        with writers(source.primary, 3, seed, STATEMENTS, key_count=60):
            made = []
            for _ in range(12):
                made.append(_export(source))
                time.sleep(0.01)
    assert [lsn for _, lsn in made] == sorted({lsn for _, lsn in made})
    assert len(changes) > 100
    for found, lsn in made:
        for table, rows in found.items():
            assert rows == _rows_at(changes, table, lsn), (table, lsn)
    assert len({tuple(found["public.bag"].items()) for found, _ in made}) > 1


def test_a_commit_that_may_be_applied_already_prevents_the_proof(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: the position that a standby reports is behind the record that it applies."""
    monkeypatch.setattr(standby_snapshot, "_ATTEMPT_SECONDS", 0.3)
    wait = standby_snapshot._wait_for_replay
    primary, admin = source.primary, source.standby

    def wait_and_pause(*arguments: Any) -> None:
        wait(*arguments)
        admin.execute("select pg_wal_replay_pause()")
        open_transaction.commit()
        time.sleep(0.7)

    monkeypatch.setattr(standby_snapshot, "_wait_for_replay", wait_and_pause)
    with _streamed(source), primary.connect(autocommit=False) as open_transaction:
        with open_transaction.cursor() as cursor:
            cursor.execute("insert into t values (1, 1)")
        try:
            with pytest.raises(TransientError, match="replays commits all the time"):
                _export(source)
        finally:
            admin.execute("select pg_wal_replay_resume()")
        monkeypatch.setattr(standby_snapshot, "_wait_for_replay", wait)
        assert _export(source)[0]["public.t"] == Counter([("1", "1")])


def test_a_snapshot_has_what_was_committed_before_and_waits_for_no_writer(source: Source) -> None:
    """C12: nothing is written in between, and yet two snapshots have two LSNs."""
    with _streamed(source) as changes, source.primary.connect(autocommit=False) as old:
        with old.cursor() as cursor:
            cursor.execute("insert into t values (2, 0)")
        source.primary.execute("insert into t values (1, 0)")
        first, second = _export(source), _export(source)
        old.commit()
    assert first[0]["public.t"] == second[0]["public.t"] == Counter([("1", "0")])
    assert first[1] < second[1]
    assert [change.commit_lsn < first[1] for change in changes] == [True, False]
    paused = "select pg_is_wal_replay_paused()"
    assert source.standby.value(paused) is False


def test_a_standby_that_is_behind_or_paused_is_waited_for_with_a_bound(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_snapshot, "_REPLAY_SECONDS", 0.3)
    source.standby.execute("select pg_wal_replay_pause()")
    try:
        [found, paused, _] = examine_snapshot_standby(
            source.primary.settings(), source.standby.settings()
        )
        assert (found.severity, paused.severity) == ("ok", "warning")
        assert "its replay is paused" in paused.message
        with pytest.raises(TransientError) as caught:
            _export(source)
    finally:
        source.standby.execute("select pg_wal_replay_resume()")
    reached = source.standby.settings().describe()
    assert f"{reached} has replayed WAL to " in str(caught.value)
    assert f"{source.primary.settings().describe()} was at " in str(caught.value)
    assert "its replay is paused. Resume it with: select pg_wal_replay_resume()" in str(
        caught.value
    )


def test_a_server_that_is_no_standby_of_the_primary_is_refused(
    source: Source, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, standby = source.primary.settings(), source.standby.settings()
    assert check_standby(primary, standby) == 1
    [found, feedback] = examine_snapshot_standby(primary, standby)
    assert (found.severity, feedback.severity) == ("ok", "warning")
    assert "hot_standby_feedback = off" in feedback.message
    assert "30s (max_standby_streaming_delay)" in feedback.message
    [refused] = examine_snapshot_standby(primary, primary)
    assert refused.severity == "error"
    with pytest.raises(ConfigurationError, match=r"is not a standby\. Name"):
        check_standby(primary, primary)
    with pytest.raises(ConfigurationError, match="is a standby itself"):
        check_standby(standby, standby)
    admin = Database(source.standby.server, "postgres").settings()
    with pytest.raises(ConfigurationError, match=f"another database .*, {source.primary.name}"):
        check_standby(primary, admin)
    other = create_database(server)
    try:
        with pytest.raises(ConfigurationError, match="belongs to another cluster"):
            check_standby(other.settings(), standby)
    finally:
        drop_database(other)

    def read_other_wal(settings: Any, timeline: int, start: Lsn, end: Lsn) -> bytes:
        found = read(settings, timeline, start, end)
        return found if settings is primary else found[:-1] + bytes([found[-1] ^ 1])

    # Two servers of one backup, which continued apart, have one system identifier.
    read = wal_stream.read_wal
    monkeypatch.setattr(standby_snapshot, "read_wal", read_other_wal)
    with (
        pytest.raises(ConfigurationError, match="were copied from one"),
        export_standby_snapshot(primary, standby),
    ):
        pass


def test_a_slot_on_a_standby_that_the_primary_does_not_wait_for_is_a_warning(
    source: Source,
) -> None:
    """B17: the primary's VACUUM removes rows of the catalog, and the standby loses the slot."""
    source.primary.execute(
        "create table t (id int primary key); create publication pub for table t"
    )
    source.wait_for_replay()
    settings = source.standby.settings()
    feedback, physical = ("hot_standby_feedback", None), ("primary_slot_name", None)
    problems = problems_in(findings_of(settings))
    assert set(problems) == {feedback}
    assert problems[feedback].startswith("warning: The server is a standby with hot_standby_feedb")
    assert "alter system set hot_standby_feedback = on; select pg_reload" in problems[feedback]
    with source.standby_setting("hot_standby_feedback", "on"):
        assert problems_in(findings_of(settings)) == {}
        admin = Database(source.standby.server, "postgres")
        admin.execute("alter system set primary_slot_name = ''")
        admin.value("select pg_reload_conf()")
        try:
            wait_until(lambda: not admin.value("show primary_slot_name"), "the setting")
            problems = problems_in(findings_of(settings))
        finally:
            admin.execute("alter system set primary_slot_name = 'standby'")
            admin.value("select pg_reload_conf()")
        assert set(problems) == {physical}
        assert "pg_create_physical_replication_slot" in problems[physical]


ROWS = """
create table t (id int primary key, n int) with (autovacuum_enabled = off);
insert into t select i, 0 from generate_series(1, 200) i;
create publication pub for table t
"""


@contextlib.contextmanager
def _reader(source: Source) -> Iterator[tuple[SnapshotReader, Any]]:
    """Yield a reader of a snapshot of the standby, and table `t`."""
    primary, standby = source.primary.settings(), source.standby.settings()
    with export_standby_snapshot(primary, standby) as snapshot:
        with query_connection(primary, "test") as conn:
            [table] = published_tables(conn, "pub")
        with SnapshotReader(standby, snapshot.snapshot_name, primary=primary) as reader:
            yield reader, table


def _end_holder(source: Source) -> None:
    name = "application_name like 'pgcdc snapshot%'"
    source.standby.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {name}")
    source.wait_for_replay()


@pytest.mark.every_pg
def test_a_reader_that_comes_during_a_conflict_does_not_miss_rows_in_silence(
    source: Source,
) -> None:
    """C1, C3: the standby removes rows as soon as the sessions that it found have ended."""
    source.primary.execute(ROWS)
    with source.standby_setting("max_standby_streaming_delay", "-1"):
        with _reader(source) as (reader, table):
            source.primary.execute("delete from t where id <= 50")
            source.primary.execute("vacuum (truncate off) t")
            waits = "select wait_event from pg_stat_activity where backend_type = 'startup'"
            wait_until(
                lambda: source.standby.value(waits) == "RecoveryConflictSnapshot", "the conflict"
            )
            reader.open()
            assert sum(rows.num_rows for rows in reader.read(table)) == 200
            rows = reader.read(table)
            _end_holder(source)
            count = 0
            with pytest.raises(SnapshotEnded, match="set hot_standby_feedback = on"):
                for batch in rows:
                    count += batch.num_rows
            assert count == 150


@pytest.mark.every_pg
def test_a_session_that_was_idle_in_a_conflict_says_so(source: Source) -> None:
    """C3: over libpq, the standby has closed the connection without an SQLSTATE."""
    source.primary.execute(ROWS)
    with (
        _reader(source) as (reader, table),
        contextlib.closing(connect(source.standby.settings(), "raw")) as raw,
    ):
        reader.open()
        begin_at(raw, reader._snapshot_name)
        source.remove_rows("id <= 50")
        # The connection is known as not encrypted: no statement comes before the copy.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pgcdc_assets.postgres.copy.transport._is_encrypted", lambda _: False)
            with pytest.raises(ServerError) as ended:
                list(copy_chunks(source.standby.settings(), raw, "copy public.t to stdout"))
        assert ended.value.sqlstate == "40001"
        with pytest.raises(SnapshotEnded, match="the replay of WAL was in conflict"):
            list(reader.read(table))


@pytest.mark.every_pg
def test_a_lost_connection_is_no_conflict_and_names_the_server_that_was_lost(
    source: Source,
) -> None:
    source.primary.execute(ROWS)
    ended = "select pg_terminate_backend(pid) from pg_stat_activity where application_name like %s"
    for lost, purpose in ((source.standby, "pgcdc copy%"), (source.primary, "pgcdc catalog%")):
        with _reader(source) as (reader, table):
            reader.open()
            lost.execute(ended, (purpose,))
            with pytest.raises(ConnectionLost) as caught:
                list(reader.read(table))
            assert lost.settings().describe() in str(caught.value)
            # A new connection imports the snapshot, which is still held.
            assert sum(rows.num_rows for rows in reader.read(table)) == 200


def test_a_snapshot_that_conflicts_end_is_exported_again(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3: the session that exports ends while its LSN is proved."""
    source.primary.execute(ROWS)
    read, turns = wal_stream.read_wal, itertools.count(1)

    def read_and_remove(*arguments: Any) -> bytes:
        if next(turns) == 1:
            source.remove_rows("id <= 50")
        return read(*arguments)

    monkeypatch.setattr(standby_snapshot, "read_wal", read_and_remove)
    is_proved = WalRange.has_commit
    first = iter((True,))
    monkeypatch.setattr(
        WalRange,
        "has_commit",
        lambda *arguments: next(first, False) or is_proved(*arguments),
    )
    with _reader(source) as (reader, table):
        assert sum(rows.num_rows for rows in reader.read(table)) == 150
    assert next(turns) > 3
