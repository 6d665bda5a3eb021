"""Logical messages of chosen prefixes land once, non-transactional ones included."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.settings.policies import MessagePolicy
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = pytest.mark.postgres

LIMITS = CaptureLimits(messages=MessagePolicy())


def emit(capturing: Capturing, content: str, *, prefix: str = "audit", transactional: bool) -> Lsn:
    """Emit a message, and return the LSN of the end of its record."""
    text: Any = capturing.database.value(
        "select pg_logical_emit_message(%s, %s, %s)::text", (transactional, prefix, content)
    )
    return Lsn.parse(text)


def found(capturing: Capturing) -> list[tuple[bool, str, str]]:
    """Return the landed messages in order: whether they are transactional, prefix and content."""
    return [(r["xid"] != 0, *r["new"]) for r in capturing.rows() if r["op"] == "M"]


@pytest.mark.sampled
@pytest.mark.every_pg
def test_a_non_transactional_message_lands_once_wherever_its_window_ends(
    capturing: Capturing,
) -> None:
    """Each stream starts at a byte before, inside or behind the record of a message."""
    capturing.begin("create table t (id int)")
    contents, ends = [], set()
    for number, size in enumerate((0, 10, 9000)):
        content = f"{number}-{'x' * size}"
        start = capturing.flush_lsn()
        end = emit(capturing, content, transactional=False)
        contents.append(content)
        near = range(0, 72, 8) if size < 9000 else (8, 40)
        ends |= {Lsn(end + step) for step in (*(-each for each in near), 8, 16)}
        ends.add(Lsn(start + 1))
    end = capturing.flush_lsn()
    session_start = capturing.captured_through()
    for border in sorted(each for each in ends if session_start < each < end):
        capturing.capture(LsnWindow.of(1, capturing.captured_through(), border), LIMITS)
    capturing.capture(LsnWindow.of(1, capturing.captured_through(), end), LIMITS)

    assert found(capturing) == [(False, "audit", content) for content in contents]
    rows = capturing.rows()
    assert len({(row["commit_lsn"], row["ordinal"]) for row in rows}) == len(rows)
    assert all(LsnWindow.parse(r["window"]).contains(r["commit_lsn"]) for r in rows)


@pytest.mark.parametrize("streaming", [Streaming.OFF, Streaming.ON])
def test_messages_and_changes_keep_their_order_in_one_session(
    capturing: Capturing, streaming: Streaming
) -> None:
    capturing.begin("create table t (id int)")
    database = capturing.database
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    large = "insert into t select generate_series(1, 5000)"
    limits = CaptureLimits(
        messages=MessagePolicy(),
        stream=StreamSettings(plugin=PluginOptions(streaming)),
    )
    with capturing.session(limits) as session:
        for number in range(3):
            emit(capturing, f"{number} before", transactional=False)
            database.transaction(
                "select pg_logical_emit_message(false, 'audit', 'inside')",
                "select pg_logical_emit_message(true, 'audit', 'with the changes')",
                large,
            )
            emit(capturing, f"{number} after", transactional=False)
            session.land(capturing.window())
        session.finish()

    expected = []
    for number in range(3):
        expected += [
            (False, "audit", f"{number} before"),
            (False, "audit", "inside"),
            (True, "audit", "with the changes"),
            (False, "audit", f"{number} after"),
        ]
    assert found(capturing) == expected
    assert len(capturing.texts("t")) == 15_000


def test_a_rolled_back_transaction_leaves_its_non_transactional_messages_only(
    capturing: Capturing,
) -> None:
    capturing.begin("create table t (id int)")
    with capturing.database.connect(autocommit=False) as conn, conn.cursor() as cursor:
        cursor.execute("insert into t values (1)")
        cursor.execute("select pg_logical_emit_message(true, 'audit', 'undone')")
        cursor.execute("select pg_logical_emit_message(false, 'audit', 'tried')")
        conn.rollback()
    capturing.capture(limits=LIMITS)
    assert found(capturing) == [(False, "audit", "tried")]
    assert capturing.texts("t") == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    "failpoint",
    [
        failpoints.MID_STREAM,
        failpoints.BEFORE_DELTA_COMMIT,
        failpoints.AFTER_DELTA_COMMIT,
        failpoints.AFTER_STATUS_PACKET,
    ],
)
def test_after_a_kill_a_message_whose_record_crosses_the_border_lands_once(
    capturing: Capturing, failpoint: str
) -> None:
    capturing.begin("create table t (id int)")
    first = emit(capturing, "first", transactional=False)
    second = emit(capturing, "second", transactional=False)
    third = emit(capturing, "third", transactional=False)
    start, end = capturing.captured_through(), capturing.flush_lsn()
    middle = Lsn(second - 8)
    windows = [LsnWindow.of(1, start, middle), LsnWindow.of(1, middle, end)]
    assert first < middle < second < third

    killed = capturing.capture_process(*windows, failpoint=failpoint, messages=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for window in windows:
        capturing.capture(window, LIMITS)
    assert [content for *_, content in found(capturing)] == ["first", "second", "third"]


@pytest.mark.sampled
def test_contents_of_any_bytes_and_size_keep_their_bytes(capturing: Capturing) -> None:
    capturing.begin("create table t (id int)")
    odd = 'a "b" \\x \N{SNOWMAN} {c}; --'
    emit(capturing, "", transactional=False)
    emit(capturing, "", transactional=True)
    emit(capturing, "odd", prefix=odd, transactional=False)
    emit(capturing, "no prefix", prefix="", transactional=True)
    for transactional in ("true", "false"):
        capturing.database.execute(
            f"select pg_logical_emit_message({transactional}, 'audit', '\\x00ff'::bytea)"
        )
        capturing.database.execute(
            f"select length(pg_logical_emit_message({transactional}, 'large', "
            "repeat('0123456789', 5000000))::text)"
        )
    capturing.capture(limits=LIMITS)
    rows = found(capturing)
    assert rows[:4] == [
        (False, "audit", ""),
        (True, "audit", ""),
        (False, odd, "odd"),
        (True, "", "no prefix"),
    ]
    assert [row for row in rows[4:] if row[1] == "audit"] == [
        (True, "audit", "\0\\x00ff"),
        (False, "audit", "\0\\x00ff"),
    ]
    large = [row for row in rows if row[1] == "large"]
    assert [row[0] for row in large] == [True, False]
    assert all(row[2] == "0123456789" * 5_000_000 for row in large)


def test_only_messages_of_the_chosen_prefixes_land(capturing: Capturing) -> None:
    capturing.begin("create table t (id int)")
    for transactional in (True, False):
        emit(capturing, "wanted", transactional=transactional)
        emit(capturing, "part of a prefix", prefix="audits", transactional=transactional)
        emit(capturing, "another", prefix="debezium", transactional=transactional)
    emit(capturing, "", prefix="pgcdc", transactional=True)
    report = capturing.capture(limits=CaptureLimits(messages=MessagePolicy(("audit",))))
    assert found(capturing) == [
        (True, "audit", "wanted"),
        (False, "audit", "wanted"),
        (True, "pgcdc", ""),
    ]
    assert report.warnings == {}


@pytest.mark.every_pg
def test_a_prepared_transaction_brings_its_messages_at_its_commit(capturing: Capturing) -> None:
    if int(capturing.database.value("show server_version_num")) < 150000:
        pytest.skip("two_phase requires Postgres 15")
    capturing.begin("create table t (id int)")
    limits = CaptureLimits(
        messages=MessagePolicy(("audit",)),
        stream=StreamSettings(plugin=PluginOptions(Streaming.OFF, True)),
    )
    capturing.capture(limits=limits)
    capturing.database.prepare(
        "g",
        "select pg_logical_emit_message(true, 'audit', 'later')",
        "select pg_logical_emit_message(true, 'other', 'left out')",
        "select pg_logical_emit_message(false, 'audit', 'at once')",
    )
    capturing.capture(limits=limits)
    assert found(capturing) == [(False, "audit", "at once")]
    capturing.database.end_prepared("g")
    capturing.capture(limits=limits)
    assert found(capturing) == [(False, "audit", "at once"), (True, "audit", "later")]
