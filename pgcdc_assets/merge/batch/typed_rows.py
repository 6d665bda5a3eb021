"""Rows of one table with typed values, from the texts of its changes or of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.merge.batch.casts import Casts
from pgcdc_assets.merge.batch.column_types import arrow_schema
from pgcdc_assets.merge.batch.equal_values import Flags
from pgcdc_assets.merge.batch.events import (
    MOST_FILLED_BYTES,
    Numbers,
    encode_keys,
    one_array,
    value_bytes,
)
from pgcdc_assets.merge.batch.latest import RowTexts
from pgcdc_assets.merge.batch.spark_fallback import NO_VALUE, TOO_MANY_VALUES, NotInScope
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.tables.columns import (
    COMMIT_TS,
    LSN,
    OP,
    ORDINAL,
    RESCUED,
    VALID_FROM,
    VALID_FROM_LSN,
)

_RESCUED = pa.map_(pa.string(), pa.string())


@dataclass(frozen=True)
class TypedRows:
    """Folded rows with typed values.

    Attributes:
        rows: with the columns of the table; of a history, without the values of the columns that
            the following change of a key determines, and of the epochs.
        texts: the same rows as texts.
        origins: the keys of the rows that unknown values are taken from, if they are other keys.
    """

    rows: pa.Table
    texts: RowTexts
    origins: Sequence[pa.Array] = ()

    def __len__(self) -> int:
        return self.texts.row_count


@dataclass(frozen=True)
class RequestedRows:
    """Folded texts whose casts are requested."""

    texts: RowTexts
    schema: TableSchema
    numbers: tuple[int, ...]
    origins: tuple[int, ...] = ()

    @classmethod
    def request(cls, texts: RowTexts, schema: TableSchema, casts: Casts) -> RequestedRows:
        """Request the casts of all texts."""
        pairs = zip(schema.fields, texts.columns, strict=True)
        numbers = tuple(casts.add(each.type, text) for each, text in pairs)
        keys = zip(schema.key, texts.origins, strict=False)
        origins = tuple(casts.add(schema.fields[i].type, text) for i, text in keys)
        return cls(texts, schema, numbers, origins)

    def typed(self, casts: Casts) -> TypedRows:
        """Return the rows with the values of the casts."""
        texts = self.texts
        values = [casts.values(number) for number in self.numbers]
        target = arrow_schema(self.schema)
        system = {
            LSN: pa.array(texts.lsn),
            ORDINAL: pa.array(texts.ordinal),
            COMMIT_TS: texts.commit_ts,
            RESCUED: self._rescued(values),
            VALID_FROM: texts.commit_ts,
            VALID_FROM_LSN: pa.array(texts.lsn),
            OP: texts.op,
        }
        later = pa.nulls(texts.row_count)
        columns = [*values, *(system.get(name, later) for name, _, _ in self.schema.system)]
        origins = [casts.values(number) for number in self.origins]
        return TypedRows(pa.table(columns, schema=target), texts, origins)

    def _rescued(self, values: Sequence[pa.Array]) -> pa.Array:
        """Return the maps of the texts without a typed value, in the order of the fields."""
        count = self.texts.row_count
        lost = [
            (index, np.flatnonzero(_is_lost(text, value)))
            for index, (text, value) in enumerate(zip(self.texts.columns, values, strict=True))
            if not self.schema.fields[index].type.is_text
        ]
        lost = [(index, rows) for index, rows in lost if len(rows)]
        if not lost:
            return pa.nulls(count, _RESCUED)
        rows = np.concatenate([rows for _, rows in lost])
        names = np.concatenate([np.full(len(rows), index) for index, rows in lost])
        order = np.lexsort((names, rows))
        texts = pa.concat_arrays(
            [self.texts.columns[index].take(pa.array(rows)) for index, rows in lost]
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


def encode_rows(
    typed: TypedRows, stored: pa.Table, schema: TableSchema
) -> tuple[Numbers, Numbers, Numbers]:
    """Number the distinct keys from 0.

    Args:
        stored: rows of the table.

    Returns:
        The number of each typed row's key, of each stored row's key, and of each typed row's
        origin.

    Raises:
        NotInScope: a key is NULL.
    """
    count, end = len(typed), len(typed) + stored.num_rows
    keys = [
        pa.chunked_array([*typed.rows.column(name).chunks, *stored.column(name).chunks, *origin])
        for name, origin in zip_longest(
            schema.key_names, ([origin] for origin in typed.origins), fillvalue=()
        )
    ]
    if any(key.null_count for key in keys):
        raise NotInScope("a key is NULL")
    codes = encode_keys(keys)
    of_rows = codes[:count]
    return of_rows, codes[count:end], codes[end:] if typed.origins else of_rows


def with_stored_values(
    typed: TypedRows, stored: pa.Table, sources: Numbers, applies: Flags, schema: TableSchema
) -> pa.Table:
    """Fill in values that a change leaves out from the rows of the table.

    Args:
        sources: the row of the table that a row was before; -1 without a row.

    Raises:
        NotInScope: a value is nowhere to be found, or the values exceed `MOST_FILLED_BYTES`.
    """
    rows, left = typed.rows, MOST_FILLED_BYTES
    rescued = stored.column(RESCUED)
    for index, is_unknown in typed.texts.unknown.items():
        wanted = is_unknown & applies
        if not wanted.any():
            continue
        if (sources[wanted] < 0).any():
            raise NotInScope(NO_VALUE)
        source = pa.array(np.where(wanted, sources, 0), mask=~wanted)
        is_typed = not schema.fields[index].type.is_text
        if is_typed and rescued.take(source).null_count < len(source):
            # The text of the value that is taken may be there.
            raise NotInScope("a row with a rescued value lacks a value in its change")
        name = schema.fields[index].name
        column, wanted_rows = stored.column(name), sources[wanted]
        left -= int(value_bytes(column)[wanted_rows].sum())
        is_repeated = len(np.unique(wanted_rows)) < len(wanted_rows)
        if left < 0 or (is_repeated and pa.types.is_nested(column.type)):
            raise NotInScope(TOO_MANY_VALUES)
        values = pc.if_else(
            pa.array(wanted), one_array(column.take(source)), one_array(rows.column(name))
        )
        rows = rows.set_column(index, rows.schema.field(index), values)
    return rows
