"""Changes whose tuples cannot be decoded, parked as rows.

A message of a row has a frame, an action and a relation id. If these are sound, a fault of the
message's tuples concerns one row of one table: the messages before and after it are decoded as
usual. The row is then parked: its operation is P, and its `new` has two texts, the reason and the
message's bytes as hex (see `utf8`), from the action byte. All other faults concern the stream and
raise ProtocolError: frames, transactions, announcements, and changes of an unknown relation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol import utf8
from pgcdc_assets.protocol.frames import Positions
from pgcdc_assets.protocol.row_messages import (
    ChangeMessages,
    FoundTuples,
    LogicalTexts,
    MalformedRows,
    read_tuples,
)
from pgcdc_assets.protocol.tuples import WireBuffer
from pgcdc_assets.table_name import TableName

PARKED = ord("P")

# Hex doubles the bytes, and readers of Parquet hold a value in memory as a whole.
_MOST_BYTES = 16 * 1024 * 1024


class ParkedRows(NamedTuple):
    """The parked rows of one relation.

    Attributes:
        table: the table's name.
        row_count: number of rows.
        first_lsn: lowest commit LSN.
        last_lsn: highest commit LSN.
        reason: the reason of the first row.
    """

    table: TableName
    row_count: int
    first_lsn: Lsn
    last_lsn: Lsn
    reason: str


def add_parked(known: dict[int, ParkedRows], rows: pa.RecordBatch) -> None:
    """Add the parked rows of a decoded batch to the known ones by relation id."""
    parked = rows.filter(pc.equal(rows.column("op"), chr(PARKED)))
    relation_ids = parked.column("relation_id")
    for relation_id in relation_ids.unique().to_pylist():
        own = parked.filter(pc.equal(relation_ids, relation_id))
        first = own.slice(0, 1).to_pylist()[0]
        before = known.get(relation_id)
        known[relation_id] = ParkedRows(
            TableName(first["schema"], first["table"]),
            own.num_rows + (before.row_count if before else 0),
            before.first_lsn if before else Lsn(first["commit_lsn"]),
            Lsn(own.column("commit_lsn")[-1].as_py()),
            before.reason if before else first["new"][0],
        )


def read_or_park(
    wire: WireBuffer,
    changes: ChangeMessages,
    row_count: int,
    logical: Mapping[int, LogicalTexts],
) -> tuple[FoundTuples, Positions]:
    """Return the tuples of a batch, and the row numbers of parked rows.

    The arguments are those of `read_tuples`. Each attempt to read leaves out all messages that
    break one rule, so the number of attempts is bounded by rules and columns, not by rows.
    """
    parked: dict[int, LogicalTexts] = {}
    read = np.arange(len(changes.rows))
    while True:
        try:
            found = read_tuples(wire, changes.choose(read), row_count, {**logical, **parked})
        except MalformedRows as error:
            for index, offset in zip(
                read[error.indexes].tolist(), error.offsets.tolist(), strict=True
            ):
                row = int(changes.rows[index])
                parked[row] = _texts(wire, changes, index, f"byte {offset}: {error.reason}")
            read = np.delete(read, error.indexes)
        else:
            return found, np.array(sorted(parked), np.int64)


def _texts(wire: WireBuffer, changes: ChangeMessages, index: int, reason: str) -> LogicalTexts:
    start, end = int(changes.bodies[index]), int(changes.ends[index])
    size = end - start + 1
    if size > _MOST_BYTES:
        reason += f"; the first {_MOST_BYTES} of {size} bytes are kept"
        end = start + _MOST_BYTES - 1
    # A message of a streamed transaction has a transaction id between the action and the body.
    message = bytes((int(changes.actions[index]),)) + wire.bytes[start:end].tobytes()
    return LogicalTexts((start, start), (start, start), (reason, utf8.bytes_as_text(message)))
