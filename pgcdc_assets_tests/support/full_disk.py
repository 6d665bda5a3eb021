"""A full disk: a limit of a process on the sizes of its files simulates one."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(byte_count: int = 0, pid: int | None = None) -> Iterator[None]:
    """Let a process write no file beyond some bytes in the block.

    Args:
        byte_count: the largest size of a file.
        pid: the process; this process by default.
    """
    limited = os.getpid() if pid is None else pid
    soft, hard = resource.prlimit(limited, resource.RLIMIT_FSIZE)
    resource.prlimit(limited, resource.RLIMIT_FSIZE, (byte_count, hard))
    try:
        yield
    finally:
        resource.prlimit(limited, resource.RLIMIT_FSIZE, (soft, hard))
