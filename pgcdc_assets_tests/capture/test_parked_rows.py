"""A row that cannot be decoded is parked in the raw zone, and all other rows are landed."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.errors import DefiniteError, ProtocolError
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.raw.relations.schema_events import STREAM, SchemaChange, SchemaEvent
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.prepared import capture as capture_prepared
from pgcdc_assets_tests.support.prepared import stored_gids
from pgcdc_assets_tests.support.proxy import TcpProxy

pytestmark = pytest.mark.postgres

_TEXT = b"t\0\0\0\x06poison"
_BINARY = b"b\0\0\0\x06poison"


def _begin(capturing: Capturing) -> None:
    capturing.begin(
        "create table good (id int primary key)",
        "create table bad (id int primary key, v text)",
    )


def test_a_row_that_cannot_be_decoded_is_parked_and_other_rows_are_landed(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    _begin(capturing)
    database = capturing.database
    database.transaction(
        "insert into good values (1)",
        "insert into bad values (1, 'fine'), (2, 'poison'), (3, 'fine')",
        "insert into good values (2)",
    )
    database.execute("update bad set v = 'poison' where id = 3")
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    proxy.damage(_TEXT, _BINARY)
    window = through.window()

    report = through.capture(window)

    assert report.counts == {
        "public.bad": {"I": 2, "P": 2},
        "public.good": {"I": 2},
    }
    assert report.warnings == {
        "public.bad: rows that cannot be decoded, parked with their bytes": 2
    }
    rows = capturing.rows()
    assert [(row["table"], row["op"], row["ordinal"]) for row in rows] == [
        ("good", "I", 0),
        ("bad", "I", 1),
        ("bad", "P", 2),
        ("bad", "I", 3),
        ("good", "I", 4),
        ("bad", "P", 0),
    ]
    reason, message = rows[2]["new"]
    assert reason == "byte 39: the kind byte of a value is not t, n or u"
    assert _BINARY in bytes.fromhex(message[3:])
    events = capturing.zone.schema_events.read()
    assert events == [
        SchemaEvent(
            epoch=1,
            lsn=row["commit_lsn"],
            table=TableName("public", "bad"),
            relation_id=row["relation_id"],
            change=SchemaChange.ROW_PARKED,
            columns=(),
            detail=f"2 rows cannot be decoded ({reason})",
            needs_snapshot=True,
            found_by=STREAM,
        )
        for row in (rows[2], rows[5])
    ]
    assert "poison" not in str(events)
    # The window is captured. A second capture confirms it and reports the same counts.
    again = through.capture(window)
    assert (again.already_captured, again.counts) == (True, report.counts)
    proxy.repair()
    database.execute("insert into bad values (4, 'poison')")
    assert through.capture().counts == {"public.bad": {"I": 1}}


def test_a_row_that_is_undamaged_in_a_second_stream_is_not_parked(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    _begin(capturing)
    capturing.database.execute("insert into bad values (1, 'poison')")
    proxy.damage(_TEXT, _BINARY)
    proxy.damage_once = True
    report = capturing.through(proxy.conninfo(capturing.conninfo)).capture()
    assert (report.counts, report.warnings) == ({"public.bad": {"I": 1}}, {})
    assert capturing.zone.schema_events.read() == []


def _capture_damaged_prepare(capturing: Capturing, proxy: TcpProxy, *, once: bool) -> Capturing:
    """Capture a PREPARE with a damaged row, commit it, and return the capture by the proxy."""
    _begin(capturing)
    capture_prepared(capturing)
    capturing.database.prepare("g", "insert into bad values (1, 'poison')")
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    proxy.damage(_TEXT, _BINARY)
    proxy.damage_once = once
    capture_prepared(through)
    assert stored_gids(capturing) == ["g"]
    capturing.database.end_prepared("g")
    return through


@pytest.mark.every_pg(since=15)
def test_a_row_that_is_undamaged_when_its_prepare_is_sent_again_is_not_parked(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    """The server does not send a stored transaction again at its COMMIT PREPARED."""
    through = _capture_damaged_prepare(capturing, proxy, once=True)
    assert capture_prepared(through).counts == {"public.bad": {"I": 1}}
    assert capturing.zone.schema_events.read() == []


@pytest.mark.every_pg(since=15)
def test_a_row_of_a_prepared_transaction_that_two_connections_damage_is_parked(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    through = _capture_damaged_prepare(capturing, proxy, once=False)
    assert capture_prepared(through).counts == {"public.bad": {"P": 1}}


def test_a_parked_row_beside_uncertain_messages_does_not_stop_the_capture(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    """The message in a transaction with an aborted part makes the window be read once more."""
    _begin(capturing)
    large = "insert into good select i from generate_series({0}, {0} + 4999) i"
    capturing.database.execute("insert into bad values (1, 'poison')")
    capturing.database.transaction(
        "select pg_logical_emit_message(true, 'prefix', 'content')",
        large.format(1),
        "savepoint s",
        large.format(10001),
        "rollback to s",
    )
    options = " options='-c logical_decoding_work_mem=64kB'"
    through = capturing.through(proxy.conninfo(capturing.conninfo) + options)
    proxy.damage(_TEXT, _BINARY)
    plugin = PluginOptions(streaming=Streaming.ON)
    report = through.capture(limits=CaptureLimits(stream=StreamSettings(plugin=plugin)))
    assert report.counts["public.bad"] == {"P": 1}
    assert report.counts["public.good"] == {"I": 5000}


def test_damage_outside_of_a_tuple_stops_the_capture_and_loses_nothing(
    capturing: Capturing, proxy: TcpProxy
) -> None:
    _begin(capturing)
    capturing.database.execute("insert into bad values (1, 'poison')")
    oid = capturing.database.value("select 'bad'::regclass::oid::int")
    announced = b"I" + oid.to_bytes(4, "big")
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    window = through.window()
    before = capturing.confirmed()
    proxy.damage(announced, b"I\0\0\0\1")
    with pytest.raises(ProtocolError, match="relation 1 was never announced"):
        through.capture(window)
    assert capturing.rows() == []
    # A snapshot by the same process does not store what the window announced.
    assert capturing.zone.relations.registered(1, oid) == []
    assert capturing.confirmed() == before
    proxy.repair()
    assert through.capture(window).counts == {"public.bad": {"I": 1}}


@pytest.mark.usefixtures("wire")
def test_the_error_about_a_row_that_the_server_cannot_print_has_its_lsn(
    capturing: Capturing,
) -> None:
    """The output function fails in the walsender, so the client does not get the row."""
    capturing.begin(
        "create type mood as enum ('sad', 'ok')",
        "create table bad (id int primary key, m mood)",
        "insert into bad values (1, 'sad')",
    )
    capturing.capture()
    capturing.database.execute("delete from pg_enum where enumlabel = 'sad'")
    capturing.database.execute("update bad set id = 2")
    before = capturing.confirmed()
    with pytest.raises(
        DefiniteError, match=r"cannot print a row .* 0/\w+ \(SQLSTATE 22P03"
    ) as error:
        capturing.capture()
    assert f"pg_drop_replication_slot('{capturing.slot}')" in str(error.value)
    assert "invalid internal value" not in str(error.value)
    assert capturing.confirmed() == before


@pytest.mark.every_pg(since=15)
@pytest.mark.parametrize("streaming", list(Streaming)[:2])
def test_the_error_of_a_row_filter_does_not_quote_the_row(
    capturing: Capturing, streaming: Streaming
) -> None:
    """A streamed transaction calls another function of the plugin."""
    capturing.begin("create table t (id int primary key, v text)")
    capturing.database.execute(
        "drop publication pub; create publication pub for table t "
        "where (parse_ident(v) is not null)"
    )
    capturing.database.execute("insert into t select i, 'fine' from generate_series(1, 3000) i")
    capturing.capture()
    secret = "17 secret"
    capturing.database.transaction(
        "insert into t select i, 'fine' from generate_series(3001, 6000) i",
        f"insert into t values (0, '{secret}')",
        "insert into t select i, 'fine' from generate_series(6001, 9000) i",
    )
    small = capturing.through(f"{capturing.conninfo} options='-c logical_decoding_work_mem=64kB'")
    plugin = PluginOptions(streaming=streaming)
    with pytest.raises(DefiniteError, match="cannot print a row") as error:
        small.capture(limits=CaptureLimits(stream=StreamSettings(plugin=plugin)))
    assert secret not in str(error.value)
