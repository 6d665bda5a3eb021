"""Each message type of the four protocol versions, from bytes that were written by hand.

The bytes follow the tables of "Logical Replication Message Formats", field by field:
https://www.postgresql.org/docs/18/protocol-logicalrep-message-formats.html. A group of hex digits
is a field. No encoder wrote the bytes. The frame around a message is XLogData of
https://www.postgresql.org/docs/18/protocol-replication.html.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol import messages
from pgcdc_assets.protocol import transaction_messages as tm
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.protocol.streaming_decoder import StreamingDecoder
from pgcdc_assets_tests.protocol.test_decoder import FAR
from pgcdc_assets_tests.support.protocol.streaming import MemorySpool

# w, start LSN, end LSN, time.
FRAME = "77 00000000016B3700 00000000016B3700 0002EA470AE86000"
# LSN 0/16B3748, 2026-01-01 00:00:00 in microseconds since 2000, xid 757.
BEGIN = "42 00000000016B3748 0002EA470AE86000 000002F5"
# Flags, commit LSN, end LSN 0/16B3778, time.
COMMIT = "43 00 00000000016B3748 00000000016B3778 0002EA470AE86000"
# OID 16400, shop, orders, identity d, 3 columns: flags, name, type, typmod.
_ORDERS = (
    "00004010 73686F7000 6F726465727300 64 0003 "
    "01 696400 00000017 FFFFFFFF 00 6E6F746500 00000019 FFFFFFFF 00 6E00 000006A4 000A0006"
)
RELATION, STREAMED_RELATION = f"52 {_ORDERS}", f"52 000002F5 {_ORDERS}"
INSERT = "49 00004010 4E 0003 74 00000001 31 74 00000002 C3A9 6E"
STREAMED_INSERT = "49 000002F5 00004010 4E 0003 74 00000001 31 74 00000002 C3A9 6E"
STREAM_START, STREAM_STOP = "53 000002F5 01", "45"
# Xid, flags, commit LSN, end LSN, time.
STREAM_COMMIT = "63 000002F5 00 00000000016B3748 00000000016B3778 0002EA470AE86000"

LSN, END = 0x16B3748, 0x16B3778
TIME = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
TIME_US, LATER_US = 1_767_225_600_000_000, 1_767_225_601_000_000
ORDERS = Relation(
    16400,
    "shop",
    "orders",
    ReplicaIdentity.DEFAULT,
    (Column("id", 23, -1, True), Column("note", 25), Column("n", 1700, 655_366)),
)


class Stream:
    """A decoder and what it has found."""

    def __init__(self) -> None:
        self.relations: list[Relation] = []
        self.spool = MemorySpool()
        self.decoder = StreamingDecoder(self._resolve, self.spool, FAR)

    def _resolve(
        self, relation: Relation, commit_lsn: Lsn, xid: int, is_for_row: bool
    ) -> tuple[Relation, int]:
        self.relations.append(relation)
        return relation, 1

    def read(self, *hex_messages: str) -> list[dict[str, Any]]:
        """Return the rows of messages."""
        batches = self.decoder.decode(framed(*hex_messages))
        return [row for batch in batches for row in batch.to_pylist()]


def framed(*hex_messages: str) -> MessageBatch:
    """Return a batch of messages."""
    return MessageBatch.of([bytes.fromhex(f"{FRAME} {each}") for each in hex_messages])


def by(parse: Callable[[bytes], object]) -> Callable[[str], object]:
    """Return the parser for a message in hex."""
    return lambda message: parse(bytes.fromhex(message))


def transaction(message: str) -> object:
    """Read a Begin. Return commit LSN, commit time and xid of the transaction's row."""
    [row] = Stream().read(message, RELATION, INSERT, COMMIT)
    return row["commit_lsn"], row["commit_ts"], row["xid"]


def commit(message: str) -> object:
    """Read a Commit. Return the commit LSN of a transaction that ends, and whether it ended."""
    decoder = Decoder(lambda relation, commit_lsn, xid, is_for_row: (relation, 1), FAR)
    decoder.decode(framed(BEGIN, message))
    return decoder.last_commit_lsn, not decoder.is_open


def origin(message: str) -> object:
    """Read an Origin of a transaction, and one of a streamed transaction."""
    [row] = Stream().read(BEGIN, message, RELATION, INSERT, COMMIT)
    [streamed] = Stream().read(
        STREAM_START, message, STREAMED_RELATION, STREAMED_INSERT, STREAM_STOP, STREAM_COMMIT
    )
    return row["origin"], streamed["origin"]


def announced(message: str) -> object:
    """Read a Relation. Return the relations of the transaction."""
    stream = Stream()
    stream.read(BEGIN, message, INSERT, COMMIT)
    return stream.relations


