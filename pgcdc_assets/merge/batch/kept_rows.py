"""The rows of small data files that this process wrote, kept for its next merge.

A long run merges the same small tables every few seconds. Opening and reading a file takes more
than a millisecond in a local lake, and three requests in an object store. A data file never
changes, and its name is unique, so its rows are those that were written.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import pyarrow as pa

_MOST_BYTES = 64 * 1024 * 1024
_MOST_BYTES_OF_FILE = 1024 * 1024


@dataclass
class KeptRows:
    """Rows of data files by address. Threads may share it.

    Attributes:
        most_bytes: of all files. Above it, the files that were kept first are forgotten.
        most_bytes_of_file: larger files are not kept.
    """

    most_bytes: int = _MOST_BYTES
    most_bytes_of_file: int = _MOST_BYTES_OF_FILE
    _rows: OrderedDict[str, pa.Table] = field(default_factory=OrderedDict)
    _size: int = 0
    _lock: Lock = field(default_factory=Lock)

    def keep(self, file: str, rows: pa.Table) -> None:
        """Keep the rows of a file, unless they are many."""
        if rows.nbytes > self.most_bytes_of_file:
            return
        # A slice would keep the arrays of all tables of its step in memory.
        copied = rows.take(pa.array(np.arange(rows.num_rows)))
        with self._lock:
            self._rows[file] = copied
            self._size += copied.nbytes
            while self._size > self.most_bytes:
                self._size -= self._rows.popitem(last=False)[1].nbytes

    def pop(self, file: str) -> pa.Table | None:
        """Return the rows of a file, and forget them: a merge replaces the file."""
        with self._lock:
            rows = self._rows.pop(file, None)
            if rows is not None:
                self._size -= rows.nbytes
            return rows


KEPT_ROWS = KeptRows()
