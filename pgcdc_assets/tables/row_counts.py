"""Counts of rows, from the statistics of a table's files and its deletion vectors."""

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


def count_rows(written: int | None, vectors: pa.Table) -> int | None:
    """Count the rows of a table; None if a file has no statistics."""
    if not written:
        return written
    kept = vectors.column("selection_vector").combine_chunks()
    hidden = pc.sum(pc.invert(pc.list_flatten(kept))).as_py()
    return written - int(hidden or 0)
