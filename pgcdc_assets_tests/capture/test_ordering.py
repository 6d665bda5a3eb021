"""The content and the order of a window (A16, A17, A19)."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]


def test_a_capture_ends_at_its_barrier_while_writers_continue(capturing: Capturing) -> None:
    """A16."""
    capturing.begin("create table t (id int)")
    is_done = Event()

    def write() -> None:
        with capturing.database.connect() as connection, connection.cursor() as cursor:
            number = 0
            while not is_done.is_set():
                number += 1
                cursor.execute("insert into t values (%s)", (number,))

    writer = Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: capturing.database.value("select count(*) > 500 from t"), "some rows")
        committed = capturing.database.value("select max(id) from t")
        window = capturing.window()
        capturing.capture(window)
    finally:
        is_done.set()
        writer.join()

    numbers = [int(text[0]) for text in capturing.texts("t")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= committed
    assert all(row["commit_lsn"] < window.end for row in capturing.rows())
    assert len(numbers) < capturing.database.value("select count(*) from t")
    # The next window starts at the end of this window.
    capturing.capture()
    numbers = [int(text[0]) for text in capturing.texts("t")]
    assert numbers == list(range(1, capturing.database.value("select count(*) from t") + 1))


def test_rolled_back_changes_are_not_landed(capturing: Capturing) -> None:
    """A17."""
    capturing.begin("create table t (id int)")
    with capturing.database.connect(autocommit=False) as connection:
        with connection.cursor() as cursor:
            cursor.execute("insert into t values (1)")
            connection.rollback()
            cursor.execute("insert into t values (2)")
            cursor.execute("savepoint s; insert into t values (3); rollback to s")
            cursor.execute("insert into t values (4)")
        connection.commit()

    report = capturing.capture()

    assert capturing.texts("t") == [["2"], ["4"]]
    assert [row["ordinal"] for row in capturing.rows()] == [0, 1]
    assert report.transaction_count == 1


def test_changes_of_two_tables_in_a_transaction_have_one_commit_lsn(capturing: Capturing) -> None:
    """A19."""
    capturing.begin("create table a (id int); create table b (id int)")
    capturing.database.transaction("insert into a values (1)", "insert into b values (1)")
    capturing.database.transaction("insert into b values (2)", "insert into a values (2)")

    capturing.capture()

    rows = capturing.rows()
    assert [(row["table"], row["ordinal"]) for row in rows] == [
        ("a", 0),
        ("b", 1),
        ("b", 0),
        ("a", 1),
    ]
    first, second = rows[:2], rows[2:]
    for pair in (first, second):
        assert len({(row["commit_lsn"], row["xid"], row["window"]) for row in pair}) == 1
    assert first[0]["commit_lsn"] < second[0]["commit_lsn"]


def test_transactions_are_ordered_by_their_commit_and_not_by_their_first_row(
    capturing: Capturing,
) -> None:
    capturing.begin("create table t (id int)")
    with capturing.database.connect(autocommit=False) as connection:
        with connection.cursor() as cursor:
            cursor.execute("insert into t values (1)")
            capturing.database.execute("insert into t values (2)")
        connection.commit()

    capturing.capture()

    assert capturing.texts("t") == [["2"], ["1"]]


def test_every_kind_of_change_is_landed(capturing: Capturing) -> None:
    capturing.begin(
        "create table t (id int primary key, long text, n int);"
        "alter table t alter long set storage external; create table u (id int)"
    )
    capturing.database.execute("insert into t values (1, repeat('x', 3000), 1)")
    capturing.database.execute("update t set n = 2")
    capturing.database.execute("update t set id = 5")
    capturing.database.execute("delete from t")
    capturing.database.execute("truncate t, u")
    capturing.database.execute("select pg_logical_emit_message(true, 'outbox', 'hello')")
    capturing.database.execute("select pg_logical_emit_message(false, 'heartbeat', 'x')")

    report = capturing.capture()

    long = "x" * 3000
    assert [
        (r["op"], r["table"], r["old_kind"], r["old"], r["new"], r["unchanged"])
        for r in capturing.rows()
    ] == [
        ("I", "t", None, None, ["1", long, "1"], None),
        ("U", "t", None, None, ["1", None, "2"], [1]),
        ("U", "t", "K", ["1", None, None], ["5", None, "2"], [1]),
        ("D", "t", "K", ["5", None, None], None, None),
        ("T", "t", None, None, None, None),
        ("T", "u", None, None, None, None),
        ("M", None, None, None, ["outbox", "hello"], None),
    ]
    assert report.counts == {
        "(messages)": {"M": 1},
        "public.t": {"D": 1, "I": 1, "T": 1, "U": 2},
        "public.u": {"T": 1},
    }
    assert sum(report.warnings.values()) == 1


def test_the_origin_of_a_replicated_transaction_is_landed(capturing: Capturing) -> None:
    capturing.begin("create table t (id int)")
    name = f"origin_{capturing.database.name}"
    with capturing.database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("select pg_replication_origin_create(%s)", (name,))
        try:
            cursor.execute("select pg_replication_origin_session_setup(%s)", (name,))
            cursor.execute("insert into t values (1)")
            cursor.execute("select pg_replication_origin_session_reset()")
            cursor.execute("insert into t values (2)")
            capturing.capture()
        finally:
            cursor.execute("select pg_replication_origin_drop(%s)", (name,))

    assert [(row["new"], row["origin"]) for row in capturing.rows()] == [
        (["1"], name),
        (["2"], None),
    ]


def test_the_captured_text_does_not_depend_on_the_databases_settings(capturing: Capturing) -> None:
    """B15, for the stream."""
    for setting in (
        "datestyle = 'SQL, DMY'",
        "timezone = 'Asia/Kolkata'",
        "intervalstyle = 'iso_8601'",
        "bytea_output = 'escape'",
        "extra_float_digits = 0",
    ):
        capturing.database.execute(f"alter database {capturing.database.name} set {setting}")
    capturing.begin("create table t (d date, z timestamptz, i interval, b bytea, f float8)")
    capturing.database.execute(
        "insert into t values ('2024-02-01', '2024-02-01 00:00+00', '1 day 2 hours', '\\x00ff', "
        "0.1::float8 + 0.2)"
    )

    capturing.capture()

    assert capturing.texts("t") == [
        ["2024-02-01", "2024-02-01 00:00:00+00", "1 day 02:00:00", "\\x00ff", "0.30000000000000004"]
    ]
