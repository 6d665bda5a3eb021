"""One process of a user at a time looks up Spark's jars.

Spark fetches the jars of `spark.jars.packages` with Ivy, whose cache has no lock: where it is
empty, processes that start side by side (the steps of a run, the workers of a test run) write into
each other's files, and all of them fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pgcdc_assets.local import locked


@contextmanager
def looking_up_alone() -> Iterator[None]:
    """Hold this user's lock for the block, and wait until nobody else does.

    Where there can be no lock, as in a home that cannot be written, nobody waits.
    """
    with ExitStack() as held:
        with suppress(OSError, RuntimeError):
            held.enter_context(locked(_lock_file()))
        yield


def _lock_file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pgcdc" / "spark-jars.lock"
