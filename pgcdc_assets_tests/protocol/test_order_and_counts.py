"""The order of a batch's rows, the counts of its warnings, and the sizes of its parts."""

from __future__ import annotations

from dataclasses import replace

from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.heads import split_by_values
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets_tests.protocol.test_decoder import (
    FAR,
    ORDERS,
    decode,
    numbering,
    transaction,
)
from pgcdc_assets_tests.support.protocol import encoding
from pgcdc_assets_tests.support.protocol.encoding import UNCHANGED

_ROW = encoding.insert(16400, [b"1", b"a", None])


def test_the_rows_of_a_truncate_of_many_tables_keep_their_order() -> None:
    """The rows are sorted by message, and a Truncate has one row per table."""
    ids = [20000 + (i * 37) % 100 for i in range(100)]
    tables = [Relation(i, "s", f"t{i}", ReplicaIdentity.DEFAULT, ()) for i in ids]
    messages = [*map(encoding.relation, tables), _ROW, encoding.truncate(ids), _ROW]

    rows, _ = decode(transaction(*messages))

    assert [row["relation_id"] for row in rows] == [16400, *ids, 16400]
    assert [row["ordinal"] for row in rows] == list(range(102))


def test_warnings_add_up_over_batches() -> None:
    update = encoding.update(16400, [b"1", b"b", None], [b"1", UNCHANGED, UNCHANGED], b"O")
    bad = encoding.insert(16400, [b"1", b"\xff", None])

    rows, decoder = decode(transaction(update, bad, update, bad), [4])

    assert [row["old"] for row in rows] == [["1", None, None], None] * 2
    assert decoder.warnings == {
        "unchanged TOAST in an old tuple, landed as NULL": 4,
        "shop.orders: values that are not UTF-8, landed as hex": 2,
    }


def test_warnings_count_by_table_over_the_versions_of_a_table() -> None:
    """The first and the last value of a row belong to the row."""
    one = Relation(16401, "shop", "one", ReplicaIdentity.DEFAULT, (Column("id", 23),))
    first = encoding.insert(16400, [b"\xff", b"a", None])
    last = encoding.insert(16400, [b"1", None, b"\xff"])
    messages = [
        encoding.relation(one),
        encoding.insert(16401, [b"1"]),
        first,
        encoding.insert(16401, [b"\xfe"]),
        last,
        encoding.relation(replace(ORDERS, columns=ORDERS.columns[:1])),
        encoding.insert(16401, [b"1"]),
        encoding.insert(16400, [b"\xff"]),
        encoding.insert(16401, [b"1"]),
    ]
    _, decoder = decode(transaction(*messages))
    assert decoder.warnings == {
        "shop.orders: values that are not UTF-8, landed as hex": 3,
        "shop.one: values that are not UTF-8, landed as hex": 1,
    }


def test_binary_messages_and_parked_rows_are_no_values_of_a_table() -> None:
    binary = encoding.logical_message("m", b"\xff")
    _, decoder = decode(transaction(binary, encoding.insert(16400, [b"\xff"]), binary))
    assert decoder.warnings == {
        "shop.orders: rows that cannot be decoded, parked with their bytes": 1
    }


def test_replaced_announcements_are_forgotten() -> None:
    """A stream of months may announce a table many times."""
    decoder = Decoder(numbering(), FAR)
    for number in range(500):
        rows = decoder.decode(MessageBatch.of(transaction(_ROW, lsn=1000 + number)))
        assert rows is not None
        assert rows["relation_version"].to_pylist() == [number + 1]
    assert len(decoder._announced) < 200
    decoder.begin_window(FAR, 0)
    assert len(decoder._announced) == 1
    rows = decoder.decode(MessageBatch.of(transaction(_ROW, lsn=2000)[:1]))
    rows = decoder.decode(MessageBatch.of(encoding.stream([_ROW])))
    assert rows is not None
    assert rows["relation_version"].to_pylist() == [500]


def test_the_rest_of_a_window_is_decoded_in_the_next_window() -> None:
    payloads = [*transaction(_ROW, lsn=1000), *transaction(_ROW, _ROW, lsn=2000)]
    decoder = Decoder(numbering(), 2000)
    first = decoder.decode(MessageBatch.of(payloads))
    rest = decoder.rest
    assert rest is not None
    # Later messages are not read.
    assert decoder.decode(MessageBatch.of([b"x"])) is None
    decoder.begin_window(3000, 2000)
    second = decoder.decode(rest)
    assert first is not None
    assert second is not None
    assert [batch["commit_lsn"].to_pylist() for batch in (first, second)] == [[1000], [2000, 2000]]
    assert (decoder.is_finished, decoder.rest) == (False, None)


def test_a_batch_without_a_row_of_the_window_has_no_rows() -> None:
    decoder = Decoder(numbering(), FAR, 1500)
    assert decoder.decode(MessageBatch.of(transaction(_ROW))) is None


def test_only_an_update_with_an_old_tuple_counts_twice() -> None:
    new = [None] * 3
    messages = [
        encoding.update(16400, new),
        encoding.delete(16400, new, b"O"),
        encoding.insert(16400, new),
        encoding.delete(16400, new, b"K"),
        encoding.update(16400, new, new, b"K"),
        encoding.update(16400, new),
    ]
    parts = split_by_values(MessageBatch.of(encoding.stream(messages)), 3)
    assert [len(part.starts) for part in parts] == [1] * 6
    parts = split_by_values(MessageBatch.of(encoding.stream(messages)), 6)
    assert [len(part.starts) for part in parts] == [2, 2, 1, 1]
