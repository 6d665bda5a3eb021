"""The decoder compared with a simple reference decoder."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.heads import MOST_VALUES, read_actions, split_by_values
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets_tests.support.protocol import encoding, reference
from pgcdc_assets_tests.support.protocol.encoding import UNCHANGED
from pgcdc_assets_tests.support.protocol.streams import streams

FAR = 2**62

ORDERS = Relation(
    16400,
    "shop",
    "orders",
    ReplicaIdentity.DEFAULT,
    (Column("id", 23, -1, True), Column("note", 25), Column("n", 23)),
)


def numbering() -> Any:
    """Return a resolver that counts announcements."""
    count = 0

    def resolve(
        relation: Relation, commit_lsn: Lsn, xid: int, is_for_row: bool
    ) -> tuple[Relation, int]:
        nonlocal count
        count += 1
        return relation, count

    return resolve


def decode(
    payloads: list[bytes],
    cuts: list[int] | None = None,
    start: int = 0,
    end: int = FAR,
    most_values: int = MOST_VALUES,
) -> tuple[list[dict[str, Any]], Decoder]:
    """Decode the payloads in batches that end at the cuts, and in parts of `most_values`."""
    decoder = Decoder(numbering(), end, start)
    rows: list[dict[str, Any]] = []
    borders = [0, *sorted(cuts or []), len(payloads)]
    for first, last in itertools.pairwise(borders):
        for part in split_by_values(MessageBatch.of(payloads[first:last]), most_values):
            batch = decoder.decode(part)
            if batch is not None:
                batch.validate(full=True)
                rows += batch.to_pylist()
    return rows, decoder


def transaction(*messages: bytes, lsn: int = 1000) -> list[bytes]:
    return encoding.stream(
        [encoding.begin(lsn, 7), encoding.relation(ORDERS), *messages, encoding.commit(lsn)]
    )


@settings(max_examples=300, deadline=None)
@given(streams(), st.data())
def test_any_stream_in_any_batches_has_the_rows_of_the_reference_decoder(
    payloads: list[bytes], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(payloads)), max_size=6))
    start = data.draw(st.sampled_from([0, 1000, 1100]))
    end = data.draw(st.sampled_from([FAR, FAR, 1050, 1150]))
    most_values = data.draw(st.sampled_from([1, 5, MOST_VALUES]))

    rows, _ = decode(payloads, cuts, start, end, most_values)

    assert rows == reference.decode(payloads, start, end)


def test_the_reference_decoder_shares_no_code_with_the_package() -> None:
    assert "pgcdc_assets" not in Path(reference.__file__).read_text()


def test_a_batch_is_decoded_in_parts_of_bounded_values() -> None:
    """D16: a NULL has one byte in the stream, and about fifty bytes during decoding."""
    wide = Relation(
        9, "s", "wide", ReplicaIdentity.FULL, tuple(Column(f"c{i}", 23) for i in range(40))
    )
    one, two = encoding.insert(9, [None] * 40), encoding.update(9, [None] * 40, [None] * 40, b"O")
    payloads = transaction(encoding.relation(wide), *[one] * 20, *[two] * 10, *[one] * 5)
    batch = MessageBatch.of(payloads)

    parts = list(split_by_values(batch, 400))

    # Begin and the two announcements have no values. An update has twice as many as an insert.
    assert [len(part.starts) for part in parts] == [13, 10, 5, 5, 6]
    assert all(part.buffer is batch.buffer for part in parts)
    assert decode(payloads, most_values=400)[0] == decode(payloads)[0]


def test_null_unchanged_and_empty_text_are_three_different_values() -> None:
    rows, _ = decode(transaction(encoding.insert(16400, [b"", None, UNCHANGED])))

    assert rows[0]["new"] == ["", None, None]
    assert rows[0]["unchanged"] == [2]


def test_a_truncate_of_three_tables_has_three_rows_with_different_ordinals() -> None:
    others = [Relation(16400 + i, "shop", f"t{i}", ReplicaIdentity.DEFAULT, ()) for i in (1, 2)]
    messages = [encoding.relation(other) for other in others]

    rows, _ = decode(
        transaction(
            *messages,
            encoding.truncate([16400, 16401, 16402]),
            encoding.insert(16400, [b"1", b"a", b"2"]),
        )
    )

    assert [(r["op"], r["table"], r["ordinal"]) for r in rows] == [
        ("T", "orders", 0),
        ("T", "t1", 1),
        ("T", "t2", 2),
        ("I", "orders", 3),
    ]


def test_a_keepalive_inside_a_transaction_does_not_end_the_window() -> None:
    payloads = transaction(
        encoding.insert(16400, [b"1", b"a", None]),
        encoding.keepalive(9000),
        encoding.insert(16400, [b"2", b"b", None]),
    )

    rows, decoder = decode(payloads, end=2000)
    assert len(rows) == 2
    assert not decoder.is_finished

    _, decoder = decode([*payloads, encoding.keepalive(2000)], end=2000)
    assert decoder.is_finished


def test_the_first_begin_at_the_windows_end_ends_it() -> None:
    later = [encoding.begin(2000, 8), encoding.insert(16400, [b"2", None, None])]

    rows, decoder = decode(
        [*transaction(encoding.insert(16400, [b"1", None, None])), *encoding.stream(later)],
        end=2000,
    )

    assert [row["new"][0] for row in rows] == ["1"]
    assert decoder.is_finished


def test_a_transaction_below_the_windows_start_is_dropped() -> None:
    rows, _ = decode(
        transaction(encoding.insert(16400, [b"1", None, None]), lsn=1000)
        + encoding.stream(
            [
                encoding.begin(2000, 8),
                encoding.insert(16400, [b"2", None, None]),
                encoding.commit(2000),
            ]
        ),
        start=1500,
    )

    assert [row["new"][0] for row in rows] == ["2"]


def test_impossible_positions_of_a_server_do_not_end_the_window() -> None:
    """BEHAVIOURS A18: LSN 0/0 in XLogData, 0/0 and the highest LSN in keepalives."""
    nonsense = [encoding.keepalive(0), encoding.keepalive(2**64 - 1)]

    rows, decoder = decode(
        [*nonsense, *transaction(encoding.insert(16400, [b"1", None, None])), *nonsense], end=2000
    )

    assert len(rows) == 1
    assert not decoder.is_finished


def test_a_non_transactional_message_is_counted_and_not_landed() -> None:
    message = encoding.logical_message("heartbeat", b"x", is_transactional=False)

    rows, decoder = decode(encoding.stream([message]))

    assert rows == []
    assert sum(decoder.warnings.values()) == 1


@pytest.mark.parametrize(
    ("payloads", "reason"),
    [
        (encoding.stream([b"?"]), "the action byte is unknown"),
        (encoding.stream([encoding.begin(5, 1), encoding.begin(6, 1)]), "do not alternate"),
        (encoding.stream([encoding.commit(5)]), "do not alternate"),
        (
            encoding.stream([encoding.begin(5, 1), encoding.commit(6)]),
            "is not the LSN of the open transaction",
        ),
        (
            encoding.stream([encoding.begin(0, 1)]),
            "the commit LSN is not above the last one",
        ),
        (
            encoding.stream([encoding.begin(5, 1), encoding.insert(9, [b"1"])]),
            "relation 9 was never announced",
        ),
        (
            encoding.stream([encoding.begin(5, 1), encoding.truncate([9])]),
            "relation 9 was never announced",
        ),
        (encoding.stream([encoding.insert(9, [b"1"])]), "outside a transaction"),
        (transaction(b"I\0\0\x40"), "names no relation"),
        ([b""], "neither a keepalive nor WAL data"),
        ([b"k123"], "neither a keepalive nor WAL data"),
    ],
)
def test_a_message_that_violates_the_protocol_is_an_error_with_the_reason(
    payloads: list[bytes], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode(payloads)


def test_every_action_byte_outside_of_the_protocol_is_refused() -> None:
    for action in set(range(256)) - set(b"BMCORYIUDTSEcAbPKrp"):
        with pytest.raises(ProtocolError, match="the action byte is unknown"):
            decode(encoding.stream([bytes([action]) + bytes(40)]))


def test_a_message_with_the_action_0_is_no_keepalive() -> None:
    good, damaged = encoding.xlog_data(encoding.begin(5, 1)), encoding.xlog_data(bytes(41))
    batch = MessageBatch.of([encoding.keepalive(5), good, damaged, damaged])
    assert read_actions(MessageBatch.of([encoding.keepalive(5), good])).tolist() == [0, ord("B")]
    with pytest.raises(ProtocolError) as caught:
        read_actions(batch)
    error = caught.value
    assert (error.message_type, error.offset, error.start) == ("0x00", 25, batch.starts[2])


def test_values_that_are_not_utf8_become_hex_and_are_counted_by_table() -> None:
    payloads = transaction(
        encoding.insert(16400, [b"\xc3", b"\xa9", None]),
        encoding.insert(16400, [b"1", b"\\xa9", None]),
        encoding.update(16400, [b"1", b"\xc3\xa9", b"\xff\x01"], [b"1", b"\xa9", None], b"O"),
    )
    rows, decoder = decode(payloads)
    assert [row["new"] for row in rows] == [
        ["\0\\xc3", "\0\\xa9", None],
        ["1", "\\xa9", None],
        ["1", "\xe9", "\0\\xff01"],
    ]
    assert rows[2]["old"] == ["1", "\0\\xa9", None]
    assert decoder.warnings == {"shop.orders: values that are not UTF-8, landed as hex": 4}


def test_a_binary_message_and_a_text_that_looks_like_it_land_differently() -> None:
    contents = [b"\xff", b"\\xff", b"\0\\xff", b"\0", b"", b"text"]
    rows, _ = decode(transaction(*(encoding.logical_message("m", c) for c in contents)))
    landed = [row["new"][1] for row in rows]
    assert landed == ["\0\\xff", "\\xff", "\0\\x005c786666", "\0\\x00", "", "text"]
    assert len(set(landed)) == len(contents)


@pytest.mark.parametrize(
    "damaged",
    [
        encoding.origin("o")[:-1],
        encoding.truncate([9]),
        b"?",
    ],
)
def test_an_error_names_the_transaction_of_its_message(damaged: bytes) -> None:
    first = [encoding.begin(500, 3), encoding.relation(ORDERS), encoding.commit(500)]
    for cuts in ([], [1], [4]):
        payloads = encoding.stream([*first, encoding.begin(0x16B3748, 7), damaged])
        with pytest.raises(ProtocolError, match=r"committed at 0/16B3748\)") as raised:
            decode(payloads, list(cuts))
        assert pickle.loads(pickle.dumps(raised.value)).commit_lsn == Lsn(0x16B3748)


def test_an_error_of_a_change_names_its_table() -> None:
    payloads = [*transaction(), *encoding.stream([encoding.insert(16400, [None] * 3)])]
    with pytest.raises(ProtocolError, match=r"\(table shop\.orders\): a change outside"):
        decode(payloads, [3])


@settings(max_examples=300, deadline=None)
@given(streams(), st.data())
def test_damaged_messages_raise_only_protocol_errors(
    payloads: list[bytes], data: st.DataObject
) -> None:
    damaged = list(payloads)
    index = data.draw(st.integers(0, len(damaged) - 1))
    message = bytearray(damaged[index])
    if data.draw(st.booleans()):
        del message[data.draw(st.integers(0, len(message) - 1)) :]
    else:
        position = data.draw(st.integers(0, len(message) - 1))
        message[position] = data.draw(st.integers(0, 255))
    damaged[index] = bytes(message)

    try:
        decode(damaged, [index], most_values=3)
    except ProtocolError as error:
        assert error.offset >= 0
