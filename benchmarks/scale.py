"""The scale of the cost benchmarks: the full size, or a fraction for a trial.

`PGCDC_BENCH_SCALE=0.001` reduces the benchmarks to a thousandth. The figures then have no meaning:
`run.py` prints them, but does not save them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCALE = float(os.environ.get("PGCDC_BENCH_SCALE", "1"))


def scaled(full: int, least: int = 1) -> int:
    """Return a size at the scale of this run."""
    return full if SCALE == 1 else max(least, round(full * SCALE))


@contextmanager
def roomy_folder(name: str, gigabytes: float) -> Iterator[Path]:
    """Create a temporary folder for the block, and delete it at the end.

    Args:
        gigabytes: maximum size of the folder in a run at full size, including files of Spark.
    """
    needed = gigabytes * min(SCALE, 1) * 1e9
    with tempfile.TemporaryDirectory(prefix=f"pgcdc-bench-{name}-") as folder:
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise SystemExit(
                f"{name} needs {needed / 1e9:.0f} GB of disk and {folder} has {free / 1e9:.0f} GB: "
                "set TMPDIR to a larger place"
            )
        yield Path(folder)


@contextmanager
def memory_folder(name: str) -> Iterator[Path]:
    """Create a temporary folder for the block, in memory if possible."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix=f"pgcdc-bench-{name}-", dir=parent) as folder:
        yield Path(folder)
