"""What a protocol error says of its place: message, table, transaction; and borders of values."""

from __future__ import annotations

import datetime as dt

import pytest

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.arrow_batch import DECODED
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets_tests.protocol.test_decoder import FAR, decode, numbering, transaction
from pgcdc_assets_tests.support.protocol import encoding

ROW = encoding.insert(16400, [b"1", b"a", None])
# Years 1 and 9999.
FIRST_US, LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
SHORT = encoding.insert(16400, [b"1"])


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


def test_a_message_before_every_transaction_belongs_to_none() -> None:
    """The batch's last message is a Begin, and no Begin comes before the first one."""
    payloads = encoding.stream([ROW, encoding.begin(1000, 7)])
    assert _error(payloads).commit_lsn is None


def test_a_keepalive_is_not_taken_for_the_begin_of_its_neighbour() -> None:
    """The byte where a longer message has its action is the neighbour's, and is a B."""
    begin, relation, commit = transaction()
    looks_like_begin = encoding.xlog_data(SHORT, int.from_bytes(b"B" * 8, "big"))
    payloads = [begin, relation, encoding.keepalive(1), looks_like_begin, commit]
    assert _error(payloads).commit_lsn == 1000


def test_a_message_without_a_table_names_none() -> None:
    error = _error(transaction(encoding.truncate([9])))
    assert "table" not in str(error)
    error = _error(encoding.stream([encoding.begin(5, 1), encoding.commit(6)]))
    assert "table" not in str(error)


@pytest.mark.parametrize("lsn", [2**63, 2**64 - 1])
def test_a_commit_lsn_that_no_column_holds_is_refused_without_being_named(lsn: int) -> None:
    error = _error(encoding.stream([encoding.begin(lsn, 1), ROW]))
    assert error.commit_lsn is None


@pytest.mark.parametrize(
    ("microseconds", "is_good"),
    [
        (FIRST_US - 1, False),
        (FIRST_US, True),
        (LAST_US, True),
        (LAST_US + 1, False),
    ],
)
def test_the_first_and_the_last_time_of_a_datetime_are_landed(
    microseconds: int, is_good: bool
) -> None:
    begin = encoding.begin(1000, 7, microseconds)
    payloads = [encoding.xlog_data(begin), *transaction(ROW)[1:]]
    if not is_good:
        assert "commit time" in str(_error(payloads))
        return
    [row], _ = decode(payloads)
    edge = dt.datetime.min if microseconds < 0 else dt.datetime.max
    assert row["commit_ts"] == edge.replace(tzinfo=dt.UTC)


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
