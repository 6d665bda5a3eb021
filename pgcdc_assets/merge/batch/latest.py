"""The last change of each key, or all changes in order, found in Arrow arrays of texts.

This is the fold of `merge/fold/latest.py` and `merge/fold/toast.py`. A key is compared by its text,
so `scope` admits types whose texts are equal exactly if their values are.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge.batch.equal_values import Flags
from pgcdc_assets.merge.batch.events import (
    MOST_FILLED_BYTES,
    Numbers,
    build_events,
    encode_keys,
    last_of_each,
    one_array,
    value_bytes,
)
from pgcdc_assets.merge.batch.spark_fallback import TOO_MANY_VALUES, NotInScope
from pgcdc_assets.merge.change_stats import COPIED
from pgcdc_assets.merge.fold.events import Fold
from pgcdc_assets.merge.fold.table_schema import TableSchema

_TIME = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Twins:
    """The events of a key that is a part of the replica identity: two rows may have it.

    Attributes:
        identities: the number of each event's replica identity.
        balance: by how much each event changes the number of rows: -1, 0 or 1.
    """

    identities: Numbers
    balance: Numbers

    def rows_at_commit(self, codes: Numbers, lsn: Numbers, is_content: Flags) -> Numbers:
        """Find for each key and transaction the row of the key at the commit, or its departure.

        See `merge/fold/latest.py`. The events are in order.

        Args:
            codes: the number of each event's key.

        Returns:
            The events, in order.
        """
        order = np.arange(len(codes))
        rows = number_pairs(self.identities, lsn)
        last = last_of_each(rows, order)
        balance = np.bincount(rows, self.balance)
        decides = is_content[last] | (balance < 0)
        # Contents come after departures, so that the last one is a content if there is one.
        found = np.sort(last[decides])
        found = np.concatenate([found[~is_content[found]], found[is_content[found]]])
        of_key = last_of_each(number_pairs(codes, lsn), found)
        return np.sort(of_key[of_key >= 0])


@dataclass(frozen=True)
class RowTexts:
    """Rows of one table as texts: at most one of a key, or the events of each key in order.

    Attributes:
        columns: one array of texts for each field; of a departure, the texts of its key.
        op: the operation of the change; `S` for a copied row.
        is_content: the key has a row after the step; otherwise the row has left.
        unknown: by field index, which rows take the value from a row of the table.
        origins: the texts of the key of that row, one array for each column of the key; empty if it
            is the row's own key.
        twins: what tells the rows of one key apart; None if a key has one row at any time.
    """

    columns: Sequence[pa.Array]
    lsn: Numbers
    ordinal: Numbers
    commit_ts: pa.Array
    op: pa.Array
    is_content: Flags
    unknown: dict[int, Flags] = field(default_factory=dict)
    origins: Sequence[pa.Array] = ()
    twins: Twins | None = None

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return len(self.lsn)


def read_snapshot_texts(
    tuples: pa.Array, schema: TableSchema, lsn: Lsn, at: dt.datetime | None
) -> RowTexts:
    """Return the rows of a snapshot.

    Args:
        tuples: the texts of the rows, in the layout of the schema.
        at: the time of the snapshot; None for a table without the times of copied rows.
    """
    count = len(tuples)
    return RowTexts(
        [pc.list_element(tuples, i) for i in range(len(schema.fields))],
        np.full(count, int(lsn), np.int64),
        np.full(count, -1, np.int64),
        pa.repeat(pa.scalar(at, _TIME), count),
        pa.repeat(COPIED, count),
        np.ones(count, np.bool_),
    )


def fold_texts(changes: pa.Table, fold: Fold) -> RowTexts:
    """Fold the changes of a table to the last one of each key.

    Args:
        changes: inserts, updates and deletes of `raw/changes`, in any order.

    Raises:
        NotInScope: a text that a change leaves out is nowhere to be found.
    """
    events, codes = _keyed_events(changes, fold)
    if fold.stats.is_full:
        rows, at = _keep_bag_remainder(events, codes, fold)
        return _texts_of(events, codes, rows, at, fold)
    order, twins = np.arange(len(codes)), _find_twins(events, fold)
    if twins is not None:
        lsn = events.column("lsn").to_numpy()
        order = twins.rows_at_commit(codes, lsn, _flags(events, "is_content"))
    rows = last_of_each(codes, order)
    rows = rows[rows >= 0]
    return _texts_of(events, codes if twins is None else twins.identities, rows, rows, fold)


def event_texts(changes: pa.Table, fold: Fold, most_bytes: int) -> RowTexts:
    """Return the events of a table's changes, in order.

    Args:
        changes: as for `fold_texts`; not those of a multiset of whole old rows.
        most_bytes: the bound of the texts that changes leave out.

    Raises:
        NotInScope: these texts exceed the bound, or a text is nowhere to be found.
    """
    events, codes = _keyed_events(changes, fold)
    every, twins = np.arange(len(codes)), _find_twins(events, fold)
    rows = codes if twins is None else twins.identities
    return replace(_texts_of(events, rows, every, every, fold, most_bytes), twins=twins)


def _keyed_events(changes: pa.Table, fold: Fold) -> tuple[pa.Table, Numbers]:
    """Return the events of changes in order, and the number of each event's key."""
    events = _sorted(build_events(changes, fold))
    return events, encode_keys([events.column(f"text_{index}") for index in fold.schema.key])


