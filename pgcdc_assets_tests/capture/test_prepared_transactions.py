"""Prepared transactions land once, at their COMMIT PREPARED, over restarts of the capture."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.errors import DefiniteError, RawZoneError
from pgcdc_assets.postgres.stream.plugin_options import Streaming
from pgcdc_assets.raw.delta.log_entries import commit_path
from pgcdc_assets.raw.maintenance import maintain_raw_zone
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.prepared import (
    capture,
    stored_gids,
    stored_row_count,
    two_phase_limits,
)

pytestmark = [pytest.mark.postgres]


@pytest.fixture
def begun(capturing: Capturing) -> Capturing:
    """Return a capture of a table, whose slot has two_phase already."""
    if int(capturing.database.value("show server_version_num")) < 150000:
        pytest.skip("two_phase requires Postgres 15")
    capturing.begin("create table t (id int primary key, note text)")
    capturing.database.execute("insert into t values (0, 'before')")
    capture(capturing)
    return capturing


@pytest.mark.every_pg
def test_a_transaction_lands_at_its_commit_in_a_later_session(begun: Capturing) -> None:
    database = begun.database
    database.prepare("g", "insert into t values (1, 'a')", "update t set note = 'b' where id = 1")
    database.execute("insert into t values (2, 'between')")
    capture(begun)
    assert begun.texts("t") == [["0", "before"], ["2", "between"]]
    assert stored_gids(begun) == ["g"]
    assert begun.confirmed() == begun.captured_through()

    database.end_prepared("g")
    commit_lsn_is_above = begun.captured_through()
    report = capture(begun)
    assert report.row_count == 2
    assert begun.texts("t")[2:] == [["1", "a"], ["1", "b"]]
    rows = begun.rows()[2:]
    assert [row["ordinal"] for row in rows] == [0, 1]
    assert all(row["commit_lsn"] >= commit_lsn_is_above for row in rows)
    assert stored_gids(begun) == []
    assert stored_row_count(begun) == 0


def test_a_rollback_drops_the_rows(begun: Capturing) -> None:
    begun.database.prepare("g", "insert into t values (1, 'a')")
    capture(begun)
    assert stored_gids(begun) == ["g"]
    begun.database.end_prepared("g", "rollback")
    begun.database.execute("insert into t values (2, 'after')")
    capture(begun)
    assert begun.texts("t") == [["0", "before"], ["2", "after"]]
    assert stored_row_count(begun) == 0


def test_a_landed_window_counts_if_ended_transactions_cannot_be_removed(
    begun: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun.database.prepare("g", "insert into t values (1, 'a')")
    capture(begun)
    begun.database.end_prepared("g")
    entry = Path(begun.zone.prepared.table.uri, commit_path(0))
    content = entry.read_bytes()

    def damage(name: str) -> None:
        if name == failpoints.AFTER_DELTA_COMMIT:
            entry.write_bytes(b"damaged")

    monkeypatch.setattr(failpoints, "reach", damage)
    assert capture(begun).row_count == 1
    entry.write_bytes(content)
    assert begun.confirmed() == begun.captured_through()
    assert stored_row_count(begun) > 0
    maintain_raw_zone(begun.zone, minimum_log_entries=1)
    assert stored_row_count(begun) == 0


@pytest.mark.parametrize("mode", [Streaming.OFF, Streaming.ON])
def test_within_a_window_nothing_is_stored(begun: Capturing, mode: Streaming) -> None:
    begun.database.prepare("g", "insert into t values (1, 'a')", end="commit")
    begun.database.prepare("g", "insert into t values (2, 'b')", end="rollback")
    begun.database.prepare("g", "insert into t values (3, 'c')", end="commit")
    capture(begun, streaming=mode)
    assert begun.texts("t") == [["0", "before"], ["1", "a"], ["3", "c"]]
    table = begun.zone.prepared.table.load()
    assert table is not None
    assert table.version() == 1


@pytest.mark.sampled
@pytest.mark.parametrize(
    "gid", ["", 'it\'s "quoted" \\ / %2F;--', "é" * 99, "x" * 199, "new\nline\ttab"]
)
def test_any_gid_is_found_again(begun: Capturing, gid: str) -> None:
    begun.database.prepare(gid, "insert into t values (1, 'a')")
    capture(begun)
    assert stored_gids(begun) == [gid]
    begun.database.end_prepared(gid)
    capture(begun)
    assert begun.texts("t") == [["0", "before"], ["1", "a"]]
    assert stored_gids(begun) == []


@pytest.mark.sampled
def test_a_gid_is_used_again(begun: Capturing) -> None:
    """Each use ends in a window of its own, and one transaction of the file stays open."""
    begun.database.prepare("open", "insert into t values (9, 'open')")
    for number in (1, 2, 3):
        begun.database.prepare("g", f"insert into t values ({number}, 'a')")
        capture(begun)
        assert stored_gids(begun) == ["open", "g"]
        begun.database.end_prepared("g", "rollback" if number == 2 else "commit")
        capture(begun)
    assert begun.texts("t") == [["0", "before"], ["1", "a"], ["3", "a"]]
    assert stored_gids(begun) == ["open"]
    begun.database.end_prepared("open")
    capture(begun)
    assert begun.texts("t")[-1] == ["9", "open"]
    assert stored_row_count(begun) == 0


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.parametrize("mode", [Streaming.OFF, Streaming.ON])
def test_transactions_without_a_row_of_the_publication(begun: Capturing, mode: Streaming) -> None:
    database = begun.database
    database.execute("create schema other; create unlogged table other.u (id int)")
    for end in ("", "commit", "rollback"):
        database.prepare(f"locks {end}", "select * from t for share", end=end)
        database.prepare(f"xid {end}", "select pg_current_xact_id()", end=end)
        database.prepare(f"other {end}", "insert into other.u values (1)", end=end)
        database.prepare(f"nothing {end}", end=end)
        capture(begun, streaming=mode)
    for gid in ("locks ", "xid ", "other ", "nothing "):
        database.end_prepared(gid)
    database.execute("insert into t values (1, 'a')")
    capture(begun, streaming=mode)
    assert begun.texts("t") == [["0", "before"], ["1", "a"]]
    assert stored_gids(begun) == []


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.parametrize("mode", [Streaming.OFF, Streaming.ON])
@pytest.mark.parametrize("is_stored", [False, True])
def test_subtransactions_messages_and_truncates(
    begun: Capturing, mode: Streaming, is_stored: bool
) -> None:
    database = begun.database
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    database.execute("create table u (id int); alter table u replica identity full")
    database.prepare(
        "g",
        "insert into t select i, repeat('x', 100) from generate_series(1, 900) i",
        "savepoint a",
        "insert into u select i from generate_series(1, 900) i",
        "rollback to a",
        "insert into u values (1), (2)",
        "savepoint b",
        "update u set id = 3 where id = 2",
        "select pg_logical_emit_message(true, 'outbox', 'text')",
        "release b",
        "delete from t where id > 5",
        "truncate u",
    )
    if is_stored:
        capture(begun, streaming=mode)
    database.end_prepared("g")
    capture(begun, streaming=mode)
    rows = [(row["op"], row["table"]) for row in begun.rows()[1:]]
    assert rows[900:905] == [("I", "u"), ("I", "u"), ("U", "u"), ("M", None), ("D", "t")]
    assert (rows[-1], len(rows)) == (("T", "u"), 900 + 4 + 895 + 1)
    update = begun.rows()[903]
    assert (update["old_kind"], update["old"], update["new"]) == ("O", ["2"], ["3"])
    assert [row["ordinal"] for row in begun.rows()[1:]] == list(range(len(rows)))


_FILL = "insert into t select i, repeat('x', 100) from generate_series(10, 900) i"


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("first_version", "statements"),
    [
        (15, ["savepoint s", "truncate t", "insert into t values (1)", "release s"]),
        # The changes before the savepoint exceed logical_decoding_work_mem.
        (18, ["truncate t", _FILL, "savepoint s", "insert into t values (1)", "release s"]),
    ],
    ids=["truncate", "insert"],
)
def test_a_rollback_that_postgres_cannot_decode_is_explained(
    begun: Capturing, first_version: int, statements: list[str]
) -> None:
    """Decision 75: the rows of the catalog that the transaction has written are gone."""
    name = begun.database.name
    begun.database.execute(f"alter database {name} set logical_decoding_work_mem = '64kB'")
    begun.database.prepare("g", *statements, end="rollback")
    begun.database.execute("vacuum pg_class")
    confirmed = begun.confirmed()
    if begun.database.server.version < first_version:
        capture(begun)
        return
    with pytest.raises(DefiniteError, match=r"Slot .* prepared transaction .*renew --name test"):
        capture(begun)
    assert begun.confirmed() == confirmed


@pytest.mark.sampled
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_columns_of_a_prepared_alter_table(begun: Capturing, end: str, is_stored: bool) -> None:
    """A rolled back ALTER TABLE leaves no relation version, and later rows are read right."""
    database = begun.database
    database.prepare(
        "g", "alter table t add extra int default 7", "insert into t values (1, 'a', 8)"
    )
    if is_stored:
        capture(begun)
    database.end_prepared("g", end)
    columns = 3 if end == "commit" else 2
    database.execute("insert into t values (2, 'b')")
    capture(begun)
    database.execute("insert into t values (3, 'c')")
    capture(begun)
    versions = begun.zone.relations.versions(1)
    assert [len(version.relation.columns) for version in versions] == [2, 3][: columns - 1]
    expected = [["2", "b", "7"][:columns], ["3", "c", "7"][:columns]]
    if end == "commit":
        expected.insert(0, ["1", "a", "8"])
    assert begun.texts("t")[1:] == expected
    assert begun.rows()[-1]["relation_version"] == versions[-1].version


def test_rows_of_whole_transactions_after_a_prepared_announcement(capturing: Capturing) -> None:
    """The server announces a table once per stream, here inside a prepared transaction."""
    capturing.begin("create table t (id int primary key, note text)")
    capturing.database.prepare("g", "insert into t values (1, 'a')")
    capturing.database.execute("insert into t values (2, 'b')")
    capturing.database.prepare("h", "insert into t values (3, 'c')", end="commit")
    with capturing.session(two_phase_limits()) as session:
        session.land(capturing.window())
        capturing.database.execute("insert into t values (4, 'd')")
        capturing.database.end_prepared("g")
        session.land(capturing.window())
    assert capturing.texts("t") == [["2", "b"], ["3", "c"], ["4", "d"], ["1", "a"]]
    assert [row["relation_version"] for row in capturing.rows()] == [1] * 4


@pytest.mark.every_pg(since=18)
def test_rows_that_another_program_made_the_server_forget_are_an_error(begun: Capturing) -> None:
    """Postgres 18 switches a slot without a memory of the transactions prepared before."""
    if int(begun.database.value("show server_version_num")) < 180000:
        pytest.skip("ALTER_REPLICATION_SLOT has two_phase from Postgres 18 on")
    switch = f"ALTER_REPLICATION_SLOT {begun.slot} (TWO_PHASE %s)"
    begun.database.replication_command(switch % "false")
    begun.database.prepare("g'", "insert into t values (1, 'a')")
    begun.capture()
    begun.database.replication_command(switch % "true")
    begun.database.end_prepared("g'")
    end = begun.captured_through()
    with pytest.raises(RawZoneError, match='prepared transaction "g\'"'):
        capture(begun)
    assert begun.confirmed() == begun.captured_through() == end


@pytest.mark.sampled
@pytest.mark.parametrize(
    "mode", [pytest.param(Streaming.OFF, marks=pytest.mark.soak), Streaming.ON]
)
def test_a_million_rows_in_little_memory(begun: Capturing, mode: Streaming) -> None:
    begun.database.prepare(
        "g", "insert into t select i, md5(i::text) from generate_series(1, 1000000) i"
    )
    first = begun.capture_process(begun.window(), two_phase=True, streaming=mode, timeout=300)
    begun.database.end_prepared("g")
    second = begun.capture_process(begun.window(), two_phase=True, streaming=mode, timeout=300)
    peaks = []
    for done, expected in ((first, "0"), (second, "1000000")):
        count, _, peak_mb = done.stdout.split()
        assert count == expected, done.stderr
        peaks.append(int(peak_mb))
    print(f"peak memory: {peaks} MB")
    assert max(peaks) < 700
