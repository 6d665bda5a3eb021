"""Streams of a real server, compared with the reference decoder and damaged at every position."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets_tests.protocol.test_decoder import FAR, numbering
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.postgres.wire import peek_messages
from pgcdc_assets_tests.support.protocol import encoding, reference

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

SCHEMA = """
    create type mood as enum ('sad', 'happy');
    create table plain (id int primary key, note text, mood mood, tags text[]);
    create table whole (id int primary key, long text, n numeric);
    alter table whole replica identity full;
    alter table whole alter long set storage external;
    create table keyed (a int, b text, c text, primary key (a, b));
    create publication p for table plain, whole, keyed;
"""

TRANSACTIONS = [
    [
        "insert into plain select i, 'n' || i, 'sad', array['a', null, 'b'] "
        "from generate_series(1, 5) i"
    ],
    [
        "insert into whole select i, repeat('x', 3000 + i), i / 7.0 from generate_series(1, 4) i",
        "update whole set n = n + 1 where id = 2",
        "delete from whole where id = 3",
    ],
    ["insert into keyed values (1, 'b', 'c'), (2, '', null)", "update keyed set a = 5 where a = 1"],
    ["alter table keyed add d int default 3", "update keyed set c = 'é€😀', d = 4 where a = 5"],
    ["delete from keyed where a = 5", "truncate plain, keyed"],
    ["select pg_logical_emit_message(true, 'outbox', 'hello')"],
    ["select pg_logical_emit_message(true, 'outbox', '\\xff00'::bytea)"],
    ["insert into plain (id) values (9)"],
]


@pytest.fixture
def recorded(database: Database) -> list[bytes]:
    database.execute(SCHEMA)
    database.value("select pg_create_logical_replication_slot(%s, 'pgoutput')", (database.name,))
    for statements in TRANSACTIONS:
        # Test servers commit asynchronously, so decoding could miss the last transaction.
        database.transaction("set local synchronous_commit = on", *statements)
    with database.connect() as connection:
        return encoding.stream(peek_messages(connection, database.name, "p"))


def decode(payloads: list[bytes]) -> list[dict[str, Any]]:
    batch = Decoder(numbering(), FAR).decode(MessageBatch.of(payloads))
    return [] if batch is None else batch.to_pylist()


def test_a_real_stream_has_the_rows_of_the_reference_decoder(recorded: list[bytes]) -> None:
    rows = decode(recorded)

    assert rows == reference.decode(recorded, 0, FAR)
    assert {row["op"] for row in rows} == {"I", "U", "D", "T", "M"}
    assert {row["old_kind"] for row in rows} == {"K", "O", None}


def test_a_real_message_cut_at_any_byte_is_parked_or_a_protocol_error(
    recorded: list[bytes],
) -> None:
    """A row that is cut after its relation id is parked."""
    for index, payload in enumerate(recorded):
        is_row = payload[25:26] in (b"I", b"U", b"D")
        # The long text repeats one byte three thousand times.
        places = range(len(payload)) if len(payload) < 300 else range(0, len(payload), 97)
        for length in places:
            if is_row and length >= 30:
                last = decode([*recorded[:index], payload[:length]])[-1]
                assert (last["op"], last["new"][1]) == ("P", f"\0\\x{payload[25:length].hex()}")
                continue
            with pytest.raises(ProtocolError):
                decode([*recorded[:index], payload[:length]])


def test_a_wrong_byte_is_a_protocol_error_or_changes_only_what_its_message_says(
    recorded: list[bytes],
) -> None:
    """Rows before the message never change. A change has one row, which is another one or parked.

    The rows behind a damaged Begin, Relation, Truncate or logical message may be others.
    """
    expected = decode(recorded)
    outcomes: Counter[str] = Counter()
    for index, payload in enumerate(recorded):
        first = len(decode(recorded[:index]))
        for place in range(0, min(len(payload), 300), 3):
            damaged = bytearray(payload)
            damaged[place] ^= 0x81
            try:
                rows = decode([*recorded[:index], bytes(damaged), *recorded[index + 1 :]])
            except ProtocolError:
                outcomes["error"] += 1
                continue
            assert rows[:first] == expected[:first]
            if place < 25:
                # LSNs and time of the frame, which whole transactions do not need.
                assert rows == expected
            elif payload[25:26] in (b"I", b"U", b"D"):
                assert rows[first + 1 :] == expected[first + 1 :]
                found = rows[first]
                assert found != expected[first]
                if found["op"] == "P":
                    assert found["new"][1] == f"\0\\x{damaged[25:].hex()}"
                outcomes["parked" if found["op"] == "P" else "another value"] += 1
    assert min(outcomes[each] for each in ("error", "parked", "another value")) > 10
