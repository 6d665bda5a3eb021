"""Hypothesis strategies of streams that follow the protocol."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets_tests.support.protocol import encoding
from pgcdc_assets_tests.support.protocol.encoding import UNCHANGED, Value

# Postgres has no text with U+0000. A database with encoding SQL_ASCII accepts any other byte.
_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).map(str.encode)
_bytes = st.binary(max_size=3).map(lambda value: value.replace(b"\0", b"\xe9"))
_values: st.SearchStrategy[Value] = st.one_of(_texts, _bytes, st.none())
_new_values: st.SearchStrategy[Value] = st.one_of(_texts, _bytes, st.none(), st.just(UNCHANGED))


def _relation(number: int, column_count: int) -> Relation:
    columns = tuple(Column(f"c{i}", 25, -1, is_key=i == 0) for i in range(column_count))
    return Relation(16384 + number, "", f"t{number}", ReplicaIdentity.DEFAULT, columns)


@st.composite
def _changes(draw: st.DrawFn, relation: Relation) -> bytes:
    width = len(relation.columns)
    new = draw(st.lists(_new_values, min_size=width, max_size=width))
    old = draw(st.lists(_values, min_size=width, max_size=width))
    kind = draw(st.sampled_from([b"K", b"O"]))
    return draw(
        st.sampled_from(
            [
                encoding.insert(relation.relation_id, new),
                encoding.update(relation.relation_id, new),
                encoding.update(relation.relation_id, new, old, kind),
                encoding.delete(relation.relation_id, old, kind),
            ]
        )
    )


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Draw payloads of CopyData messages: transactions, of which the last may be incomplete."""
    relations = [_relation(i, draw(st.integers(0, 5))) for i in range(draw(st.integers(1, 4)))]
    announced: set[int] = set()
    messages: list[bytes] = []
    lsn = 1000
    for xid in range(1, draw(st.integers(1, 6)) + 1):
        lsn += draw(st.integers(1, 100))
        messages.append(encoding.begin(lsn, xid, 1_700_000_000_000_000 + xid))
        if draw(st.booleans()) and draw(st.booleans()):
            messages.append(encoding.origin("standby"))
        for _ in range(draw(st.integers(0, 8))):
            number = draw(st.integers(0, len(relations) - 1))
            if number not in announced or draw(st.integers(0, 9)) == 0:
                if number in announced:
                    relations[number] = replace(
                        relations[number], columns=_relation(0, draw(st.integers(0, 5))).columns
                    )
                announced.add(number)
                messages.append(encoding.type_message(600, "shop", "mood"))
                messages.append(encoding.relation(relations[number]))
            choice = draw(st.integers(0, 12))
            if choice == 0:
                chosen = draw(st.lists(st.sampled_from(sorted(announced)), min_size=1, max_size=3))
                messages.append(encoding.truncate([16384 + i for i in chosen]))
            elif choice == 1:
                content = draw(st.one_of(st.binary(max_size=9), _texts))
                messages.append(encoding.logical_message("outbox", content))
            elif choice == 2:
                # A keepalive inside a transaction does not end the window.
                messages.append(encoding.keepalive(lsn + 10_000))
            else:
                messages.append(draw(_changes(relations[number])))
        messages.append(encoding.commit(lsn))
        if draw(st.booleans()):
            messages.append(encoding.keepalive(lsn + 1))
        if draw(st.booleans()):
            content = encoding.logical_message("heartbeat", b"x", is_transactional=False)
            messages.append(content)
    if draw(st.booleans()):
        messages = messages[: draw(st.integers(1, len(messages)))]
    return encoding.stream(messages)