def streamed_announced(message: str) -> object:
    stream = Stream()
    stream.read(STREAM_START, message, STREAMED_INSERT, STREAM_STOP, STREAM_COMMIT)
    return stream.relations


def row(message: str) -> object:
    """Read a change. Return operation, table, kind of the old tuple, tuples, unchanged columns."""
    return [_shown(each) for each in Stream().read(BEGIN, RELATION, message, COMMIT)]


def streamed_row(message: str) -> object:
    """Read a change of a streamed transaction. Return its xid and the rest as `row`."""
    stream = Stream()
    assert stream.read(STREAM_START, STREAMED_RELATION, message, STREAM_STOP) == []
    xids = [xid for rows in stream.spool.rows.get(757, []) for xid in rows["xid"].to_pylist()]
    return xids, [_shown(each) for each in stream.read(STREAM_COMMIT)]


def streamed_transaction(message: str) -> object:
    """Read a Stream Commit. Return commit LSN, commit time and xid of the transaction's row."""
    [row] = Stream().read(STREAM_START, STREAMED_RELATION, STREAMED_INSERT, STREAM_STOP, message)
    return row["commit_lsn"], row["commit_ts"], row["xid"]


def _shown(row: dict[str, Any]) -> Sequence[object]:
    names = ("op", "table", "old_kind", "old", "new", "unchanged")
    return tuple(row[name] for name in names)


INSERTED = ("I", "orders", None, None, ["1", "é", None], None)
# The subtransaction 758 of 757.
SUBTRANSACTION = [758]

