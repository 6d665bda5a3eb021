"""One process of a user at a time looks up Spark's jars.

Spark fetches the jars of `spark.jars.packages` with Ivy, whose cache has no lock: where it is
empty, processes that start side by side (the steps of a run, the workers of a test run) write into
each other's files, and all of them fail.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

_LOCK = "spark-jars.lock"


@contextmanager
def looking_up_alone() -> Iterator[None]:
    """Hold this user's lock for the block, and wait until nobody else does.

    Where no lock file can be made, as in a home that cannot be written, there is none.
    """
    with ExitStack() as held:
        file = _lock_file()
        if file is not None:
            held.enter_context(file)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_file() -> IO[bytes] | None:
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "pgcdc"
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / _LOCK).open("ab")
    except (OSError, RuntimeError):
        return None
