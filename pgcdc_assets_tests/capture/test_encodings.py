"""Databases whose encoding has bytes without a form in UTF-8: such a value stops no table."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import pytest

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.capture.window import CaptureLimits
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.postgres.catalog.table_definitions import read_definitions
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.encodings import stored_encoding
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.stored_messages import StoredMessages
from pgcdc_assets.protocol.utf8 import bytes_as_text
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.encoded import encoded_database
from pgcdc_assets_tests.support.handover import copied_rows
from pgcdc_assets_tests.support.postgres.wire import peek_messages
from pgcdc_assets_tests.support.protocol.encoding import xlog_data
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

# Encoding, letters for names, and stored bytes of a value.
_INVALID = (
    ("WIN1252", "naïve €", "e9808161"),
    # Two characters that look like one of UTF-8. The second one does not exist.
    ("WIN1252", "é", "c381"),
    ("WIN1251", "имя", "98"),
    ("EUC_JP", "名前", "81ff"),
    # The value ends in the middle of a character, and a character has no form in UTF-8.
    ("EUC_JP", "名前", "b4c18fb0"),
    ("EUC_JP", "名前", "61a9a1b4c1"),
    ("EUC_KR", "이름", "b0a1c9"),
    ("EUC_TW", "文", "8ea9a1"),
)
_VALID = (
    ("LATIN1", "é", "e981", "é\x81"),
    ("LATIN9", "é", "a4", "€"),
    ("EUC_JP", "名前", "b4c18ea7618fb0a1", "漢ｧa丂"),
    ("EUC_CN", "名字", "b0a1", "啊"),
    ("UTF8", "é", "c3a9", "é"),
    ("UTF8", "é", "81ff", bytes_as_text(b"\x81\xff")),
)
_CASES = [(*case, bytes_as_text(bytes.fromhex(case[2]))) for case in _INVALID]


@pytest.fixture
def encoded(database: Database, encoding: str) -> Iterator[Database]:
    with encoded_database(database, encoding) as found:
        yield found


def _succeeds(database: Database, statement: str) -> bool:
    try:
        database.execute(statement)
    except psycopg2.errors.ObjectInUse:
        return False
    return True


def _is_hex(text: str) -> bool:
    return text.startswith("\0")


@pytest.mark.sampled
@pytest.mark.parametrize(("encoding", "name", "stored", "text"), [*_CASES, *_VALID])
def test_a_value_that_is_no_text_is_hex_and_stops_no_table(
    encoded: Database, capturing: Capturing, name: str, stored: str, text: str
) -> None:
    """G6: by snapshot and by stream, with names that are not ASCII, NULL and empty values."""
    zone, publication = capturing.zone, f"pub {name}"
    quoted, label, published = f'"{name}"', f'"type {name}"', f'"{publication}"'
    encoded.execute(f"create type {label} as enum ('{name}', 'x')")
    encoded.execute(
        f"create table {quoted} (id int primary key, v text, w text, {quoted} {label}, y text)"
    )
    encoded.execute("create table other (id int primary key, v text)")
    encoded.execute(f"create publication {published} for all tables")
    value = f"'\\x{stored}'::bytea::text"
    first, second = f"{value}, null, '{name}', {value}", f"'', '{name}', 'x', 'a'"
    insert = f"insert into {quoted} values ({{}}, {first}), ({{}}, {second})"
    encoded.execute(insert.format(1, 2))
    through = Capturing(encoded, zone, f"s_{encoded.name}", encoded.conninfo, publication)
    reports = snapshot_tables(encoded.settings(), zone, through.slot, publication)
    rows: list[list[str | None]] = [["1", text, None, name, text], ["2", "", name, "x", "a"]]
    [report] = [report for report in reports if report.table == name]
    assert sorted(copied_rows(zone, name, report.snapshot_lsn)) == rows
    count = 2 * _is_hex(text)
    assert report.rescued_count == count

    encoded.transaction(
        f"insert into other values (1, '{name}')",
        insert.format(3, 4),
        f"select pg_logical_emit_message(true, '{name}', 'ascii')",
    )
    captured = through.capture()
    assert captured.counts[f"public.{name}"] == {"I": 2}
    assert [row[1:] for row in through.texts(name)] == [row[1:] for row in rows]
    assert through.texts("other") == [["1", name]]
    assert [row["new"] for row in through.rows() if row["op"] == "M"][-1] == [name, "ascii"]
    assert sum(captured.warnings.values()) == count
    # The next process begins with the conversion by the server.
    encoded.execute(f"delete from {quoted}")
    assert through.capture().counts[f"public.{name}"] == {"D": 4}


@pytest.mark.sampled
@pytest.mark.parametrize("encoding", ["WIN1252"])
@pytest.mark.parametrize("streaming", [Streaming.OFF, Streaming.ON])
def test_the_rows_around_an_invalid_value_are_landed_once(
    encoded: Database, capturing: Capturing, streaming: Streaming
) -> None:
    """Old tuples, unchanged TOAST, an aborted subtransaction and a gid that is not ASCII."""
    database = encoded
    through = capturing.of(database).begin(
        "create table t (id int primary key, v text, big text)",
        "alter table t alter big set storage external",
        "alter table t replica identity full",
        "create table other (id int primary key)",
    )
    bad = "'\\x81'::bytea::text"
    big = "repeat('é', 5000)"
    options = PluginOptions(streaming, two_phase=False)
    limits = CaptureLimits(stream=StreamSettings(plugin=options))
    database.execute(f"insert into t values (0, 'é', {big})")
    assert through.capture(limits=limits).counts["public.t"] == {"I": 1}
    database.transaction(
        "set logical_decoding_work_mem = '64kB'",
        f"insert into t select i, 'é' || i, {big} from generate_series(1, 200) i",
        f"update t set v = {bad} where id = 0",
        "savepoint s",
        f"insert into t values (300, {bad}, '')",
        "rollback to s",
        "update t set v = 'ok' where id = 0",
        "delete from t where id = 200",
    )
    database.execute("insert into other values (1)")
    window = through.window()
    report = through.capture(window, limits)
    assert report.counts == {"public.t": {"I": 200, "U": 2, "D": 1}, "public.other": {"I": 1}}
    rows = [row for row in through.rows() if row["window"] == window.key and row["table"] == "t"]
    hexed, text = bytes_as_text(b"\x81"), "é" * 5000
    assert [row["new"] for row in rows[:200]] == [[str(i), f"é{i}", text] for i in range(1, 201)]
    assert [row["old"] for row in rows[200:]] == [
        ["0", "é", text],
        ["0", hexed, text],
        ["200", "é200", text],
    ]
    assert [row["new"][1] for row in rows[200:202]] == [hexed, "ok"]
    assert report.warnings == {"public.t: values that are not UTF-8, landed as hex": 2}
    assert through.capture(window, limits).counts == report.counts


@pytest.mark.sampled
@pytest.mark.parametrize("encoding", ["WIN1252"])
@pytest.mark.parametrize("is_next_landed", [False, True])
def test_a_value_of_the_next_window_does_not_end_this_window(
    encoded: Database, capturing: Capturing, is_next_landed: bool
) -> None:
    """The stream reads ahead: its end arrives while the window before is landed or confirmed."""
    through = capturing.of(encoded).begin("create table t (id int primary key, v text)")
    bad = "insert into t values ({}, '\\x81'::bytea::text)"
    good = "insert into t values ({}, 'é')"
    (first,) = through.windows_of(good.format(1))
    hexed = bytes_as_text(b"\x81")
    with through.session() as session:
        session.land(first)
        second, third = through.windows_of(bad.format(2), good.format(3))
        source = session._connections.source
        assert source is not None
        stream = source.stream

        def has_ended() -> bool:
            # Take the batches before the error.
            session.has_changes()
            return stream._failure is not None

        wait_until(has_ended, "the error of the server")
        if is_next_landed:
            assert session.land(second).counts["public.t"] == {"I": 1}
            # The same stream continues.
            assert session.land(third).counts["public.t"] == {"I": 1}
        # The stream that was refused cannot acknowledge the confirmation.
        assert session.finish() == is_next_landed
    if is_next_landed:
        assert through.confirmed() == third.end
        assert through.texts("t") == [["1", "é"], ["2", hexed], ["3", "é"]]
        return
    assert through.texts("t") == [["1", "é"]]
    for window in (second, third):
        through.capture(window)
    assert through.texts("t") == [["1", "é"], ["2", hexed], ["3", "é"]]


@pytest.mark.sampled
@pytest.mark.parametrize("encoding", ["WIN1252"])
@pytest.mark.parametrize(
    ("ddl", "is_refused"),
    [
        ("comment on table other is '?'", False),
        ("alter type label add value '?'", False),
        ('alter table other rename v to "?"', True),
        ('create type "?" as enum (); alter table other add w "?"', True),
        ('create schema "?"; alter table other set schema "?"', True),
    ],
)
def test_an_illegible_text_of_the_catalog_stops_no_other_table(
    encoded: Database, capturing: Capturing, ddl: str, is_refused: bool
) -> None:
    """Neither a row nor an event of the other tables is missing."""
    through = capturing.of(encoded).begin(
        "create type label as enum ('x')",
        "create table t (id int primary key, v text)",
        "create table other (id int primary key, v text, l label)",
    )
    encoded.execute("insert into t values (1, 'a'); insert into other values (1, 'a', 'x')")
    through.capture()
    ddl = ddl.replace("'", "''").replace("?", "' || chr(129) || '")
    encoded.execute(f"do $$ begin execute '{ddl}'; end $$")
    encoded.execute("alter table t drop v; insert into t values (2)")
    through.capture()
    encoded.execute("do $$ begin execute (select 'insert into ' || oid::regclass || ' values (2)' "
                    "from pg_class where relname = 'other'); end $$")  # fmt: skip
    through.capture()
    assert through.texts("t") == [["1", "a"], ["2"]]
    assert [new[0] for new in through.texts("other")] == ["1", "2"]
    dropped = [e.change for e in through.zone.schema_events.read() if e.table.table == "t"]
    assert dropped == ["column_dropped"]
    with query_connection(through.settings, "test") as conn:
        names = {d.relation.table for d in read_definitions(conn, "pub", []).values()}
    assert names == ({"t"} if is_refused else {"t", "other"})
    if is_refused:
        with pytest.raises(ConfigurationError, match=r"a name .* is not UTF-8.* take its table"):
            snapshot_tables(through.settings, through.zone, through.slot, "pub")


@pytest.mark.parametrize("encoding", ["WIN1252"])
def test_an_illegible_name_is_a_warning_of_the_window_that_announces_its_table(
    encoded: Database, capturing: Capturing
) -> None:
    through = capturing.of(encoded).begin("create table t (id int)", "create table other (id int)")
    rename = "do $$ begin execute 'alter table other rename id to \"' || chr(129) || '\"'; end $$"
    insert = "insert into t values (1)"
    windows = through.windows_of("insert into other values (1)", insert, insert)
    encoded.execute(rename)
    with through.session() as session:
        reports = [session.land(window) for window in windows]
        assert session.finish()
    oid = encoded.value("select 'other'::regclass::oid::bigint")
    warning = {f"relation {oid}: a name is not UTF-8": 1}
    assert [report.warnings for report in reports] == [warning, {}, {}]


@pytest.mark.parametrize("encoding", ["WIN1252", "EUC_JP", "LATIN1"])
@pytest.mark.parametrize("protocol", ["1", "2"])
def test_converted_messages_equal_those_of_the_server(
    encoded: Database, encoding: str, protocol: str
) -> None:
    letters = "漢字名前" if encoding == "EUC_JP" else "éöÿ"
    encoded.execute(f"create type \"{letters} t\" as enum ('{letters}')")
    encoded.execute(
        f'create table "{letters}" (id int primary key, "{letters}" "{letters} t", v text, w text)'
    )
    encoded.execute(f'alter table "{letters}" replica identity full')
    encoded.execute(f'create publication "{letters}" for all tables')
    encoded.execute("select pg_create_logical_replication_slot(current_database(), 'pgoutput')")
    encoded.execute(f"select pg_replication_origin_create('{letters}{encoded.name}')")
    encoded.transaction(
        f"select pg_replication_origin_session_setup('{letters}{encoded.name}')",
        f"insert into \"{letters}\" select i, '{letters}', repeat('{letters}', i), null "
        "from generate_series(1, 300) i",
        f"update \"{letters}\" set w = 'ascii' where id < 50",
        f"select pg_logical_emit_message(true, '{letters}', '{letters}')",
        f'delete from "{letters}" where id > 200',
        f'truncate "{letters}"',
        f'alter table "{letters}" add "{letters}2" text',
        f"insert into \"{letters}\" values (1, '{letters}', '', '{letters}', '{letters}')",
    )
    drop = f"select pg_replication_origin_drop('{letters}{encoded.name}')"
    # The session that used the origin may not have ended yet.
    wait_until(lambda: _succeeds(encoded, drop), "the origin to be dropped")
    options = {"proto_version": protocol, **({"streaming": "on"} if protocol == "2" else {})}
    streams = []
    for client in ("UTF8", encoding):
        with encoded.connect() as conn, conn.cursor() as cursor:
            cursor.execute("set logical_decoding_work_mem = '64kB'")
            conn.set_client_encoding(client)
            peeked = peek_messages(conn, encoded.name, f'"{letters}"', **options)
            streams.append([xlog_data(message) for message in peeked])
    ours, stored = streams
    with query_connection(encoded.settings(), "test") as conn:
        found = stored_encoding(conn)
        assert found is not None
        messages = StoredMessages(found)
        converted = []
        # A block of a streamed transaction continues in the next batch.
        for start in range(0, len(stored), 100):
            batch = messages.convert(MessageBatch.of(stored[start : start + 100]))
            converted += [
                batch.buffer[first:last].tobytes()
                for first, last in zip(batch.starts, batch.ends, strict=True)
            ]
    assert stored != ours
    assert converted == ours
    encoded.execute("select pg_drop_replication_slot(current_database())")
