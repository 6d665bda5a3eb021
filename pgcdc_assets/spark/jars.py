"""A lock for the resolution of Spark's jars, one process of a user at a time.

Spark resolves the jars of `spark.jars.packages` with Ivy, whose cache has no lock. With an empty
cache, processes that start at the same time (steps of a run, workers of a test run) overwrite each
other's files and fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pgcdc_assets.local import locked


@contextmanager
def looking_up_alone() -> Iterator[None]:
    """Wait for this user's lock, and hold the lock for the block.

    Continue without a lock if the lock file cannot be created, such as in a read-only home folder.
    """
    with ExitStack() as held:
        with suppress(OSError, RuntimeError):
            held.enter_context(locked(_lock_file()))
        yield


def _lock_file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pgcdc" / "spark-jars.lock"
