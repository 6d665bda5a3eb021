"""The status packets that a client writes, and rare messages that it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import messages
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets_tests.support.protocol import encoding


@pytest.mark.parametrize("reply_requested", [False, True])
def test_a_status_packet_has_the_fields_of_the_protocol(reply_requested: bool) -> None:
    packet = messages.standby_status(0x16B3748, reply_requested=reply_requested, now_us=10**15)

    assert packet[:1] == b"r"
    positions = [int.from_bytes(packet[at : at + 8], "big") for at in (1, 9, 17)]
    assert positions == [0x16B3748] * 3, "written, flushed, applied"
    # Microseconds since 2000-01-01, which are 53,315,200 s after 10^15 microseconds of Unix.
    assert int.from_bytes(packet[25:33], "big", signed=True) == 53_315_200_000_000
    assert packet[33:] == bytes([reply_requested])


def test_a_status_packet_requests_no_reply_by_default() -> None:
    assert messages.standby_status(1)[-1] == 0


@pytest.mark.parametrize(
    ("options", "cascade", "restart"), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
)
def test_the_options_of_a_truncate_are_read(options: int, cascade: int, restart: int) -> None:
    message = b"T" + (2).to_bytes(4, "big") + bytes([options]) + b"\0\0\0\7\xff\0\0\1"

    assert messages.parse_truncate(message) == ((7, 0xFF000001), cascade, restart)


@pytest.mark.parametrize("count", [-1, 0, 1, 3])
def test_a_truncate_with_a_wrong_number_of_tables_is_refused(count: int) -> None:
    message = b"T" + count.to_bytes(4, "big", signed=True) + b"\0" + bytes(8)

    with pytest.raises(ProtocolError, match=f"{count} .*8 bytes"):
        messages.parse_truncate(message)


def test_an_empty_namespace_stands_for_pg_catalog() -> None:
    assert messages.parse_type(encoding.type_message(600, "", "point")) == (600, "pg_catalog.point")
    assert messages.parse_type(encoding.type_message(1, "shop", "mood")) == (1, "shop.mood")


def test_an_error_has_the_position_and_kind_of_a_wrong_byte() -> None:
    message = encoding.type_message(600, "shop", "mood")

    with pytest.raises(ProtocolError, match="a name has no") as caught:
        messages.parse_type(message[:-1])
    assert (caught.value.message_type, caught.value.offset) == ("Y", len(b"Y0123shop."))
    with pytest.raises(ProtocolError, match="1 bytes follow") as caught:
        messages.parse_type(message + b"x")
    assert caught.value.offset == len(message)
    with pytest.raises(ProtocolError, match="in the middle of a field") as caught:
        messages.parse_type(b"")
    assert caught.value.message_type == "nothing"


def test_a_name_that_is_not_utf8_is_written_as_hex() -> None:
    message = encoding.type_message(600, "shop", "mood").replace(b"mood", b"m\xffod")
    assert messages.parse_type(message) == (600, "shop.\0\\x6dff6f64")


@pytest.mark.parametrize("identity", ["d", "n", "f", "i"])
def test_a_relation_is_read_with_every_field_of_its_columns(identity: str) -> None:
    columns = (Column("id", 2**32 - 1, -1, is_key=True), Column("é", 1700, 655_366))
    described = Relation(16400, "shop", "orders", ReplicaIdentity(identity), columns)

    assert messages.parse_relation(encoding.relation(described)) == described


def test_only_the_lowest_flag_of_a_column_marks_the_key() -> None:
    column = Column("id", 23, is_key=True)
    message = encoding.relation(Relation(1, "s", "t", ReplicaIdentity.DEFAULT, (column,)))

    for flags, is_key in ((0, False), (1, True), (2, False), (3, True)):
        changed = message.replace(b"\1id\0", bytes([flags]) + b"id\0")
        assert messages.parse_relation(changed).columns == (replace(column, is_key=is_key),)


def test_a_relation_with_an_unknown_identity_or_trailing_bytes_is_refused() -> None:
    message = encoding.relation(Relation(1, "", "t", ReplicaIdentity.DEFAULT, ()))

    assert messages.parse_relation(message).schema == "pg_catalog"
    with pytest.raises(ProtocolError, match="replica identity"):
        messages.parse_relation(message.replace(b"t\0d", b"t\0x"))
    with pytest.raises(ProtocolError, match="2 bytes follow"):
        messages.parse_relation(message + b"xx")


def test_an_origin_with_trailing_bytes_is_refused() -> None:
    message = encoding.origin("standby")

    assert messages.parse_origin(message) == "standby"
    with pytest.raises(ProtocolError, match="1 bytes follow"):
        messages.parse_origin(message + b"x")


@pytest.mark.parametrize("is_transactional", [False, True])
def test_the_positions_of_the_texts_in_a_logical_message_are_found(is_transactional: bool) -> None:
    message = encoding.logical_message("outbox", b"hello", is_transactional=is_transactional)

    found = messages.parse_logical_message(message)

    assert found.is_transactional is is_transactional
    assert message[slice(*found.prefix)] == b"outbox"
    assert message[slice(*found.content)] == b"hello"
    for wrong in (message + b"x", message[:-1]):
        with pytest.raises(ProtocolError, match="content of 5 bytes"):
            messages.parse_logical_message(wrong)