def _find_twins(events: pa.Table, fold: Fold) -> Twins | None:
    if not fold.further_identity:
        return None
    is_arrival = _flags(events, "is_move") | pc.equal(events.column("op"), "I").to_numpy()
    balance = np.where(_flags(events, "is_content"), is_arrival.astype(np.int64), -1)
    return Twins(encode_keys([events.column(f"text_{index}") for index in fold.identity]), balance)


def number_pairs(left: Numbers, right: Numbers) -> Numbers:
    """Number the distinct pairs from 0."""
    _, of_right = np.unique(right, return_inverse=True)
    pairs = left * (int(of_right.max(initial=0)) + 1) + of_right
    found: Numbers = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
    return found


def _texts_of(
    events: pa.Table,
    codes: Numbers,
    rows: Numbers,
    at: Numbers,
    fold: Fold,
    most_bytes: int = MOST_FILLED_BYTES,
) -> RowTexts:
    """Return some of the events, with the last known text of each value that a change leaves out.

    Args:
        codes: the number of what identifies each event's row: its key or its replica identity.
        rows: the events that are returned.
        at: the events whose positions they get.
    """
    is_content = _flags(events, "is_content")[rows]
    taken = events.take(pa.array(rows))
    texts = [one_array(taken.column(f"text_{i}")) for i in range(len(fold.schema.fields))]
    unknown, origins = {}, list[pa.Array]()
    if fold.unknown:
        earlier = _earlier_events(events, codes)
        is_row = _flags(events, "is_content")
        for index in fold.unknown:
            column, is_left_out = events.column(f"text_{index}"), _flags(events, f"unknown_{index}")
            source = _find_known(earlier, ~is_left_out)[rows]
            if (is_content & ~is_row[source]).any():
                raise NotInScope("a change lacks a value of a row that has left")
            source = np.where(is_content, source, rows)
            most_bytes -= int(value_bytes(column)[source].sum())
            if most_bytes < 0:
                raise NotInScope(TOO_MANY_VALUES)
            texts[index] = one_array(column.take(pa.array(source)))
            unknown[index] = is_content & is_left_out[source]
        if fold.stats.has_old_tuples:
            origins = _find_origins(events, earlier, rows, fold)
    positions = events.take(pa.array(at))
    return RowTexts(
        texts,
        positions.column("lsn").to_numpy(),
        positions.column("ordinal").to_numpy(),
        one_array(positions.column("commit_ts")),
        one_array(positions.column("op")),
        is_content,
        unknown,
        origins,
    )


