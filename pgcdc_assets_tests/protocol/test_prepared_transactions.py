"""A prepared transaction lands at its COMMIT PREPARED, in this stream or in a later one."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.prepared_transactions import PreparedKey
from pgcdc_assets_tests.protocol.test_streamed_transactions import (
    ANNOUNCED,
    NARROW,
    NARROW_ROW,
    ROW,
)
from pgcdc_assets_tests.support.protocol import encoding
from pgcdc_assets_tests.support.protocol.streaming import (
    MemoryArchive,
    Stream,
    block,
    places,
    prepared,
    whole,
)

SECOND_US = 1_767_225_601_000_000


def test_a_prepared_transaction_has_lsn_and_time_of_its_commit() -> None:
    stream = Stream()
    begin = encoding.begin_prepare(1000, 701, "é 1", SECOND_US - 1)
    prepare = encoding.prepare(1000, 701, "é 1", SECOND_US - 1)
    assert stream.read(begin, ANNOUNCED, ROW, ROW, prepare) == []
    assert stream.unfinished == [PreparedKey(Lsn(1000), 701, "é 1")]
    assert [each.time_us for each in stream.decoder.unfinished()] == [SECOND_US - 1]

    rows = stream.read(encoding.commit_prepared(2000, 701, "é 1", SECOND_US))

    assert places(rows) == [(2000, 701, 0), (2000, 701, 1)]
    assert {row["commit_ts"] for row in rows} == {dt.datetime(2026, 1, 1, 0, 0, 1, tzinfo=dt.UTC)}
    assert [(row["table"], row["op"], row["new"]) for row in rows] == [
        ("orders", "I", ["1", "a", None])
    ] * 2
    assert (stream.unfinished, stream.spool.rows, stream.ended) == ([], {}, [])
    assert stream.completed == [(3, 2000, 701)]


def test_a_prepared_transaction_arrives_in_any_batches() -> None:
    messages = [
        *whole(900, 700, ANNOUNCED, ROW),
        *prepared(1000, 701, "g", ROW, encoding.truncate([16400]), ROW),
        *whole(1500, 702, ROW),
        encoding.commit_prepared(2000, 701, "g"),
    ]
    for cut in range(len(messages)):
        stream = Stream(most_values=3)
        rows = stream.read(*messages[:cut]) + stream.read(*messages[cut:])
        assert places(rows) == [
            (900, 700, 0),
            (1500, 702, 0),
            (2000, 701, 0),
            (2000, 701, 1),
            (2000, 701, 2),
        ]
        assert [row["op"] for row in rows] == list("IIITI")
        # The announcement before the transaction is valid within.
        assert {row["relation_version"] for row in rows} == {3}
        assert stream.completed == [(3, 900, 700)]


def test_a_prepared_transaction_is_decoded_in_parts_of_bounded_values() -> None:
    stream = Stream(most_values=9)
    stream.read(*prepared(1000, 701, "g", ANNOUNCED, *[ROW] * 10))
    spooled = stream.spool.rows[701]
    assert [batch.num_rows for batch in spooled] == [3, 3, 3, 1]
    assert [batch["xid"].unique().to_pylist() for batch in spooled] == [[701]] * 4


def test_a_streamed_transaction_is_prepared() -> None:
    stream = Stream()
    streamed = [*block(701, ANNOUNCED, ROW), *block(701, ROW, is_first=False)]
    assert stream.read(*streamed, encoding.stream_prepare(1000, 701, "g")) == []
    assert stream.decoder.open_transaction_count == 0
    assert stream.unfinished == [PreparedKey(Lsn(1000), 701, "g")]

    # The commit of a prepared transaction does not announce the relations of its blocks.
    rows = stream.read(encoding.commit_prepared(2000, 701, "g"))
    assert places(rows) == [(2000, 701, 0), (2000, 701, 1)]
    assert stream.spool.rows == {}
    with pytest.raises(ProtocolError, match="never announced"):
        stream.read(*whole(2010, 703, ROW))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_rollback_drops_the_rows(is_streamed: bool) -> None:
    stream = Stream()
    if is_streamed:
        stream.read(*block(701, ANNOUNCED, ROW), encoding.stream_prepare(1000, 701, "g"))
    else:
        stream.read(*prepared(1000, 701, "g", ANNOUNCED, ROW))
    stream.read(*prepared(1100, 702, "h", ANNOUNCED, ROW))
    assert sorted(stream.spool.rows) == [701, 702]

    assert stream.read(encoding.rollback_prepared(1000, 1200, 701, "g")) == []

    assert list(stream.spool.rows) == [702]
    assert stream.unfinished == [PreparedKey(Lsn(1100), 702, "h")]
    # The same gid again, and the end of the transaction that stayed.
    rows = stream.read(
        *prepared(1300, 703, "g", ROW),
        encoding.commit_prepared(1400, 702, "h"),
        encoding.commit_prepared(1500, 703, "g"),
    )
    assert places(rows) == [(1400, 702, 0), (1500, 703, 0)]


def test_a_transaction_of_an_earlier_window_is_in_the_archive_of_a_later_stream() -> None:
    first = Stream(2000)
    messages = [
        *prepared(1000, 701, "g", ANNOUNCED, ROW),
        *prepared(1500, 702, "h", ANNOUNCED, ROW),
        *prepared(1600, 703, "ends", ANNOUNCED, ROW),
        encoding.commit_prepared(1700, 703, "ends"),
        encoding.keepalive(2000),
    ]
    assert places(first.read(*messages)) == [(1700, 703, 0)]
    assert [key.gid for key in first.unfinished] == ["g", "h"]
    stored = first.decoder.unfinished()
    kept = [replace(each, read=_reader(list(each.read()))) for each in stored]

    # The same stream continues, or another one begins.
    first.decoder.prepared.drop_stored([each.key for each in stored])
    assert first.spool.rows == {}
    first.decoder.begin_window(4000, 2000)
    archive = MemoryArchive(kept)
    later = Stream(4000, 2000, archive=archive)
    first.decoder.prepared._archive = archive
    for stream in (first, later):
        assert stream.unfinished == []
        rows = stream.read(
            encoding.commit_prepared(2500, 701, "g"),
            encoding.rollback_prepared(1500, 2600, 702, "h"),
            # The server sends an end again to a stream from a lower LSN.
            encoding.rollback_prepared(1500, 2600, 702, "h"),
        )
        assert places(rows) == [(2500, 701, 0)]
        assert rows[0]["new"] == ["1", "a", None]
        assert [key.gid for key in stream.ended] == ["g", "h"]
        stream.decoder.begin_window(5000, 4000)
        assert stream.ended == []


def _reader(batches: list[pa.RecordBatch]) -> Any:
    return lambda: iter(batches)


def test_unfinished_transactions_are_those_prepared_in_the_window() -> None:
    stream = Stream(2000, 1000)
    for number, lsn in enumerate((999, 1000, 1999)):
        stream.read(*prepared(lsn, 700 + number, f"g{number}", ANNOUNCED))
    assert [key.lsn for key in stream.unfinished] == [1000, 1999]
    stream.decoder.begin_window(3000, 2000)
    assert stream.unfinished == []


@pytest.mark.parametrize(
    ("inside", "behind", "landed", "unfinished"),
    [
        ([], prepared(2000, 702, "h", ROW), [], ["g", "h"]),
        ([], [encoding.prepare(2000, 702, "h")], [], ["g", "h"]),
        (
            block(702, ANNOUNCED, ROW),
            [encoding.stream_prepare(2000, 702, "h")],
            [],
            ["g", "h"],
        ),
        ([], [encoding.commit_prepared(2000, 701, "g")], [(2000, 701, 0)], []),
    ],
)
def test_messages_at_the_windows_end_belong_to_the_next_window(
    inside: list[bytes],
    behind: list[bytes],
    landed: list[tuple[int, int, int]],
    unfinished: list[str],
) -> None:
    stream = Stream(2000)
    before = prepared(1999, 701, "g", ANNOUNCED, ROW)
    assert stream.read(*before, *inside, *behind) == []
    assert stream.decoder.is_finished
    assert [key.gid for key in stream.unfinished] == ["g"]
    rest = stream.decoder.rest
    assert rest is not None
    # Nothing behind the end is read.
    assert stream.read(encoding.commit_prepared(1999, 701, "g")) == []

    stream.decoder.begin_window(3000, 1999)
    assert places(stream.rows(rest)) == landed
    assert [key.gid for key in stream.unfinished] == unfinished


def test_a_commit_below_the_windows_start_was_landed() -> None:
    stream = Stream(3000, 2000)
    messages = [
        *prepared(1000, 701, "g", ANNOUNCED, ROW),
        encoding.commit_prepared(1999, 701, "g"),
        *prepared(1000, 702, "h", ANNOUNCED, ROW),
        encoding.commit_prepared(2000, 702, "h"),
    ]
    assert places(stream.read(*messages)) == [(2000, 702, 0)]
    assert stream.spool.rows == {}


def test_a_transaction_without_a_change_has_no_begin_prepare() -> None:
    stream = Stream()
    # The server may notice within a block that the transaction was rolled back, and restarts it.
    stream.read(*block(702, ANNOUNCED, ROW), encoding.prepare(1000, 702, "empty"))
    assert (stream.decoder.open_transaction_count, stream.spool.rows) == (0, {})
    assert stream.unfinished == [PreparedKey(Lsn(1000), 702, "empty")]
    assert stream.read(encoding.commit_prepared(1100, 702, "empty")) == []
    assert stream.unfinished == []
    # Neither a Begin Prepare nor a Prepare.
    assert stream.read(encoding.commit_prepared(1200, 703, "unknown")) == []
    assert stream.read(encoding.rollback_prepared(1000, 1300, 704, "unknown")) == []
    assert stream.ended == []


@pytest.mark.parametrize(
    "ending",
    [
        prepared(1000, 702, "g", ANNOUNCED, ROW, ROW),
        [encoding.rollback_prepared(1000, 1100, 702, "g")],
    ],
)
def test_a_streamed_transaction_may_end_without_a_stream_abort(ending: list[bytes]) -> None:
    stream = Stream()
    stream.read(*block(701, ANNOUNCED, ROW), *block(702, ANNOUNCED, ROW), *ending)
    assert stream.decoder.open_transaction_count == 1
    rows = stream.read(encoding.commit_prepared(2000, 702, "g"))
    assert len(rows) == len(ending[2:-1])
    # The other one stays.
    assert places(stream.read(encoding.stream_commit(701, 2100))) == [(2100, 701, 0)]


def test_missing_rows_of_a_prepared_transaction_are_an_error() -> None:
    stream = Stream(archive=MemoryArchive(is_complete=False))
    with pytest.raises(LookupError) as caught:
        stream.read(encoding.commit_prepared(2000, 701, "g"))
    assert caught.value.args == (701, "g", 2000)
    rows = stream.read(
        *prepared(1000, 702, "g", ANNOUNCED, ROW), encoding.commit_prepared(2000, 702, "g")
    )
    assert len(rows) == 1
    # The rollback of an unknown transaction needs no rows.
    assert stream.read(encoding.rollback_prepared(1000, 2100, 701, "g")) == []


def test_a_relation_of_a_prepared_transaction_is_completed_at_its_first_use() -> None:
    """The server announces a relation once per stream, and the commit may be a later one."""
    stream = Stream()
    stream.read(*prepared(1000, 701, "g", ANNOUNCED, ROW))
    assert stream.completed == []
    rows = stream.read(*whole(1100, 702), *whole(1200, 703, ROW), *whole(1300, 704, ROW))
    assert [(row["xid"], row["relation_version"]) for row in rows] == [(703, 3), (704, 3)]
    assert stream.completed == [(3, 1200, 703)]

    rows = stream.read(encoding.commit_prepared(2000, 701, "g"), *whole(2100, 705, ROW))
    assert [(row["xid"], row["relation_version"]) for row in rows] == [(701, 3), (705, 3)]
    assert stream.completed == [(3, 1200, 703), (3, 2000, 701)]


def test_a_streamed_transaction_announces_a_relation_again_after_its_completion() -> None:
    stream = Stream()
    rows = stream.read(
        *prepared(1000, 701, "g", ANNOUNCED, ROW),
        *whole(1100, 702, ROW),
        *block(703, NARROW, NARROW_ROW),
        encoding.stream_commit(703, 1200),
        *whole(1300, 704, NARROW_ROW),
        encoding.commit_prepared(2000, 701, "g"),
        *whole(2100, 705, NARROW_ROW),
    )
    versions = [(row["xid"], row["relation_version"]) for row in rows]
    assert versions == [(702, 3), (703, 1), (704, 1), (701, 3), (705, 1)]


def test_a_relation_is_completed_at_the_commit_of_its_prepared_transaction() -> None:
    stream = Stream()
    rows = stream.read(
        *prepared(1000, 701, "g", ANNOUNCED, ROW),
        encoding.commit_prepared(1100, 701, "g"),
        *whole(1200, 702, ROW),
    )
    assert [row["relation_version"] for row in rows] == [3, 3]
    assert stream.completed == [(3, 1100, 701)]


def test_a_relation_that_is_complete_before_a_prepared_transaction_is_not_completed_again() -> None:
    stream = Stream()
    rows = stream.read(
        *whole(900, 700, NARROW),
        *prepared(1000, 701, "g", NARROW_ROW),
        encoding.commit_prepared(1100, 701, "g"),
    )
    assert [row["relation_version"] for row in rows] == [1]
    assert stream.completed == [(1, 900, 700)]


def test_a_later_announcement_remains_after_the_commit_of_a_prepared_transaction() -> None:
    stream = Stream()
    rows = stream.read(
        *prepared(1000, 701, "g", ANNOUNCED, ROW),
        *whole(1100, 702, NARROW, NARROW_ROW),
        encoding.commit_prepared(1200, 701, "g"),
        *whole(1300, 703, NARROW_ROW),
        *prepared(1400, 704, "h", NARROW_ROW, ANNOUNCED, ROW),
        *whole(1500, 705, ROW),
        encoding.commit_prepared(1600, 704, "h"),
    )
    assert [(row["xid"], row["relation_version"]) for row in rows] == [
        (702, 1),
        (701, 3),
        (703, 1),
        (705, 3),
        (704, 1),
        (704, 3),
    ]


def test_warnings_and_parked_rows_count_at_the_commit() -> None:
    bad = encoding.insert(16400, [b"1", b"\xff", None])
    stream = Stream()
    stream.read(*prepared(1000, 701, "g", ANNOUNCED, bad, ROW[:-1]))
    assert (stream.decoder.warnings, stream.decoder.parked) == ({}, {})
    rows = stream.read(encoding.commit_prepared(2000, 701, "g"))
    assert [row["op"] for row in rows] == ["I", "P"]
    assert rows[1]["new"][1] == f"\0\\x{ROW[:-1].hex()}"
    assert stream.decoder.warnings == {
        "shop.orders: values that are not UTF-8, landed as hex": 1,
        "shop.orders: rows that cannot be decoded, parked with their bytes": 1,
    }
    assert stream.decoder.parked[16400].row_count == 1


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            [encoding.begin_prepare(5, 701, "g"), encoding.prepare(5, 702, "g")],
            "not of the transaction of the Begin Prepare",
        ),
        (
            [encoding.begin_prepare(5, 701, "g"), encoding.prepare(5, 701, "h")],
            "not of the transaction of the Begin Prepare",
        ),
        ([encoding.begin_prepare(5, 701, "g"), encoding.stream_stop()], "end of a block outside"),
        ([encoding.begin_prepare(5, 701, "g"), *block(702)], "inside a block"),
        ([*block(702)[:1], encoding.prepare(5, 701, "g")], "inside a block"),
        ([encoding.begin(5, 700), *prepared(6, 701, "g")], "inside a transaction"),
        ([encoding.stream_prepare(5, 701, "g")], "transaction 701 was never streamed"),
        (
            [*whole(5, 700), encoding.commit_prepared(5, 701, "g")],
            "the commit LSN is not above the last one",
        ),
        (
            [encoding.commit_prepared(5, 701, "g"), *whole(5, 700)],
            "the commit LSN is not above the last one",
        ),
        (prepared(5, 701, "g", ROW), "relation 16400 was never announced"),
        (prepared(5, 701, "g", encoding.begin(6, 702)), "not allowed in a block"),
    ],
)
def test_messages_out_of_order_are_refused(messages: list[bytes], reason: str) -> None:
    stream = Stream()
    with pytest.raises(ProtocolError, match=reason) as caught:
        stream.read(*messages)
    assert caught.value.start is not None
    assert caught.value.offset == 25


def test_an_error_of_a_prepared_transaction_names_its_table() -> None:
    stream = Stream()
    damaged = encoding.insert(16400, [None])[:4]
    with pytest.raises(ProtocolError, match="names no relation"):
        stream.read(*prepared(5, 701, "g", ANNOUNCED, damaged))
    stream = Stream()
    with pytest.raises(ProtocolError, match=r"table 16400"):
        stream.read(*prepared(5, 701, "g", ROW))
