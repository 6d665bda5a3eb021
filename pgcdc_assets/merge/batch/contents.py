"""The rows of a table after a step, from its rows before and the folded changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.merge.batch.casts import Casts
from pgcdc_assets.merge.batch.column_types import arrow_schema
from pgcdc_assets.merge.batch.events import (
    Flags,
    Numbers,
    encode_keys,
    last_of_each,
    one_array,
)
from pgcdc_assets.merge.batch.latest import FoldedTexts
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.tables.columns import COMMIT_TS, LSN, ORDINAL, RESCUED

_RESCUED = pa.map_(pa.string(), pa.string())


class NotInScope(Exception):
    """The rows of a table need Spark. Nothing was written."""


@dataclass(frozen=True)
class TypedRows:
    """Folded rows with typed values.

    Attributes:
        rows: with the columns of the table.
        folded: the same rows as texts.
        origins: the keys of the rows that unknown values are taken from, if they are other keys.
    """

    rows: pa.Table
    folded: FoldedTexts
    origins: Sequence[pa.Array] = ()

    def __len__(self) -> int:
        return self.folded.row_count


@dataclass(frozen=True)
class Contents:
    """The rows of a table after a step.

    Attributes:
        inserted: number of rows with new keys.
        updated: number of rows that a change replaced.
        deleted: number of rows that have left.
    """

    rows: pa.Table
    inserted: int = 0
    updated: int = 0
    deleted: int = 0


@dataclass(frozen=True)
class RequestedRows:
    """Folded texts whose casts are requested."""

    folded: FoldedTexts
    schema: TableSchema
    numbers: tuple[int, ...]
    origins: tuple[int, ...] = ()

    @classmethod
    def request(cls, folded: FoldedTexts, schema: TableSchema, casts: Casts) -> RequestedRows:
        """Request the casts of all texts."""
        pairs = zip(schema.fields, folded.texts, strict=True)
        numbers = tuple(casts.add(each.type, text) for each, text in pairs)
        keys = zip(schema.key, folded.origins, strict=False)
        origins = tuple(casts.add(schema.fields[i].type, text) for i, text in keys)
        return cls(folded, schema, numbers, origins)

    def typed(self, casts: Casts) -> TypedRows:
        """Return the rows with the values of the casts."""
        folded = self.folded
        values = [casts.values(number) for number in self.numbers]
        target = arrow_schema(self.schema)
        system = {
            LSN: pa.array(folded.lsn),
            ORDINAL: pa.array(folded.ordinal),
            COMMIT_TS: folded.commit_ts,
            RESCUED: self._rescued(values),
        }
        columns = [*values, *(system[name] for name, _, _ in self.schema.system)]
        origins = [casts.values(number) for number in self.origins]
        return TypedRows(pa.table(columns, schema=target), folded, origins)

    def _rescued(self, values: Sequence[pa.Array]) -> pa.Array:
        """Return the maps of the texts without a typed value, in the order of the fields."""
        count = self.folded.row_count
        lost = [
            (index, np.flatnonzero(_is_lost(text, value)))
            for index, (text, value) in enumerate(zip(self.folded.texts, values, strict=True))
            if not self.schema.fields[index].type.is_text
        ]
        lost = [(index, rows) for index, rows in lost if len(rows)]
        if not lost:
            return pa.nulls(count, _RESCUED)
        rows = np.concatenate([rows for _, rows in lost])
        names = np.concatenate([np.full(len(rows), index) for index, rows in lost])
        order = np.lexsort((names, rows))
        texts = pa.concat_arrays(
            [self.folded.texts[index].take(pa.array(rows)) for index, rows in lost]
        )
        sizes = np.bincount(rows, minlength=count)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        fields = pa.array([field.name for field in self.schema.fields])
        return pa.MapArray.from_arrays(
            pa.array(offsets, mask=np.append(sizes == 0, False)),
            fields.take(pa.array(names[order])),
            texts.take(pa.array(order)).cast(pa.string()),
        )


def _is_lost(text: pa.Array, value: pa.Array) -> Flags:
    lost: Flags = pc.and_(pc.is_valid(text), pc.is_null(value)).to_numpy(zero_copy_only=False)
    return lost


def fresh_contents(typed: TypedRows) -> Contents:
    """Return the contents of a table that had no rows.

    Raises:
        NotInScope: a change leaves out a value.
    """
    if any(missing.any() for missing in typed.folded.unknown.values()):
        raise NotInScope
    rows = typed.rows.filter(pa.array(typed.folded.is_content))
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
    count, folded = len(typed), typed.folded
    keys = [
        pa.chunked_array([*typed.rows.column(name).chunks, *stored.column(name).chunks, *origin])
        for name, origin in zip_longest(
            schema.key_names, ([origin] for origin in typed.origins), fillvalue=()
        )
    ]
    if any(key.null_count for key in keys):
        raise NotInScope
    codes = encode_keys(keys)
    end = count + stored.num_rows
    of_changes, of_stored = codes[:count], codes[count:end]
    of_origins = codes[end:] if typed.origins else of_changes
    size = int(codes.max()) + 1 if len(codes) else 0
    change = np.full(size, -1, np.int64)
    change[of_changes] = np.arange(count)
    if len(np.unique(of_changes)) < count:
        raise NotInScope
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
    rows = _with_stored_values(typed, stored, row[of_origins], applies, schema)
    kept = stored.filter(pa.array(~is_replaced))
    put = rows.filter(pa.array(applies & folded.is_content))
    return Contents(
        pa.concat_tables([kept, put]),
        inserted=int((applies & is_new).sum()),
        updated=int((applies & ~is_new & folded.is_content).sum()),
        deleted=int((applies & ~is_new & ~folded.is_content).sum()),
    )


def _with_stored_values(
    typed: TypedRows, stored: pa.Table, sources: Numbers, applies: Flags, schema: TableSchema
) -> pa.Table:
    """Fill in values that a change leaves out from the rows of the table.

    Args:
        sources: the row of the table that a folded row was before; -1 without a row.
    """
    rows = typed.rows
    rescued = stored.column(RESCUED)
    for index, is_unknown in typed.folded.unknown.items():
        wanted = is_unknown & applies
        if not wanted.any():
            continue
        if (sources[wanted] < 0).any():
            raise NotInScope
        source = pa.array(np.where(wanted, sources, 0), mask=~wanted)
        is_typed = not schema.fields[index].type.is_text
        if is_typed and rescued.take(source).null_count < len(source):
            # The text of the value that is taken may be there.
            raise NotInScope
        name = schema.fields[index].name
        values = pc.if_else(
            pa.array(wanted),
            one_array(stored.column(name).take(source)),
            one_array(rows.column(name)),
        )
        rows = rows.set_column(index, rows.schema.field(index), values)
    return rows


def _is_later(lsn: Numbers, ordinal: Numbers, than_lsn: Numbers, than_ordinal: Numbers) -> Flags:
    later: Flags = (lsn > than_lsn) | ((lsn == than_lsn) & (ordinal > than_ordinal))
    return later


def _numbers(rows: pa.Table, name: str) -> Numbers:
    found: Numbers = rows.column(name).to_numpy()
    return found
