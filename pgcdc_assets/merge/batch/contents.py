"""What a step writes to a small table."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Contents:
    """The rows of a table after a step.

    Attributes:
        rows: all rows; of a history, the current versions.
        inserted: number of rows with new keys; of a history, of versions that began.
        updated: number of rows that a change replaced; of a history, of versions of the table that
            ended.
        deleted: number of rows that have left.
        ended: the versions that are added to those of a history that have ended; None for a table
            without history.
    """

    rows: pa.Table
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    ended: pa.Table | None = None
