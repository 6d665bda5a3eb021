"""Locks between processes of this machine, by files."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, is_awaited: bool = True) -> Iterator[None]:
    """Hold the lock of a file for the block; the kernel lets go of it when the process ends.

    Args:
        path: made, with its folder, where it is not there, and left behind.
        is_awaited: wait until nobody else holds it.

    Raises:
        BlockingIOError: another holder has it, and it is not awaited.
        OSError: the file cannot be made, or its file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX if is_awaited else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
