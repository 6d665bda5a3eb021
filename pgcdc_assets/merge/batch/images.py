"""The rows of a current image after a step, from its rows before and the folded changes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pgcdc_assets.merge.batch.contents import Contents
from pgcdc_assets.merge.batch.equal_values import Flags
from pgcdc_assets.merge.batch.events import Numbers, last_of_each
from pgcdc_assets.merge.batch.spark_fallback import NO_VALUE, NotInScope
from pgcdc_assets.merge.batch.typed_rows import TypedRows, encode_rows, with_stored_values
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.tables.columns import LSN, ORDINAL


def fresh_contents(typed: TypedRows) -> Contents:
    """Return the contents of a table that had no rows.

    Raises:
        NotInScope: a change leaves out a value.
    """
    if any(missing.any() for missing in typed.texts.unknown.values()):
        raise NotInScope(NO_VALUE)
    rows = typed.rows.filter(pa.array(typed.texts.is_content))
    return Contents(rows, inserted=rows.num_rows)


def merge_contents(stored: pa.Table, typed: TypedRows, schema: TableSchema) -> Contents:
    """Replace rows of a table by folded rows with the same keys.

    A change counts only if it is newer than the row of the table. A row without a newer change
    stays, even if its key is there twice: the checks report duplicate keys.

    Args:
        stored: all rows of the table.

    Raises:
        NotInScope: a key is NULL, two folded rows have one key, or a value is nowhere to be found.
    """
    count, folded = len(typed), typed.texts
    if not count:
        # Under whole old rows, each row of the step may have been added and removed again.
        return Contents(stored)
    of_changes, of_stored, of_origins = encode_rows(typed, stored, schema)
    # A row may come from a key that the changes leave as it was (`Twins`).
    size = 1 + max(int(each.max(initial=-1)) for each in (of_changes, of_stored, of_origins))
    change = np.full(size, -1, np.int64)
    change[of_changes] = np.arange(count)
    if len(np.unique(of_changes)) < count:
        raise NotInScope("two keys with different texts are equal as values")
    lsn, ordinal = _numbers(stored, LSN), _numbers(stored, ORDINAL)
    row = np.full(size, -1, np.int64)
    newest = last_of_each(of_stored, np.lexsort((ordinal, lsn)))
    row[: len(newest)] = newest
    own = change[of_stored]
    is_replaced = (own >= 0) & _is_later(folded.lsn[own], folded.ordinal[own], lsn, ordinal)
    there = row[of_changes]
    is_new = there < 0
    applies = np.where(
        is_new,
        folded.is_content,
        True if not len(lsn) else _is_later(folded.lsn, folded.ordinal, lsn[there], ordinal[there]),
    )
    rows = with_stored_values(typed, stored, row[of_origins], applies, schema)
    kept = stored.filter(pa.array(~is_replaced))
    put = rows.filter(pa.array(applies & folded.is_content))
    return Contents(
        pa.concat_tables([kept, put]),
        inserted=int((applies & is_new).sum()),
        updated=int((applies & ~is_new & folded.is_content).sum()),
        deleted=int((applies & ~is_new & ~folded.is_content).sum()),
    )


def _is_later(lsn: Numbers, ordinal: Numbers, than_lsn: Numbers, than_ordinal: Numbers) -> Flags:
    later: Flags = (lsn > than_lsn) | ((lsn == than_lsn) & (ordinal > than_ordinal))
    return later


def _numbers(rows: pa.Table, name: str) -> Numbers:
    # A row that another program has added has no position: each change is later.
    found: Numbers = rows.column(name).fill_null(-1).to_numpy()
    return found
