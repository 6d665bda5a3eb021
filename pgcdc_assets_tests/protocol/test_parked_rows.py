"""Changes that cannot be decoded are parked with their bytes; all other rows are decoded."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol import parked_rows
from pgcdc_assets.protocol.decoder import Decoder
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.protocol.test_decoder import FAR, decode, numbering, transaction
from pgcdc_assets_tests.support.protocol import encoding, reference
from pgcdc_assets_tests.support.protocol.streams import streams

_HEAD = b"I" + (16400).to_bytes(4, "big")
_GOOD = encoding.insert(16400, [b"1", b"a", None])
_NULLS = [None] * 3
_BODY_AT = 30


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (encoding.insert(16400, [b"1"]), "byte 31: the tuple does not have the 3 columns"),
        (encoding.insert(16400, [b"1"] * 4), "byte 31: the tuple does not have the 3 columns"),
        (encoding.delete(16400, _NULLS, b"N"), "byte 30: the tuple marker is wrong"),
        (encoding.insert(16400, _NULLS) + b"x", "byte 36: bytes follow the last tuple"),
        (encoding.insert(16400, _NULLS)[:-1], "byte 35: the message ends in the middle"),
        (_HEAD + b"N\0\3nnb\0\0\0\1x", "byte 35: the kind byte of a value is not t, n or u"),
        (_HEAD + b"N\0\3nnt\xff\xff\xff\xffx", "byte 35: the message ends in the middle"),
        (_HEAD + b"N", "byte 30: the message ends before its tuple"),
        (_HEAD, "byte 30: the message ends before its tuple"),
        (
            encoding.update(16400, _NULLS, _NULLS).replace(b"nnnN", b"nnnX"),
            "byte 36: no new tuple follows the old tuple",
        ),
        (
            encoding.update(16400, _NULLS, _NULLS)[: -len(b"N\0\3nnn")],
            "byte 36: no new tuple follows the old tuple",
        ),
        (
            encoding.update(16400, _NULLS, _NULLS)[: -len(b"\0\3nnn")],
            "byte 37: the message ends before its tuple",
        ),
        (
            encoding.update(16400, _NULLS, _NULLS)[: -len(b"\3nnn")],
            "byte 37: the message ends before its tuple",
        ),
    ],
)
def test_a_row_that_cannot_be_decoded_is_parked_with_reason_and_bytes(
    damaged: bytes, reason: str
) -> None:
    payloads = transaction(_GOOD, damaged, encoding.logical_message("m", b"x"), _GOOD)
    for cuts in ([], [3], [4]):
        rows, decoder = decode(payloads, list(cuts))

        assert [row["op"] for row in rows] == ["I", "P", "M", "I"]
        assert [row["ordinal"] for row in rows] == [0, 1, 2, 3]
        row = rows[1]
        assert row["new"][0].startswith(reason)
        assert row["new"][1] == "\0\\x" + damaged.hex()
        assert (row["schema"], row["table"], row["relation_id"]) == ("shop", "orders", 16400)
        assert (row["relation_version"], row["commit_lsn"]) == (1, 1000)
        assert row["old"] is row["old_kind"] is row["unchanged"] is None
        assert [rows[0]["new"], rows[2]["new"]] == [["1", "a", None], ["m", "x"]]
        assert decoder.warnings == {
            "shop.orders: rows that cannot be decoded, parked with their bytes": 1
        }


@pytest.mark.sampled
@settings(max_examples=300, deadline=None)
@given(streams(), st.data())
def test_a_damaged_tuple_changes_no_other_row(payloads: list[bytes], data: st.DataObject) -> None:
    places = [i for i, p in enumerate(payloads) if p[:1] == b"w" and p[25:26] in b"IUD"]
    if not places:
        return
    index = data.draw(st.sampled_from(places))
    message = bytearray(payloads[index])
    position = data.draw(st.integers(_BODY_AT, len(message) - 1))
    if data.draw(st.booleans()):
        del message[position:]
    else:
        message[position] = data.draw(st.integers(0, 255))
    damaged = [*payloads[:index], bytes(message), *payloads[index + 1 :]]
    expected = reference.decode(payloads, 0, FAR)
    # The rows before the damaged row. A Truncate has a row per relation.
    number = len(reference.decode(payloads[:index], 0, FAR))

    rows, _ = decode(damaged, [index])

    assert len(rows) == len(expected)
    assert [r for i, r in enumerate(rows) if i != number] == [
        r for i, r in enumerate(expected) if i != number
    ]
    found = rows[number]
    if found["op"] == "P":
        assert found["new"][1] == "\0\\x" + bytes(message[25:]).hex()
    same = ("commit_lsn", "ordinal", "xid", "commit_ts", "relation_id", "relation_version")
    assert [found[name] for name in same] == [expected[number][name] for name in same]


def test_damaged_rows_of_tables_with_different_widths_are_parked() -> None:
    """Tuples with the same number of columns are read together, one number after the other."""
    columns = tuple(Column(name, 25) for name in "abc")
    tables = [
        Relation(16400 + width, "shop", f"of_{width}", ReplicaIdentity.DEFAULT, columns[:width])
        for width in (1, 2, 3)
    ]
    messages = [encoding.begin(1000, 7), *map(encoding.relation, tables)]
    for number in range(4):
        for table in tables:
            message = encoding.insert(table.relation_id, [b"%d" % number] * len(table.columns))
            messages.append(message[:-1] if number == 2 else message)

    rows, decoder = decode(encoding.stream(messages))

    assert "".join(row["op"] for row in rows) == "IIIIIIPPPIII"
    good = [row["new"] for row in rows if row["op"] == "I"]
    assert good == [[str(n)] * width for n in (0, 1, 3) for width in (1, 2, 3)]
    assert sorted(decoder.warnings) == [
        f"shop.of_{width}: rows that cannot be decoded, parked with their bytes"
        for width in (1, 2, 3)
    ]


def test_a_parked_row_of_an_earlier_window_is_dropped_with_its_transaction() -> None:
    later = [encoding.begin(2000, 8), _HEAD, _GOOD, encoding.commit(2000)]
    payloads = [*transaction(_HEAD, _GOOD), *encoding.stream(later)]
    rows, _ = decode(payloads, start=1500)
    assert [(row["op"], row["commit_lsn"]) for row in rows] == [("P", 2000), ("I", 2000)]


def test_the_first_bytes_of_a_huge_message_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_rows, "_MOST_BYTES", 10)
    damaged = encoding.insert(16400, [b"x" * 50])
    [row], _ = decode(transaction(damaged))
    assert row["new"][1] == "\0\\x" + damaged[:10].hex()
    reason = "byte 31: the tuple does not have the 3 columns of its relation"
    assert row["new"][0] == f"{reason}; the first 10 of {len(damaged)} bytes are kept"

    monkeypatch.setattr(parked_rows, "_MOST_BYTES", len(damaged))
    [row], _ = decode(transaction(damaged))
    assert row["new"] == [reason, "\0\\x" + damaged.hex()]


def test_parked_rows_are_counted_by_table_with_first_reason_and_lsns() -> None:
    other = Relation(16401, "shop", "other", ReplicaIdentity.DEFAULT, (Column("id", 23),))
    wide, empty = encoding.insert(16401, [b"1", b"2"]), _HEAD
    short = encoding.insert(16400, _NULLS)[:-1]
    payloads = [
        *transaction(_GOOD, encoding.relation(other), short, wide, empty, _GOOD),
        *transaction(empty, wide, _GOOD, lsn=2000),
        *transaction(_GOOD, lsn=3000),
    ]
    # The batches end within the first transaction, and after each transaction.
    for cuts in ([], [5, 8, 13], [4, 6]):
        _, decoder = decode(payloads, list(cuts))
        assert decoder.parked == {
            16400: parked_rows.ParkedRows(
                TableName("shop", "orders"),
                3,
                Lsn(1000),
                Lsn(2000),
                "byte 35: the message ends in the middle of a tuple",
            ),
            16401: parked_rows.ParkedRows(
                TableName("shop", "other"),
                2,
                Lsn(1000),
                Lsn(2000),
                "byte 31: the tuple does not have the 1 columns of its relation",
            ),
        }


def test_the_cost_of_a_damaged_batch_grows_linearly() -> None:
    """One attempt removes all rows with the same fault, so the cost grows linearly."""
    payloads = transaction(*[_HEAD + b"N\0\3nnb\0\0\0\1x", _GOOD] * 20_000)
    began = time.process_time()
    batch = Decoder(numbering(), FAR).decode(MessageBatch.of(payloads))
    assert batch is not None
    assert batch["op"].to_pylist() == ["P", "I"] * 20_000
    assert time.process_time() - began < 20
