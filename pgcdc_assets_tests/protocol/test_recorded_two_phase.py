"""Messages of protocol versions 3 and 4, of a real server with `max_prepared_transactions`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from pgcdc_assets.protocol import transaction_messages as tm
from pgcdc_assets_tests.protocol.test_streaming_decoder import decode, streaming
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.postgres.wire import peek_messages

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg(since=15)]

FILL = "insert into t select i, repeat('x', 100) from generate_series(1, 2000) i"


def recorded(database: Database, version: int) -> list[bytes]:
    """Return the messages of prepared, streamed and partly aborted transactions.

    The protocol version is the highest one of the server.
    """
    database.execute("create table t (id int, note text); create publication p for table t")
    database.value(
        "select pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", (database.name,)
    )
    database.prepare("small é", "insert into t values (1)", end="commit")
    database.prepare("large", FILL, end="commit")
    database.prepare("undone", FILL, end="rollback")
    database.prepare("open", "insert into t values (2)")
    # Test servers commit asynchronously, so decoding could miss the last transaction.
    flushed = "set local synchronous_commit = on"
    database.transaction(flushed, FILL, "savepoint undone", FILL, "rollback to undone", FILL)
    number, mode = ("3", "on") if version < 16 else ("4", "parallel")
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("set logical_decoding_work_mem = '64kB'")
        options = {"proto_version": number, "streaming": mode, "two_phase": "true"}
        return peek_messages(connection, database.name, "p", **options)


def test_each_message_of_protocol_versions_3_and_4_is_parsed(database: Database) -> None:
    """Postgres 15 has version 3; later versions of Postgres have version 4."""
    version = int(database.value("show server_version_num")) // 10000
    if version < 15:
        pytest.skip("two_phase requires Postgres 15")
    messages = recorded(database, version)

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

    [committed] = [tm.parse_stream_commit(m) for m in messages if m[0] == tm.STREAM_COMMIT]
    aborts = [tm.parse_stream_abort(m) for m in messages if m[0] == tm.STREAM_ABORT]
    [aborted] = [each for each in aborts if each.xid == committed.xid]
    assert aborted.subxid > committed.xid
    if version < 16:
        assert aborted[2:] == (None, None)
    else:
        assert aborted.abort_lsn is not None and aborted.time_us is not None
        assert commit.end_lsn < aborted.abort_lsn < committed.commit_lsn
        assert commit.time_us <= aborted.time_us <= committed.time_us

    decoder, _ = streaming()
    rows = decode(decoder, messages)
    assert Counter(row["xid"] for row in rows) == {
        begin.xid: 1,
        found[3][1].xid: 2000,
        committed.xid: 4000,
    }
    assert [each.key.gid for each in decoder.unfinished()] == ["open"]
