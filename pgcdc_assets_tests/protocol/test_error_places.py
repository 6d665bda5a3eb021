"""The message, table and transaction that a protocol error names, and limits of values."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.arrow_batch import DECODED
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.messages import POSTGRES_EPOCH_US
from pgcdc_assets.protocol.relation import Relation, ReplicaIdentity
from pgcdc_assets_tests.protocol.test_decoder import FAR, decode, numbering, transaction
from pgcdc_assets_tests.support.protocol import encoding

ROW = encoding.insert(16400, [b"1", b"a", None])
# Years 1 and 9999.
FIRST_US, LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
SHORT = b"I\0\0\x40"


def _error(payloads: list[bytes]) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(payloads)
    return caught.value


def _facts(error: ProtocolError) -> tuple[object, ...]:
    return error.message_type, error.start, error.commit_lsn


def test_an_error_names_type_and_start_of_its_message() -> None:
    payloads = transaction(ROW, SHORT)
    start = sum(map(len, payloads[:3]))
    assert _facts(_error(payloads)) == ("I", start, 1000)
    outside = encoding.stream([encoding.commit(500)])
    assert _facts(_error(outside)) == ("C", 0, None)
    unknown = transaction(b"?")
    assert _facts(_error(unknown)) == ("?", sum(map(len, unknown[:2])), 1000)


def test_a_message_before_the_first_transaction_has_no_transaction() -> None:
    """The batch's last message is a Begin, and no Begin precedes the first message."""
    payloads = encoding.stream([ROW, encoding.begin(1000, 7)])
    assert _error(payloads).commit_lsn is None


def test_a_keepalive_is_not_read_as_the_begin_after_it() -> None:
    """The byte where a longer message has its action belongs to the next message, and is a B."""
    begin, relation, commit = transaction()
    looks_like_begin = encoding.xlog_data(SHORT, int.from_bytes(b"B" * 8, "big"))
    payloads = [begin, relation, encoding.keepalive(1), looks_like_begin, commit]
    assert _error(payloads).commit_lsn == 1000


def test_an_error_of_a_message_without_a_table_names_no_table() -> None:
    error = _error(transaction(encoding.truncate([9])))
    assert "table" not in str(error)
    error = _error(encoding.stream([encoding.begin(5, 1), encoding.commit(6)]))
    assert "table" not in str(error)


def test_an_error_names_the_table_of_a_change_only_if_the_message_has_a_tuple() -> None:
    one = Relation(16401, "shop", "one", ReplicaIdentity("d"), ())
    for row, table in ((encoding.insert(16401, [None]), "table shop.one"), (SHORT, None)):
        with pytest.raises(ProtocolError) as caught:
            decode([*transaction(encoding.relation(one)), encoding.xlog_data(row)], [4])
        error = caught.value
        assert "outside a transaction" in str(error)
        assert ("table" in str(error)) is (table is not None)
        assert (table or "") in str(error)


@pytest.mark.parametrize("relation_id", [9, 16399, 16401])
@pytest.mark.parametrize("others", [(), (5, 20000)])
def test_a_change_of_a_relation_that_was_never_announced_is_refused(
    relation_id: int, others: tuple[int, ...]
) -> None:
    known = [encoding.relation(Relation(i, "s", "t", ReplicaIdentity("d"), ())) for i in others]
    payloads = transaction(*known, ROW, encoding.insert(relation_id, [b"1", b"a", None]), ROW)
    error = _error(payloads)
    assert f"relation {relation_id} was never announced" in str(error)
    assert error.start == sum(map(len, payloads[: 3 + len(known)]))


def test_a_relation_announced_after_its_change_is_refused() -> None:
    other = Relation(16401, "shop", "other", ReplicaIdentity("d"), ())
    row = encoding.insert(16401, [])
    assert "never announced" in str(_error(transaction(row, encoding.relation(other), row)))


def test_the_lsns_of_begin_and_commit_are_compared_exactly() -> None:
    begin, commit = encoding.begin(2**60, 7), encoding.commit(2**60 + 1)
    assert "is not the LSN" in str(_error(encoding.stream([begin, commit])))


@pytest.mark.parametrize("lsn", [2**63, 2**64 - 1])
def test_a_commit_lsn_that_exceeds_the_column_is_refused_without_its_value(lsn: int) -> None:
    error = _error(encoding.stream([encoding.begin(lsn, 1), ROW]))
    assert error.commit_lsn is None


@pytest.mark.parametrize(
    ("microseconds", "landed"),
    [
        (FIRST_US - 1, dt.datetime(2000, 1, 1)),
        (FIRST_US, dt.datetime.min),
        (LAST_US, dt.datetime.max),
        (LAST_US + 1, dt.datetime(2000, 1, 1)),
        (2**63 - 1 + POSTGRES_EPOCH_US, dt.datetime(2000, 1, 1)),
        (-(2**63) + POSTGRES_EPOCH_US, dt.datetime(2000, 1, 1)),
    ],
)
def test_a_commit_time_that_no_datetime_holds_is_the_one_of_no_time(
    microseconds: int, landed: dt.datetime
) -> None:
    begin = encoding.begin(1000, 7, microseconds)
    [row], _ = decode([encoding.xlog_data(begin), *transaction(ROW)[1:]])
    assert row["commit_ts"] == landed.replace(tzinfo=dt.UTC)