def _sorted(events: pa.Table) -> pa.Table:
    """Order events by position; at one position a departure comes before a content."""
    keys = [
        _flags(events, "is_content"),
        *(events.column(n).to_numpy() for n in ("ordinal", "lsn")),
    ]
    return events.take(pa.array(np.lexsort(keys))).combine_chunks()


def _flags(events: pa.Table, name: str) -> Flags:
    found: Flags = events.column(name).to_numpy()
    return found


def _earlier_events(events: pa.Table, codes: Numbers) -> Numbers:
    """Return the event that shows each content's row as it was before; -1 without an event.

    For an update within a key this is the event of the key before it. For an update that changed
    the key it is the event of the old key before the departure, which has the position of the
    update.
    """
    count = len(codes)
    by_key = np.argsort(codes, kind="stable")
    before = np.full(count, -1, np.int64)
    before[by_key[1:]] = np.where(codes[by_key[1:]] == codes[by_key[:-1]], by_key[:-1], -1)
    departures = _departures_of_moves(events)
    is_moved = departures >= 0
    before[is_moved] = before[departures[is_moved]]
    return before


def _departures_of_moves(events: pa.Table) -> Numbers:
    """Return the departure that belongs to each update of a key; -1 for other events."""
    is_move = np.flatnonzero(_flags(events, "is_move"))
    found = np.full(events.num_rows, -1, np.int64)
    # The departure has the same position, and a departure comes first.
    found[is_move] = is_move - 1
    return found


def _find_known(earlier: Numbers, is_known: Flags) -> Numbers:
    """Return for each event the last event, in the history of its row, with a known value.

    Without such an event it is the first event of the row.
    """
    here = np.arange(len(earlier))
    found = np.where(is_known | (earlier < 0), here, earlier)
    while True:
        # Each pass doubles the length of the paths that are followed.
        further = found[found]
        if np.array_equal(further, found):
            return found
        found = further


def _find_origins(events: pa.Table, earlier: Numbers, rows: Numbers, fold: Fold) -> list[pa.Array]:
    """Return the keys that rows had before the first change."""
    first = _find_known(earlier, np.zeros(len(earlier), np.bool_))[rows]
    departures = _departures_of_moves(events)[first]
    source = pa.array(np.where(departures >= 0, departures, first))
    return [one_array(events.column(f"text_{i}").take(source)) for i in fold.schema.key]


def _keep_bag_remainder(events: pa.Table, codes: Numbers, fold: Fold) -> tuple[Numbers, Numbers]:
    """Find for each key the row after the range, or its departure.

    See `merge/fold/latest.py`. Events are sorted, and whole rows are compared.

    Returns:
        The events with the texts of the rows, and the events with the positions.
    """
    is_content = _flags(events, "is_content")
    width = range(len(fold.schema.fields))
    tuples = encode_keys([events.column(f"text_{i}") for i in width])
    order = np.arange(len(codes))
    balance = np.bincount(tuples, np.where(is_content, 1, -1)).astype(np.int64)
    last = last_of_each(tuples, order)
    last_put_in = np.full(len(balance), -1, np.int64)
    last_put_in[tuples[is_content]] = order[is_content]
    is_held = is_content[last] | (balance > 0)
    # A row is held that was added at some time, so `last_put_in` is an event.
    newest = last_of_each(codes, order)
    held = np.full(len(newest), -1, np.int64)
    np.maximum.at(held, codes[last[is_held]], last_put_in[is_held])
    has_lost = np.zeros(len(held), np.bool_)
    has_lost[codes[last[balance < 0]]] = True
    departure = np.full(len(held), -1, np.int64)
    departure[codes[~is_content]] = order[~is_content]
    is_kept = (held >= 0) | has_lost
    rows = np.where(held >= 0, held, departure)[is_kept]
    at = np.where(held >= 0, held, newest)[is_kept]
    return rows, at
