"""Messages of two-phase commit, of a real server with `max_prepared_transactions`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.protocol import transaction_messages as tm
from pgcdc_assets_tests.support.database import Database

pytestmark = [pytest.mark.postgres]


@pytest.fixture(scope="module", params=[pytest.param(15, marks=pytest.mark.soak), 18])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    if binaries(request.param) is None:
        pytest.skip(f"Postgres {request.param} is not installed")
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-test-two-phase-")) / "data"
    settings = {**UNSAFE_BUT_FAST, "max_prepared_transactions": "10"}
    server = EmbeddedServer(folder, request.param, settings)
    try:
        server.start()
        yield Database(server, "postgres")
    finally:
        server.remove()
        server.data_dir.parent.rmdir()


def test_every_message_of_two_phase_commit_is_parsed(database: Database) -> None:
    database.execute("create table t (id int, note text)")
    database.execute("create publication p for table t")
    database.execute("select pg_create_logical_replication_slot('s', 'pgoutput', false, true)")
    for gid, count, end in (
        ("small é", 1, "commit"),
        ("large", 2000, "commit"),
        ("undone", 2000, "rollback"),
        ("open", 1, ""),
    ):
        with database.connect() as connection, connection.cursor() as cursor:
            cursor.execute("begin")
            cursor.execute("set local synchronous_commit = on")
            cursor.execute(
                "insert into t select i, repeat('x', 100) from generate_series(1, %s) i", (count,)
            )
            cursor.execute("prepare transaction %s", (gid,))
            if end:
                cursor.execute(f"{end} prepared %s", (gid,))
    database.transaction("set local synchronous_commit = on", "insert into t values (0)")
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("set logical_decoding_work_mem = '64kB'")
        cursor.execute(
            "select data from pg_logical_slot_peek_binary_changes('s', null, null, "
            "'proto_version', '3', 'publication_names', 'p', 'streaming', 'on', "
            "'two_phase', 'true')"
        )
        messages = [bytes(data) for (data,) in cursor.fetchall()]

    parsers: dict[int, Callable[[bytes], tm.Prepared | tm.RollbackPrepared]] = {
        tm.BEGIN_PREPARE: tm.parse_begin_prepare,
        tm.PREPARE: tm.parse_prepared,
        tm.STREAM_PREPARE: tm.parse_prepared,
        tm.COMMIT_PREPARED: tm.parse_prepared,
        tm.ROLLBACK_PREPARED: tm.parse_rollback_prepared,
    }
    found = [(m[:1], parsers[m[0]](m)) for m in messages if m[0] in parsers]
    shown = [(action, parsed.gid) for action, parsed in found]
    assert shown[:5] == [
        (b"b", "small é"),
        (b"P", "small é"),
        (b"K", "small é"),
        (b"p", "large"),
        (b"K", "large"),
    ]
    assert (b"r", "undone") in shown
    assert shown[-2:] == [(b"b", "open"), (b"P", "open")]
    for _, parsed in found:
        assert parsed.xid > 0
        assert 0 < parsed.end_lsn < 2**63
    begin, prepare, commit = (parsed for _, parsed in found[:3])
    assert begin == prepare
    assert begin.xid == commit.xid
    assert isinstance(begin, tm.Prepared)
    assert isinstance(commit, tm.Prepared)
    assert begin.lsn < begin.end_lsn <= commit.lsn < commit.end_lsn
    assert begin.time_us <= commit.time_us