def test_kinds_of_old_tuples_stay_with_their_rows_and_the_batch_has_its_schema() -> None:
    tuple_ = [b"1", b"a", None]
    messages = [
        encoding.insert(16400, tuple_),
        encoding.update(16400, tuple_, tuple_, b"K"),
        encoding.update(16400, tuple_),
        encoding.update(16400, tuple_, tuple_, b"O"),
        encoding.logical_message("m", b"x"),
        encoding.delete(16400, tuple_, b"K"),
        encoding.truncate([16400]),
        encoding.delete(16400, tuple_, b"O"),
        encoding.insert(16400, tuple_),
    ]
    batch = Decoder(numbering(), FAR).decode(MessageBatch.of(transaction(*messages)))
    assert batch is not None
    assert batch.schema == DECODED
    assert batch["op"].to_pylist() == list("IUUUMDTDI")
    kinds = [None, "K", None, "O", None, "K", None, "O", None]
    assert batch["old_kind"].to_pylist() == kinds
    assert batch["old_kind"].null_count == kinds.count(None)
    assert [old is not None for old in batch["old"].to_pylist()] == [k is not None for k in kinds]
    assert batch["relation_id"].to_pylist() == [None if op == "M" else 16400 for op in "IUUUMDTDI"]


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        # The bytes after an empty message belong to the next message.
        (b"", "0x00"),
        (b"\x01", "0x01"),
        (b" ", "0x20"),
        (b"!", "!"),
        (b"~" * 40, "~"),
        (b"\x7f", "0x7F"),
        (b"\xff" * 40, "0xFF"),
        (b"k123", "k"),
        (b"w" + bytes(24), "w"),
    ],
)
def test_a_message_that_is_neither_keepalive_nor_data_is_named_by_its_first_byte(
    payload: bytes, kind: str
) -> None:
    payloads = [*transaction(ROW), payload, *transaction(ROW)]
    error = _error(payloads)
    assert (error.message_type, error.offset) == (kind, 0)


@pytest.mark.parametrize("change", [lambda m: m + b"x", lambda m: m[:-1]])
def test_a_begin_or_commit_of_another_length_is_refused(change: Callable[[bytes], bytes]) -> None:
    begin, relation, row, commit = transaction(ROW)
    for payloads in (
        [change(begin), relation, row, commit],
        [begin, relation, row, change(commit)],
    ):
        assert "the length is wrong" in str(_error(payloads))


def test_commit_lsns_rise_within_a_batch_and_between_two() -> None:
    payloads = [*transaction(ROW, lsn=10), *transaction(ROW, lsn=30), *transaction(ROW, lsn=20)]
    for cuts in ([], [8], [4], [4, 8]):
        with pytest.raises(ProtocolError, match="LSN") as caught:
            decode(payloads, cuts)
        assert caught.value.commit_lsn == 20
        assert caught.value.message_type == "B"


def test_the_highest_transaction_id_is_landed() -> None:
    rows, _ = decode([*encoding.stream([encoding.begin(1000, 2**32 - 1)]), *transaction(ROW)[1:]])
    assert [row["xid"] for row in rows] == [2**32 - 1]


def test_a_relation_is_resolved_as_of_its_transaction() -> None:
    asked: list[tuple[str, int, int]] = []

    def resolve(
        relation: Relation, commit_lsn: Lsn, xid: int, is_for_row: bool
    ) -> tuple[Relation, int]:
        asked.append((relation.table, commit_lsn, xid))
        return relation, 1

    first, second = encoding.begin(1000, 7), encoding.begin(2000, 8)
    announce = encoding.relation(Relation(16401, "shop", "other", ReplicaIdentity("d"), ()))
    messages = [first, announce, encoding.commit(1000), second, announce, encoding.commit(2000)]
    decoder = Decoder(resolve, FAR)
    decoder.decode(MessageBatch.of(encoding.stream(messages)))

    assert asked == [("other", 1000, 7), ("other", 2000, 8)]
    assert decoder.warnings == {}


@pytest.mark.parametrize(("position", "ends"), [(1999, False), (2000, True), (2**63 - 1, True)])
def test_a_keepalive_at_or_after_the_windows_end_ends_it(position: int, ends: bool) -> None:
    for keepalive, is_end in ((position, ends), (2**63, False)):
        _, decoder = decode([encoding.keepalive(keepalive)], end=2000)
        assert decoder.is_finished is is_end


def test_rows_of_text_have_no_warning() -> None:
    _, decoder = decode(transaction(ROW, encoding.update(16400, [b"1", b"b", None])))
    assert decoder.warnings == {}


@pytest.mark.parametrize(
    "message",
    [encoding.origin("o"), encoding.truncate([16400]), encoding.logical_message("m", b"x"), ROW],
)
def test_a_change_outside_a_transaction_is_refused(message: bytes) -> None:
    payloads = [*transaction(ROW), encoding.xlog_data(message)]
    error = _error(payloads)
    assert "outside a transaction" in str(error)
    assert (error.message_type, error.start) == (message[:1].decode(), sum(map(len, payloads[:4])))


def test_a_damaged_type_message_is_refused_although_its_content_is_not_used() -> None:
    error = _error(transaction(encoding.type_message(600, "shop", "mood") + b"x"))
    assert error.message_type == "Y"


def test_each_non_transactional_message_is_counted() -> None:
    message = encoding.logical_message("heartbeat", b"x", is_transactional=False)
    rows, decoder = decode(encoding.stream([message, message, message]))
    assert (rows, sum(decoder.warnings.values())) == ([], 3)
