"""A Delta table that is overwritten again and again, so that replaced files stay in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake

from pgcdc_assets.raw.lake import Lake


def make_table(lake: Lake) -> Path:
    """Create a table at version 10, with ten replaced files as large as its only file."""
    path = Path(lake.path("t"))
    for number in range(11):
        write(path, number)
    return path


def write(path: Path, number: int, **more: Any) -> None:
    """Replace the rows of a table by a thousand rows."""
    rows = pa.table({"id": range(number, number + 1000)})
    write_deltalake(str(path), rows, mode="overwrite", **more)


def data_files(path: Path) -> set[str]:
    """Return the names of the data files in a table's folder."""
    return {file.name for file in path.glob("*.parquet")}