CASES: dict[str, tuple[Callable[[str], object], str, object]] = {
    # Version 1.
    "Begin": (transaction, BEGIN, (LSN, TIME, 757)),
    "Commit": (commit, COMMIT, (LSN, True)),
    "Origin": (origin, "4F 00000000016B3748 7374616E64627900", ("standby", "standby")),
    "Relation": (announced, RELATION, [ORDERS]),
    "Relation of pg_catalog without a column": (
        by(messages.parse_relation),
        "52 000004D0 00 745F6E616D6500 6E 0000",
        Relation(1232, "pg_catalog", "t_name", ReplicaIdentity.NOTHING, ()),
    ),
    "Type": (by(messages.parse_type), "59 00004011 73686F7000 6D6F6F6400", (16401, "shop.mood")),
    "Message, transactional": (
        row,
        "4D 01 00000000016B3740 6F7574626F7800 00000005 68656C6C6F",
        [("M", None, None, None, ["outbox", "hello"], None)],
    ),
    "Message, not transactional": (
        by(messages.parse_logical_message),
        "4D 00 00000000016B3740 6F7574626F7800 00000005 68656C6C6F",
        (False, 0x16B3740, (10, 16), (21, 26)),
    ),
    "Insert": (row, INSERT, [INSERTED]),
    "Update without an old tuple": (
        row,
        "55 00004010 4E 0003 74 00000001 31 75 74 00000004 312E3530",
        [("U", "orders", None, None, ["1", None, "1.50"], [1])],
    ),
    "Update with the old key": (
        row,
        "55 00004010 4B 0003 74 00000001 31 6E 6E 4E 0003 74 00000001 32 74 00000000 6E",
        [("U", "orders", "K", ["1", None, None], ["2", "", None], None)],
    ),
    "Update with the old row": (
        row,
        "55 00004010 4F 0003 74 00000001 31 74 00000002 C3A9 6E"
        " 4E 0003 74 00000001 31 74 00000001 62 6E",
        [("U", "orders", "O", ["1", "é", None], ["1", "b", None], None)],
    ),
    "Delete with the old key": (
        row,
        "44 00004010 4B 0003 74 00000001 31 6E 6E",
        [("D", "orders", "K", ["1", None, None], None, None)],
    ),
    "Delete with the old row": (
        row,
        "44 00004010 4F 0003 74 00000001 31 74 00000002 C3A9 6E",
        [("D", "orders", "O", ["1", "é", None], None, None)],
    ),
    "Truncate": (
        row,
        "54 00000002 03 00004010 00004010",
        [("T", "orders", None, None, None, None)] * 2,
    ),
    "Truncate CASCADE": (
        by(messages.parse_truncate),
        "54 00000001 01 00004010",
        ((16400,), True, False),
    ),
    "Truncate RESTART IDENTITY": (
        by(messages.parse_truncate),
        "54 00000001 02 00004010",
        ((16400,), False, True),
    ),
    # Version 2.
    "Stream Start": (by(tm.parse_stream_start), STREAM_START, (757, True)),
    "Stream Start of a later block": (by(tm.parse_stream_start), "53 000002F5 00", (757, False)),
    "Stream Stop": (by(tm.check_stream_stop), STREAM_STOP, None),
    "Stream Commit": (by(tm.parse_stream_commit), STREAM_COMMIT, (757, LSN, END, TIME_US)),
    "Stream Commit of a row": (streamed_transaction, STREAM_COMMIT, (LSN, TIME, 757)),
    "Stream Abort": (by(tm.parse_stream_abort), "41 000002F5 000002F6", (757, 758, None, None)),
    "Relation in a block": (streamed_announced, STREAMED_RELATION, [ORDERS]),
    "Type in a block": (streamed_row, "59 000002F6 00004011 73686F7000 6D6F6F6400", ([], [])),
    "Message in a block": (
        streamed_row,
        "4D 000002F6 01 00000000016B3740 6F7574626F7800 00000005 68656C6C6F",
        (SUBTRANSACTION, [("M", None, None, None, ["outbox", "hello"], None)]),
    ),
    "Insert in a block": (
        streamed_row,
        "49 000002F6 00004010 4E 0003 74 00000001 31 74 00000002 C3A9 6E",
        (SUBTRANSACTION, [INSERTED]),
    ),
    "Update in a block without an old tuple": (
        streamed_row,
        "55 000002F6 00004010 4E 0003 74 00000001 31 75 74 00000004 312E3530",
        (SUBTRANSACTION, [("U", "orders", None, None, ["1", None, "1.50"], [1])]),
    ),
    "Update in a block with the old key": (
        streamed_row,
        "55 000002F6 00004010 4B 0003 74 00000001 31 6E 6E 4E 0003 74 00000001 32 74 00000000 6E",
        (SUBTRANSACTION, [("U", "orders", "K", ["1", None, None], ["2", "", None], None)]),
    ),
    "Update in a block with the old row": (
        streamed_row,
        "55 000002F6 00004010 4F 0003 74 00000001 31 74 00000002 C3A9 6E"
        " 4E 0003 74 00000001 31 74 00000001 62 6E",
        (SUBTRANSACTION, [("U", "orders", "O", ["1", "é", None], ["1", "b", None], None)]),
    ),
    "Delete in a block with the old key": (
        streamed_row,
        "44 000002F6 00004010 4B 0003 74 00000001 31 6E 6E",
        (SUBTRANSACTION, [("D", "orders", "K", ["1", None, None], None, None)]),
    ),
    "Delete in a block with the old row": (
        streamed_row,
        "44 000002F6 00004010 4F 0003 74 00000001 31 74 00000002 C3A9 6E",
        (SUBTRANSACTION, [("D", "orders", "O", ["1", "é", None], None, None)]),
    ),
    "Truncate in a block": (
        streamed_row,
        "54 000002F6 00000001 00 00004010",
        (SUBTRANSACTION, [("T", "orders", None, None, None, None)]),
    ),
    # Version 3. The gid is order-1é; the LSN is that of PREPARE or COMMIT PREPARED.
    "Begin Prepare": (
        by(tm.parse_begin_prepare),
        "62 00000000016B3748 00000000016B3778 0002EA470AE86000 000002F5 6F726465722D31C3A900",
        (757, "order-1é", LSN, END, TIME_US),
    ),
    "Prepare": (
        by(tm.parse_prepared),
        "50 00 00000000016B3748 00000000016B3778 0002EA470AE86000 000002F5 6F726465722D31C3A900",
        (757, "order-1é", LSN, END, TIME_US),
    ),
    "Commit Prepared": (
        by(tm.parse_prepared),
        "4B 00 00000000016B3748 00000000016B3778 0002EA470AE86000 000002F5 6F726465722D31C3A900",
        (757, "order-1é", LSN, END, TIME_US),
    ),
    # The end of PREPARE and of ROLLBACK PREPARED, and the times of both.
    "Rollback Prepared": (
        by(tm.parse_rollback_prepared),
        "72 00 00000000016B3748 00000000016B3778 0002EA470AE86000 0002EA470AF7A240"
        " 000002F5 6F726465722D31C3A900",
        (757, "order-1é", LSN, END, TIME_US, LATER_US),
    ),
    "Stream Prepare": (
        by(tm.parse_prepared),
        "70 00 00000000016B3748 00000000016B3778 0002EA470AE86000 000002F5 6F726465722D31C3A900",
        (757, "order-1é", LSN, END, TIME_US),
    ),
    # Version 4.
    "Stream Abort with LSN and time": (
        by(tm.parse_stream_abort),
        "41 000002F5 000002F6 00000000016B3748 0002EA470AE86000",
        (757, 758, LSN, TIME_US),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_message_has_the_fields_of_the_documentation(name: str) -> None:
    read, message, expected = CASES[name]
    assert read(message) == expected


def test_each_message_type_has_a_case() -> None:
    types = {bytes.fromhex(message[:2]) for _, message, _ in CASES.values()}
    assert b"".join(sorted(types)) == b"ABCDEIKMOPRSTUYbcpr"
