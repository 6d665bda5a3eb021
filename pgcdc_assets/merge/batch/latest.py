"""The last change of each key, found in Arrow arrays of texts.

This is the fold of `merge/fold` for the usual changes: the newest event of a key decides, and a
value that an update leaves out (unchanged TOAST) comes from the last earlier change of the key with
the value, otherwise from the row of the table. A key is compared by its text, so `scope` admits
types whose texts are equal exactly if their values are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.table_schema import Layout, TableSchema

_TIME = pa.timestamp("us", tz="UTC")

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FoldedTexts:
    """Rows of one table as texts, at most one of a key.

    Attributes:
        texts: one array for each field; of a departure, the texts of its key.
        is_content: the key has a row after the step; otherwise the row has left.
        unknown: by field index, which rows take the value from the row of the table.
    """

    texts: Sequence[pa.Array]
    lsn: Numbers
    ordinal: Numbers
    commit_ts: pa.Array
    is_content: Flags
    unknown: dict[int, Flags] = field(default_factory=dict)

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return len(self.lsn)


def read_snapshot_texts(tuples: pa.Array, schema: TableSchema, lsn: Lsn) -> FoldedTexts:
    """Return the rows of a snapshot.

    Args:
        tuples: the texts of the rows, in the layout of the schema.
    """
    count = len(tuples)
    return FoldedTexts(
        [pc.list_element(tuples, i) for i in range(len(schema.fields))],
        np.full(count, int(lsn), np.int64),
        np.full(count, -1, np.int64),
        pa.nulls(count, _TIME),
        np.ones(count, np.bool_),
    )


def fold_texts(changes: pa.Table, fold: Fold) -> FoldedTexts:
    """Fold the changes of a table to the last one of each key.

    Args:
        changes: inserts, updates and deletes of `raw/changes`, in any order.
    """
    parts: list[pa.Table] = []
    for layout in fold.layouts:
        parts += _events(_of_version(changes, layout.version, fold), layout, fold)
    events = pa.concat_tables(parts).combine_chunks()
    lsn = events.column("lsn").to_numpy()
    ordinal = events.column("ordinal").to_numpy()
    is_content = events.column("is_content").to_numpy()
    keys = [events.column(f"text_{index}") for index in fold.schema.key]
    codes = encode_keys(keys)
    order = np.lexsort((is_content, ordinal, lsn))
    last = last_of_each(codes, order)
    last = last[last >= 0]
    rows = events.take(pa.array(last))
    texts = [one_array(rows.column(f"text_{i}")) for i in range(len(fold.schema.fields))]
    unknown = {}
    for index in fold.unknown:
        is_unknown = events.column(f"unknown_{index}").to_numpy()
        is_known = is_content & ~is_unknown
        source = last_of_each(codes, order[is_known[order]])[codes[last]]
        is_missing = is_content[last] & is_unknown[last]
        is_found = is_missing & (source >= 0)
        taken = events.column(f"text_{index}").take(pa.array(np.where(is_found, source, last)))
        texts[index] = one_array(taken)
        unknown[index] = is_missing & ~is_found
    return FoldedTexts(
        texts,
        lsn[last],
        ordinal[last],
        one_array(rows.column("commit_ts")),
        is_content[last],
        unknown,
    )


def encode_keys(columns: Sequence[pa.ChunkedArray]) -> Numbers:
    """Number the distinct keys from 0; return the number of each row's key."""
    codes: Numbers | None = None
    for column in columns:
        encoded = one_array(column).dictionary_encode()
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


def _of_version(changes: pa.Table, version: int, fold: Fold) -> pa.Table:
    if len(fold.layouts) == 1:
        return changes
    return changes.filter(pc.field("relation_version") == version)


def _events(rows: pa.Table, layout: Layout, fold: Fold) -> list[pa.Table]:
    """Turn the changes of one relation version into contents and departures of keys."""
    op = rows.column("op")
    contents = rows.filter(pc.not_equal(op, "D"))
    events = [
        _contents(contents, layout, fold),
        _departures(rows.filter(pc.equal(op, "D")), layout, fold),
    ]
    if fold.stats.has_old_tuples:
        moved = contents.filter(pc.is_valid(contents.column("old_kind")))
        is_moved = np.zeros(moved.num_rows, np.bool_)
        for index in fold.schema.key:
            position = layout.positions[index]
            before, after = _text(moved, "old", position), _text(moved, "new", position)
            is_moved |= ~_is_same(before, after)
        events.append(_departures(moved.filter(pa.array(is_moved)), layout, fold))
    return events


def _contents(rows: pa.Table, layout: Layout, fold: Fold) -> pa.Table:
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
    return _table(rows, texts, fold, is_content=True, unknown=unknown)


def _departures(rows: pa.Table, layout: Layout, fold: Fold) -> pa.Table:
    texts = [
        _text(rows, "old", position)
        if index in fold.schema.key
        else pa.nulls(rows.num_rows, pa.large_string())
        for index, position in enumerate(layout.positions)
    ]
    return _table(rows, texts, fold, is_content=False, unknown={})


def _table(
    rows: pa.Table,
    texts: Sequence[pa.Array],
    fold: Fold,
    *,
    is_content: bool,
    unknown: dict[int, Flags],
) -> pa.Table:
    columns = {
        "lsn": rows.column("commit_lsn"),
        "ordinal": rows.column("ordinal").cast(pa.int64()),
        "commit_ts": rows.column("commit_ts"),
        "is_content": np.full(rows.num_rows, is_content, np.bool_),
    }
    columns |= {f"text_{index}": text for index, text in enumerate(texts)}
    nowhere = np.zeros(rows.num_rows, np.bool_)
    columns |= {f"unknown_{index}": unknown.get(index, nowhere) for index in fold.unknown}
    return pa.table(columns)


def _text(rows: pa.Table, tuples: str, position: int | None) -> pa.Array:
    """Return one text of each tuple; NULL without a tuple."""
    assert position is not None
    return pc.list_element(one_array(rows.column(tuples)), position).cast(pa.large_string())


def _is_same(before: pa.Array, after: pa.Array) -> Flags:
    same = pc.fill_null(pc.equal(before, after), False)
    both_null = pc.and_(pc.is_null(before), pc.is_null(after))
    found: Flags = pc.or_(same, both_null).to_numpy(zero_copy_only=False)
    return found


def _is_left_out(rows: pa.Table, position: int) -> Flags:
    """Return which new tuples leave out the text at a position, as unchanged TOAST."""
    left_out = one_array(rows.column("unchanged"))
    found = np.zeros(rows.num_rows, np.bool_)
    parents = pc.list_parent_indices(left_out).to_numpy()
    found[parents[pc.list_flatten(left_out).to_numpy() == position]] = True
    return found


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return the values of a column as one array."""
    whole = column.combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)
