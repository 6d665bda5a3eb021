"""Counts of rows, from the statistics of a table's files."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_NULL_RESCUED = "null_count._rescued"


def written_rows(files: pa.Table) -> int | None:
    """Count the rows of the files, deleted rows included."""
    counts = files.column("num_records")
    return None if counts.null_count else int(pc.sum(counts).as_py() or 0)


def rescued_rows(files: pa.Table) -> dict[str, int | None]:
    """Count the rows with rescued values by file; None for a file without statistics."""
    paths = files.column("path").to_pylist()
    if _NULL_RESCUED not in files.column_names:
        return dict.fromkeys(paths)
    counts = pc.subtract(files.column("num_records"), files.column(_NULL_RESCUED))
    return dict(zip(paths, counts.to_pylist(), strict=True))
