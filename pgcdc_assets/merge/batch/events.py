"""The changes of small tables as events of keys, in Arrow arrays of texts.

These are the events of `merge/fold/events.py`: an insert or update is a content of its key, a
delete is the departure of its key, and an update of the key is both.

Columns of an events table: `lsn`, `ordinal`, `commit_ts`, `op`, `is_content`, `is_move` (a content
whose row came from another key), `text_0` ... and, for the fields that changes leave out,
`unknown_3` ... A departure has the texts of its key only, or of its replica identity if the key is
a part of it; a departure of a multiset has all texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.merge.batch.equal_values import Flags, is_same
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.table_schema import Layout

Numbers = npt.NDArray[np.int64]

# The bound of the values that changes leave out, of all changes of a table together. A history has
# the value of a row once for each version.
MOST_FILLED_BYTES = 64 * 1024 * 1024


def build_events(changes: pa.Table, fold: Fold) -> pa.Table:
    """Turn inserts, updates and deletes into events, in any order.

    Under REPLICA IDENTITY FULL, where each update and delete has its whole old row, each update
    removes its old row and adds its new row, as in a multiset.
    """
    parts: list[pa.Table] = []
    for layout in fold.layouts:
        rows = changes
        if len(fold.layouts) > 1:
            rows = changes.filter(pc.field("relation_version") == layout.version)
        parts += _events(rows, layout, fold)
    return pa.concat_tables(parts).combine_chunks()


def encode_keys(columns: Sequence[pa.ChunkedArray]) -> Numbers:
    """Number the distinct keys from 0; return the number of each row's key. NULL equals NULL."""
    codes: Numbers | None = None
    for column in columns:
        encoded = one_array(column).dictionary_encode("encode")
        own = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if codes is not None:
            own = codes * max(1, len(encoded.dictionary)) + own
        if len(columns) > 1:
            own = np.unique(own, return_inverse=True)[1].astype(np.int64)
        codes = own
    assert codes is not None
    return codes


def last_of_each(codes: Numbers, order: Numbers) -> Numbers:
    """Return for each key the row that comes last in an order of some rows; -1 without a row."""
    last = np.full(int(codes.max()) + 1 if len(codes) else 0, -1, np.int64)
    # The last assignment of a repeated index counts.
    last[codes[order]] = order
    return last


def _events(rows: pa.Table, layout: Layout, fold: Fold) -> list[pa.Table]:
    op = rows.column("op")
    contents = rows.filter(pc.not_equal(op, "D"))
    if fold.stats.is_full:
        nothing_moves = np.zeros(contents.num_rows, np.bool_)
        removed = rows.filter(pc.not_equal(op, "I"))
        return [
            _contents(contents, layout, fold, nothing_moves),
            _departures(removed, layout, fold),
        ]
    is_move = _is_move(contents, layout, fold)
    parts = [_contents(contents, layout, fold, is_move)]
    # Most windows have no departures, and a part costs a millisecond, also without rows.
    parts += [
        _departures(left, layout, fold)
        for left in (rows.filter(pc.equal(op, "D")), contents.filter(pa.array(is_move)))
        if left.num_rows
    ]
    return parts


def _is_move(contents: pa.Table, layout: Layout, fold: Fold) -> Flags:
    """Return which contents are updates that changed the key or the replica identity."""
    found = np.zeros(contents.num_rows, np.bool_)
    if not fold.stats.has_old_tuples:
        return found
    for index in fold.identity:
        before = _text(contents, "old", layout.positions[index])
        after = _text(contents, "new", layout.positions[index])
        found |= ~is_same(before, after)
    found &= pc.is_valid(contents.column("old_kind")).to_numpy()
    return found


def _contents(rows: pa.Table, layout: Layout, fold: Fold, is_move: Flags) -> pa.Table:
    texts, unknown = [], {}
    for index, position in enumerate(layout.positions):
        if position is None:
            default = pa.scalar(fold.schema.fields[index].default, pa.large_string())
            texts.append(pa.repeat(default, rows.num_rows))
            unknown[index] = np.zeros(rows.num_rows, np.bool_)
            continue
        text = _text(rows, "new", position)
        if index in fold.unchanged:
            is_left_out = _is_left_out(rows, position)
            text = pc.if_else(pa.array(is_left_out), _text(rows, "old", position), text)
            is_whole = pc.fill_null(pc.equal(rows.column("old_kind"), "O"), False).to_numpy()
            unknown[index] = is_left_out & ~is_whole
        texts.append(text)
    return _table(rows, texts, fold, unknown, is_content=True, is_move=is_move)


def _departures(rows: pa.Table, layout: Layout, fold: Fold) -> pa.Table:
    count = rows.num_rows
    texts = [
        _text(rows, "old", position)
        if index in fold.identity or (fold.stats.is_full and position is not None)
        else pa.nulls(count, pa.large_string())
        for index, position in enumerate(layout.positions)
    ]
    return _table(rows, texts, fold, {}, is_content=False, is_move=np.zeros(count, np.bool_))


def _table(
    rows: pa.Table,
    texts: Sequence[pa.Array],
    fold: Fold,
    unknown: dict[int, Flags],
    *,
    is_content: bool,
    is_move: Flags,
) -> pa.Table:
    columns = {
        "lsn": rows.column("commit_lsn"),
        "ordinal": rows.column("ordinal").cast(pa.int64()),
        "commit_ts": rows.column("commit_ts"),
        "op": rows.column("op"),
        "is_content": np.full(rows.num_rows, is_content, np.bool_),
        "is_move": is_move,
    }
    columns |= {f"text_{index}": text for index, text in enumerate(texts)}
    nowhere = np.zeros(rows.num_rows, np.bool_)
    columns |= {f"unknown_{index}": unknown.get(index, nowhere) for index in fold.unknown}
    return pa.table(columns)


def _text(rows: pa.Table, tuples: str, position: int | None) -> pa.Array:
    """Return one text of each tuple; NULL without a tuple."""
    assert position is not None
    return pc.list_element(one_array(rows.column(tuples)), position).cast(pa.large_string())


def _is_left_out(rows: pa.Table, position: int) -> Flags:
    """Return which new tuples leave out the text at a position, as unchanged TOAST."""
    left_out = one_array(rows.column("unchanged"))
    found = np.zeros(rows.num_rows, np.bool_)
    parents = pc.list_parent_indices(left_out).to_numpy()
    found[parents[pc.list_flatten(left_out).to_numpy() == position]] = True
    return found


def value_bytes(column: pa.ChunkedArray) -> Numbers:
    """Return the bytes of each text or binary value; 0 for NULL and for other types."""
    if column.type not in (pa.string(), pa.large_string(), pa.binary()):
        return np.zeros(len(column), np.int64)
    lengths = pc.fill_null(pc.binary_length(column), 0)
    found: Numbers = lengths.to_numpy().astype(np.int64)
    return found


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return the values of a column as one array."""
    whole = column.combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)
