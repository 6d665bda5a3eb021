"""The delimiters of protocol versions 2 to 4, byte by byte.

The bytes follow the tables of 53.9 Logical Replication Message Formats.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import transaction_messages as tm
from pgcdc_assets.protocol.messages import POSTGRES_EPOCH_US

# Int64 values of the documentation's tables, with every byte different.
LSN, LSN_BYTES = 0x0102030405060708, bytes(range(1, 9))
END, END_BYTES = 0x1112131415161718, bytes(range(0x11, 0x19))
# 2000-01-01 00:00:01 and 00:00:02, as microseconds since 2000 and since 1970.
ONE, ONE_BYTES, ONE_US = 1_000_000, (1_000_000).to_bytes(8, "big"), 946_684_801_000_000
TWO_BYTES, TWO_US = (2_000_000).to_bytes(8, "big"), 946_684_802_000_000
XID, XID_BYTES = 0x21222324, bytes(range(0x21, 0x25))
SUB, SUB_BYTES = 0x31323334, bytes(range(0x31, 0x35))
GID, GID_BYTES = "é-1", "é-1".encode() + b"\0"

CASES: list[tuple[Callable[[bytes], object], bytes, object]] = [
    (tm.parse_stream_start, b"S" + XID_BYTES + b"\x01", (XID, True)),
    (tm.parse_stream_start, b"S" + XID_BYTES + b"\x00", (XID, False)),
    (tm.check_stream_stop, b"E", None),
    (
        tm.parse_stream_commit,
        b"c" + XID_BYTES + b"\0" + LSN_BYTES + END_BYTES + ONE_BYTES,
        (XID, LSN, END, ONE_US),
    ),
    (tm.parse_stream_abort, b"A" + XID_BYTES + SUB_BYTES, (XID, SUB, None, None)),
    (
        tm.parse_stream_abort,
        b"A" + XID_BYTES + SUB_BYTES + LSN_BYTES + ONE_BYTES,
        (XID, SUB, LSN, ONE_US),
    ),
    (
        tm.parse_begin_prepare,
        b"b" + LSN_BYTES + END_BYTES + ONE_BYTES + XID_BYTES + GID_BYTES,
        (XID, GID, LSN, END, ONE_US),
    ),
    *(
        (
            tm.parse_prepared,
            action + b"\0" + LSN_BYTES + END_BYTES + ONE_BYTES + XID_BYTES + GID_BYTES,
            (XID, GID, LSN, END, ONE_US),
        )
        for action in (b"P", b"K", b"p")
    ),
    (
        tm.parse_rollback_prepared,
        b"r\0" + LSN_BYTES + END_BYTES + ONE_BYTES + TWO_BYTES + XID_BYTES + GID_BYTES,
        (XID, GID, LSN, END, ONE_US, TWO_US),
    ),
]
IDS = [case[1][:1].decode() for case in CASES]


@pytest.mark.parametrize(("parse", "data", "expected"), CASES, ids=IDS)
def test_a_message_has_the_fields_of_the_documentation(
    parse: Callable[[bytes], object], data: bytes, expected: object
) -> None:
    assert parse(data) == expected


@pytest.mark.parametrize(("parse", "data", "expected"), CASES, ids=IDS)
def test_a_message_that_is_cut_or_too_long_is_refused(
    parse: Callable[[bytes], object], data: bytes, expected: object
) -> None:
    for length in range(1, len(data)):
        if data[:1] == b"A" and length == 9:
            continue
        with pytest.raises(ProtocolError) as caught:
            parse(data[:length])
        assert caught.value.message_type == chr(data[0])
    with pytest.raises(ProtocolError):
        parse(data + b"\0")


@pytest.mark.parametrize("data", [case[1] for case in CASES if case[1][:1] in b"cPKpr"])
def test_unknown_flags_are_refused(data: bytes) -> None:
    place = 5 if data[:1] == b"c" else 1
    parse = next(case[0] for case in CASES if case[1] == data)
    with pytest.raises(ProtocolError, match="flags 1"):
        parse(data[:place] + b"\x01" + data[place + 1 :])


@pytest.mark.parametrize(("parse", "data"), [case[:2] for case in CASES], ids=IDS)
def test_impossible_values_are_refused(parse: Callable[[bytes], object], data: bytes) -> None:
    for good, bad, reason in (
        (XID_BYTES, bytes(4), "transaction id is 0"),
        (SUB_BYTES, bytes(4), "transaction id is 0"),
        (LSN_BYTES, b"\xff" * 8, "LSN is impossible"),
        (END_BYTES, bytes(8), "LSN is impossible"),
    ):
        is_aborted = data[:1] == b"A" and good is LSN_BYTES
        if good in data and not is_aborted:
            with pytest.raises(ProtocolError, match=reason):
                parse(data.replace(good, bad))


def test_the_first_and_the_last_time_of_a_datetime_are_read() -> None:
    head = b"c" + XID_BYTES + b"\0" + LSN_BYTES + END_BYTES
    for bound, outside in ((dt.datetime.min, -1), (dt.datetime.max, 1)):
        time_us = (bound - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)
        times = [time_us - POSTGRES_EPOCH_US, time_us + outside - POSTGRES_EPOCH_US]
        inside, beyond = (head + time.to_bytes(8, "big", signed=True) for time in times)
        assert tm.parse_stream_commit(inside).time_us == time_us
        assert tm.parse_stream_commit(beyond).time_us == POSTGRES_EPOCH_US


def test_the_highest_lsn_fits_into_the_columns_of_the_raw_zone() -> None:
    def commit(lsn: int) -> bytes:
        return b"c" + XID_BYTES + b"\0" + lsn.to_bytes(8, "big") + END_BYTES + ONE_BYTES

    assert tm.parse_stream_commit(commit(2**63 - 1)).commit_lsn == 2**63 - 1
    with pytest.raises(ProtocolError, match="LSN is impossible"):
        tm.parse_stream_commit(commit(2**63))


def test_the_flag_of_the_first_block_is_0_or_1() -> None:
    with pytest.raises(ProtocolError, match="first block"):
        tm.parse_stream_start(b"S" + XID_BYTES + b"\x02")
