"""Keepalives are answered on time, and no LSN of a message moves the slot (A13 to A15, A18)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.capture.window import CaptureLimits
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.stream import socket_transport
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.protocol.frames import XLOG_DATA, Bytes, Frames, MessageBatch, cut
from pgcdc_assets_tests.capture.test_acknowledgement import SMALL, streaming
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.proxy import TcpProxy
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

HIGHEST = 2**64 - 1

# pgoutput's message begins here in XLogData.
_CONTENT_AT = 25


def record_messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that gets the letter and the LSN of each message; a keepalive's letter is k."""
    received: list[tuple[str, int]] = []
    batches = ReplicationStream.batches

    def recorded(stream: ReplicationStream) -> Iterator[MessageBatch]:
        for batch in batches(stream):
            for start in batch.starts.tolist():
                letter = batch.buffer[start]
                if letter == XLOG_DATA:
                    letter = batch.buffer[start + _CONTENT_AT]
                lsn = int.from_bytes(batch.buffer[start + 1 : start + 9].tobytes(), "big")
                received.append((chr(letter), lsn))
            yield batch

    monkeypatch.setattr(ReplicationStream, "batches", recorded)
    return received


@pytest.mark.sampled
@pytest.mark.every_pg
def test_a_keepalive_inside_a_transaction_does_not_advance_the_slot(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13 to A15: the decoding pauses in the transaction, and the landing exceeds the timeout."""
    received = record_messages(monkeypatch)
    capturing.begin("create table t (id int, filler text)")
    # More than the buffers between server and capture hold: the server is still sending.
    capturing.database.execute(
        "insert into t select i, repeat('x', 1000) from generate_series(1, 20000) i"
    )
    slow = capturing.with_sender_timeout(2)
    window = slow.window()
    confirmed: list[Lsn] = []

    def pause(name: str) -> None:
        if name == failpoints.MID_STREAM and not confirmed and received[-1][0] == "I":
            slow.wait_for_replies(0)
            confirmed.append(slow.confirmed())
        elif name == failpoints.BEFORE_DELTA_COMMIT:
            slow.wait_for_replies(2)
            confirmed.append(slow.confirmed())

    monkeypatch.setattr(failpoints, "reach", pause)
    # A lost connection would be an error.
    assert slow.capture(window, CaptureLimits(stream=SMALL)).row_count == 20_000

    rows = [number for number, (letter, _) in enumerate(received) if letter == "I"]
    inside = [lsn for letter, lsn in received[rows[0] : rows[-1]] if letter == "k"]
    # A reply with the keepalive's LSN would move the slot.
    assert inside and min(inside) > window.start
    assert confirmed == [window.start] * 2
    assert slow.confirmed() == window.end


@pytest.mark.sampled
@pytest.mark.usefixtures("wire")
def test_a_long_landing_keeps_the_connection_and_the_old_position(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A14: the walsender requests a reply after 1 s and ends after 2 s; the landing takes 3 s."""
    capturing.begin("create table t (id int)")
    capturing.database.execute("insert into t values (1)")
    slow = capturing.with_sender_timeout(2)
    window = slow.window()
    confirmed = []

    def land_slowly(name: str) -> None:
        if name == failpoints.BEFORE_DELTA_COMMIT:
            slow.wait_for_replies(3)
            confirmed.append(slow.confirmed())

    monkeypatch.setattr(failpoints, "reach", land_slowly)
    slow.capture(window)

    assert confirmed == [window.start]
    assert slow.confirmed() == window.end
    assert slow.texts("t") == [["1"]]


def test_a_keepalive_with_a_request_is_answered_at_once(capturing: Capturing) -> None:
    """A14: after the start of the stream, the server's timeout falls below the status interval."""
    capturing.begin("create table t (id int)")
    database = capturing.database
    rare = StreamSettings(status_seconds=60, silence_seconds=180)
    with streaming(capturing, rare) as stream:
        database.execute("alter system set wal_sender_timeout = '3s'")
        try:
            database.value("select pg_reload_conf()")
            began = time.time()
            # The server requests a reply after half of the timeout, and ends a stream without it.
            for _ in stream.batches():
                if capturing.last_reply() > began + 4:
                    break
        finally:
            database.execute("alter system reset wal_sender_timeout")
            database.value("select pg_reload_conf()")
        assert stream.finish()


@pytest.mark.sampled
@pytest.mark.usefixtures("wire")
def test_a_row_that_arrives_for_longer_than_the_sender_timeout_lands(
    capturing: Capturing, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A14: status packets are sent in the middle of a message that is larger than a batch."""
    looked_over = []

    def count(buffer: Bytes, start: int, end: int) -> Frames:
        looked_over.append(end - start)
        return cut(buffer, start, end)

    monkeypatch.setattr(socket_transport, "cut", count)
    capturing.begin("create table t (id int, filler text)")
    capturing.database.execute(
        "alter table t alter filler set storage external;"
        "insert into t values (1, repeat('x', 20000000))"
    )
    window = capturing.window()
    proxy.throttle(4_000_000)
    slow = capturing.through(proxy.conninfo(capturing.conninfo)).with_sender_timeout(2)
    # On a busy machine, few bytes may arrive in a pause, which would end a read.
    never_quiet = StreamSettings(wire=WireSettings(busy_bytes=1024))
    slow.capture(window, CaptureLimits(stream=never_quiet))

    [(row_id, filler)] = capturing.texts("t")
    assert (row_id, len(filler)) == ("1", 20_000_000)
    # The reads do not examine the same bytes repeatedly.
    assert sum(looked_over) < 50_000_000
    assert capturing.confirmed() == window.end


@pytest.mark.every_pg
def test_an_impossible_lsn_of_a_message_is_not_stored(
    capturing: Capturing, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A18: the server sends LSN 0/0 with a relation, and the proxy makes it the highest LSN."""
    received = record_messages(monkeypatch)
    first = capturing.begin_with_one_insert()
    with capturing.through(proxy.conninfo(capturing.conninfo)).session() as session:
        session.land(first)
        wait_until(lambda: capturing.confirmed() == first.end, "the confirmation")
        proxy.damage(b"w" + bytes(8), b"w" + HIGHEST.to_bytes(8, "big"))
        # The TRUNCATE causes a new announcement of the table.
        capturing.database.execute("truncate t; insert into t values (2)")
        second = capturing.window()
        session.land(second)
        assert session.finish()
    assert {lsn for letter, lsn in received if letter == "R"} == {0, HIGHEST}
    rows = capturing.rows()
    assert [row["op"] for row in rows] == ["I", "T", "I"]
    versions = capturing.zone.relations.versions(1)
    for lsn in (*(row["commit_lsn"] for row in rows), *(version.lsn for version in versions)):
        assert first.start < lsn < second.end
    assert capturing.confirmed() == capturing.captured_through() == second.end
