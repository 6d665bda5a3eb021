"""The versions of a history after a step: those of `merge/fold/versions.py`, in Arrow arrays.

The events of a key are in the order of their positions, after the table's current version of the
key. A content opens a version, unless it equals the content before it. The next event of the key
that opens a version, or is a departure, ends it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.merge.batch.contents import Contents
from pgcdc_assets.merge.batch.equal_values import Flags, is_same
from pgcdc_assets.merge.batch.events import Numbers, one_array
from pgcdc_assets.merge.batch.latest import RowTexts, number_pairs
from pgcdc_assets.merge.batch.spark_fallback import NotInScope
from pgcdc_assets.merge.batch.typed_rows import TypedRows, encode_rows, with_stored_values
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.tables.columns import (
    IS_CURRENT,
    RESCUED,
    VALID_FROM,
    VALID_FROM_EPOCH,
    VALID_FROM_LSN,
    VALID_TO,
    VALID_TO_EPOCH,
    VALID_TO_LSN,
)


def begin_versions(rows: pa.Table, epoch: int) -> pa.Table:
    """Return rows as versions that begin in an epoch, and that nothing has ended."""
    count = rows.num_rows
    return _with_columns(
        rows,
        {
            VALID_FROM_EPOCH: pa.array(np.full(count, epoch, np.int32)),
            IS_CURRENT: pa.array(np.ones(count, np.bool_)),
        },
    )


def merge_versions(stored: pa.Table, typed: TypedRows, schema: TableSchema, epoch: int) -> Contents:
    """Add the events of a step to the current versions of a table.

    Args:
        stored: the current versions.
        typed: the events, in order.
        epoch: of the events.

    Raises:
        NotInScope: a key is NULL, two current versions have one key, or a value is nowhere to be
            found.
    """
    of_events, of_stored, of_origins = encode_rows(typed, stored, schema)
    size = int(max(of_events.max(initial=-1), of_stored.max(initial=-1))) + 1
    at_table = np.full(size, -1, np.int64)
    at_table[of_stored] = np.arange(stored.num_rows)
    if np.count_nonzero(at_table >= 0) < stored.num_rows:
        raise NotInScope("two current versions have one key")
    texts = typed.texts
    rows = with_stored_values(typed, stored, at_table[of_origins], texts.is_content, schema)
    kept = _untangle(of_events, texts, at_table)
    kept = kept[~_comes_back(of_events[kept], texts, kept)]
    rows, codes = rows.take(pa.array(kept)), of_events[kept]
    is_content = texts.is_content[kept]
    starts = ~is_content | ~_is_repeated(rows, is_content, codes, stored, at_table, schema)
    started = np.flatnonzero(starts)
    of_key = codes[started]
    following = _following(of_key)
    ends = np.where(following >= 0, started[following], -1)
    first = np.full(size, -1, np.int64)
    # The last assignment of a repeated index counts.
    first[of_key[::-1]] = started[::-1]
    stored_ends = first[of_stored]
    is_version = is_content[started]
    begun = begin_versions(rows.take(pa.array(started[is_version])), epoch)
    ended = stored.filter(pa.array(stored_ends >= 0))
    begun, ended = (
        _with_ends(versions, at, rows, epoch)
        for versions, at in ((begun, ends[is_version]), (ended, stored_ends[stored_ends >= 0]))
    )
    is_open = begun.column(IS_CURRENT)
    return Contents(
        pa.concat_tables([stored.filter(pa.array(stored_ends < 0)), begun.filter(is_open)]),
        inserted=begun.num_rows,
        updated=ended.num_rows,
        ended=pa.concat_tables([ended, begun.filter(pc.invert(is_open))]),
    )


def _untangle(codes: Numbers, texts: RowTexts, at_table: Numbers) -> Numbers:
    """Fold a transaction in which a key had two rows, or fewer than none, to one step.

    Args:
        codes: the number of each event's key.
        at_table: the current version of each key; -1 without one.

    Returns:
        The events that remain, in order.
    """
    every = np.arange(len(codes))
    if texts.twins is None:
        return every
    by_key = np.argsort(codes, kind="stable")
    total = np.cumsum(texts.twins.balance[by_key])
    begins = _preceding(codes)[by_key] < 0
    before = (total - texts.twins.balance[by_key])[begins]
    held = np.empty(len(codes), np.int64)
    held[by_key] = total - before[np.cumsum(begins) - 1]
    held += at_table[codes] >= 0
    steps = number_pairs(codes, texts.lsn)
    is_odd = np.bincount(steps, (held < 0) | (held > 1)) > 0
    is_tangled = is_odd[steps]
    at_commit = np.zeros(len(codes), np.bool_)
    at_commit[texts.twins.rows_at_commit(codes, texts.lsn, texts.is_content)] = True
    return every[~is_tangled | at_commit]


def _comes_back(codes: Numbers, texts: RowTexts, events: Numbers) -> Flags:
    """Return which departures have the position of the next content of their key.

    A row that one change removes and adds again was never absent.

    Args:
        codes: the number of each event's key.
        events: the places of the events in `texts`.
    """
    is_content, lsn, ordinal = (x[events] for x in (texts.is_content, texts.lsn, texts.ordinal))
    after = _following(codes)
    found: Flags = (
        ~is_content
        & (after >= 0)
        & is_content[after]
        & (lsn[after] == lsn)
        & (ordinal[after] == ordinal)
    )
    return found


def _is_repeated(
    rows: pa.Table,
    is_content: Flags,
    codes: Numbers,
    stored: pa.Table,
    at_table: Numbers,
    schema: TableSchema,
) -> Flags:
    """Return which contents equal the content before them.

    Args:
        rows: the events.
        codes: the number of each event's key.
        at_table: the current version of each key; -1 without one.
    """
    count = rows.num_rows
    there = at_table[codes]
    of_table = np.where(there >= 0, count + there, -1)
    before = _preceding(codes)
    before = np.where(before >= 0, before, of_table)
    is_row = np.append(is_content, np.ones(stored.num_rows, np.bool_))
    found = np.zeros(count, np.bool_)
    compared = np.flatnonzero(is_content & (before >= 0))
    compared = compared[is_row[before[compared]]]
    if not len(compared):
        return found
    names = [field.name for field in schema.fields]
    both = pa.concat_tables([rows.select([*names, RESCUED]), stored.select([*names, RESCUED])])
    left, right = pa.array(compared), pa.array(before[compared])
    same = np.ones(len(compared), np.bool_)
    for name in names:
        column = one_array(both.column(name))
        same &= is_same(column.take(left), column.take(right))
    rescued = _with_sorted_entries(one_array(both.column(RESCUED)))
    same &= is_same(rescued.take(left), rescued.take(right))
    found[compared] = same
    return found


def _with_sorted_entries(maps: pa.MapArray) -> pa.MapArray:
    """Order the entries of each map: the order of a table's columns may have changed."""
    sizes = np.diff(maps.offsets.to_numpy(zero_copy_only=False))
    entries = pa.table(
        {
            "row": np.repeat(np.arange(len(maps)), sizes),
            "name": maps.keys,
            "text": maps.items,
        }
    ).sort_by([("row", "ascending"), ("name", "ascending")])
    is_null = maps.is_null().to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.MapArray.from_arrays(
        pa.array(offsets, mask=np.append(is_null, False)),
        one_array(entries.column("name")),
        one_array(entries.column("text")),
    )


