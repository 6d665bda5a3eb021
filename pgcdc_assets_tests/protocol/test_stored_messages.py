"""Messages with texts in the encoding of their database are those of a client of UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.protocol import utf8
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.protocol.stored_messages import StoredMessages
from pgcdc_assets_tests.support.encoded import converting
from pgcdc_assets_tests.support.protocol import encoding
from pgcdc_assets_tests.support.protocol.encoding import UNCHANGED, Value

pytestmark = pytest.mark.postgres

# An OID, a transaction id and an LSN whose bytes are letters of the encoding, but no texts.
OID, XID, LSN = 0xE9E9E9E9, 0xE9E9E9E9, 0x69E9E9E9E9E9E9E9
ORDERS = Relation(
    OID,
    "schéma",
    "ordré",
    ReplicaIdentity.DEFAULT,
    (Column("é", 0xE9E9E9E9, -1, True), Column("ét", 25, 0x69E9E9E9), Column("né", 23)),
)
NEW: list[Value] = ["né".encode(), None, b"", UNCHANGED, b"plain", "éé".encode(), None]
OLD: list[Value] = [None, "é".encode(), UNCHANGED]
# By type, messages in UTF-8. A streamed block has the id of the transaction behind the type.
CHANGES = [
    encoding.insert(OID, NEW),
    encoding.insert(OID, []),
    encoding.update(OID, NEW),
    encoding.update(OID, NEW, OLD),
    encoding.update(OID, [], OLD, b"O"),
    encoding.delete(OID, OLD),
    encoding.delete(OID, OLD, b"O"),
]
NAMES = [
    encoding.relation(ORDERS),
    encoding.type_message(OID, "schéma", "typé"),
    encoding.type_message(OID, "", "é"),
    encoding.type_message(OID, "é", ""),
    encoding.relation(replace(ORDERS, schema="", table="é", columns=())),
    encoding.logical_message("é", b"content"),
]
ORIGIN = encoding.origin("é")
GIDS = [
    encoding.begin_prepare(LSN, XID, "é"),
    encoding.prepare(LSN, XID, "é gid"),
    encoding.commit_prepared(LSN, XID, "é"),
    encoding.stream_prepare(LSN, XID, "é gid"),
    encoding.rollback_prepared(LSN, LSN, XID, "é"),
]
# Messages without a text, and of an unknown type: bytes that look like letters stay.
OTHERS = [
    encoding.begin(LSN, XID),
    encoding.truncate([OID]),
    encoding.commit(LSN),
    b"X\0\0\0\0N\0\1t\0\0\0\1\xe9",
]


@pytest.fixture
def messages(server: EmbeddedServer) -> Iterator[StoredMessages]:
    with converting(server, "LATIN1") as found:
        yield StoredMessages(found)


def as_stored(message: bytes) -> bytes:
    """Return a message as a server sends it to a client of LATIN1."""
    # Letters in values are one byte shorter, which their lengths tell.
    for text in ("né", "éé", "é"):
        ours, theirs = text.encode(), text.encode("latin1")
        message = message.replace(
            b"t" + len(ours).to_bytes(4, "big") + ours,
            b"t" + len(theirs).to_bytes(4, "big") + theirs,
        )
    return message.replace("é".encode(), b"\xe9")


def payloads(batch: MessageBatch) -> list[bytes]:
    return [
        batch.buffer[start:end].tobytes()
        for start, end in zip(batch.starts.tolist(), batch.ends.tolist(), strict=True)
    ]


def converted(messages: StoredMessages, *stored: bytes) -> list[bytes]:
    """Return the converted messages, without their heads."""
    batch = messages.convert(MessageBatch.of([encoding.xlog_data(each, LSN) for each in stored]))
    found = payloads(batch)
    assert all(each[:25] == encoding.xlog_data(b"", LSN) for each in found)
    return [each[25:] for each in found]


def test_each_message_type_is_converted(messages: StoredMessages) -> None:
    sent = [*CHANGES, *NAMES, ORIGIN, *GIDS, *OTHERS]
    stored = [as_stored(message) for message in sent]
    assert [old != new for old, new in zip(stored, sent, strict=True)] == [
        message not in (encoding.insert(OID, []), *OTHERS) for message in sent
    ]
    assert converted(messages, *stored) == sent
    for old, new in zip(stored, sent, strict=True):
        assert converted(messages, old) == [new]


def test_messages_of_a_block_have_transaction_ids(messages: StoredMessages) -> None:
    inside = [encoding.with_xid(message, XID) for message in [*CHANGES, *NAMES, ORIGIN]]
    start, stop = encoding.stream_start(XID, is_first=True), encoding.stream_stop()
    sent = [CHANGES[0], start, *inside, stop, *CHANGES, start, stop, GIDS[3], *NAMES]
    stored = [as_stored(message) for message in sent]
    # A block continues in the next batch.
    for cut in range(len(sent)):
        first, second = stored[:cut], stored[cut:]
        assert converted(messages, *first) + converted(messages, *second) == sent


def test_only_the_name_of_a_logical_message_is_converted(messages: StoredMessages) -> None:
    content = b"\xe9\0\xe9"
    [found] = converted(
        messages, as_stored(encoding.logical_message("é", b""))[:-4] + b"\0\0\0\3" + content
    )
    assert found == encoding.logical_message("é", content)


def test_messages_of_ascii_and_keepalives_are_returned_as_they_are(
    messages: StoredMessages,
) -> None:
    ascii_ = encoding.xlog_data(encoding.insert(1, [b"a", None]), LSN)
    for sent in ([], [ascii_], [encoding.keepalive(LSN), ascii_], [b"w" + b"\xe9" * 24]):
        batch = MessageBatch.of(sent)
        assert messages.convert(batch) is batch
    keepalive = encoding.keepalive(LSN)
    row = encoding.xlog_data(as_stored(CHANGES[0]))
    found = messages.convert(MessageBatch.of([keepalive, row, keepalive, b"", ascii_]))
    assert payloads(found) == [keepalive, encoding.xlog_data(CHANGES[0]), keepalive, b"", ascii_]


def test_a_malformed_message_stays_as_it_is(messages: StoredMessages) -> None:
    """The decoder refuses it, or parks the row with its bytes as sent."""
    row = as_stored(CHANGES[3])
    behind_old = len(as_stored(encoding.delete(OID, OLD)))
    for length in range(1, len(row)):
        is_whole = length in (5, behind_old)
        assert is_whole or converted(messages, row[:length]) == [row[:length]]
    value = b"\0\0\0\1\xe9"
    for damaged in (
        row + b"\xe9",
        row.replace(b"N", b"X"),
        encoding.insert(1, [None, b"1"]).replace(b"n", b"X")[:-1] + b"\xe9",
        encoding.insert(1, [b"1"])[:-6] + b"b" + value,
        encoding.insert(1, [b"1"])[:-6] + b"t\xff\xff\xff\xff\xe9",
        encoding.insert(1, [b"1"])[:-6] + b"t\0\0\0\2\xe9",
    ):
        assert converted(messages, damaged) == [damaged]
    for whole in map(as_stored, [*NAMES, ORIGIN, *GIDS]):
        # No name ends with the message, so a decoder refuses each.
        name_at = whole.index(b"\xe9")
        for length in range(1, name_at + 1):
            assert converted(messages, whole[:length]) == [whole[:length]]
    # Other messages of the batch are converted.
    assert converted(messages, row[:-1], row) == [row[:-1], CHANGES[3]]


def test_a_character_without_a_form_in_utf8_is_marked_in_a_value_only(
    server: EmbeddedServer,
) -> None:
    relation = encoding.relation(ORDERS).replace("é".encode(), b"\x81")
    row = encoding.update(1, [b"\x81", b"\x80", b"a"], [b"x\x81"])
    with converting(server, "WIN1252") as found:
        euro = encoding.insert(1, [b"\x80"])
        assert converted(StoredMessages(found), euro) == [encoding.insert(1, ["€".encode()])]
        assert converted(StoredMessages(found), relation, row) == [
            relation,
            encoding.update(1, [utf8.RAW + b"\x81", "€".encode(), b"a"], [utf8.RAW + b"x\x81"]),
        ]