def _with_ends(versions: pa.Table, ends: Numbers, events: pa.Table, epoch: int) -> pa.Table:
    """End versions by events.

    Args:
        ends: for each version, the event that ends it; -1 without one.
    """
    is_open = ends < 0
    at = pa.array(ends, mask=is_open)
    return _with_columns(
        versions,
        {
            VALID_TO: one_array(events.column(VALID_FROM)).take(at),
            VALID_TO_LSN: one_array(events.column(VALID_FROM_LSN)).take(at),
            VALID_TO_EPOCH: pa.array(np.full(len(ends), epoch, np.int32), mask=is_open),
            IS_CURRENT: pa.array(is_open),
        },
    )


def _with_columns(rows: pa.Table, columns: Mapping[str, pa.Array]) -> pa.Table:
    for name, values in columns.items():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), values)
    return rows


def _preceding(codes: Numbers) -> Numbers:
    """Return the place of the key before each place; -1 for the first one."""
    by_key = np.argsort(codes, kind="stable")
    found = np.full(len(codes), -1, np.int64)
    is_same_key = codes[by_key[1:]] == codes[by_key[:-1]]
    found[by_key[1:][is_same_key]] = by_key[:-1][is_same_key]
    return found


def _following(codes: Numbers) -> Numbers:
    """Return the place of the key after each place; -1 for the last one."""
    before = _preceding(codes)
    found = np.full(len(codes), -1, np.int64)
    has_one = before >= 0
    found[before[has_one]] = np.flatnonzero(has_one)
    return found
