"""Files, file locks and free TCP ports of the local machine."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, is_awaited: bool = True) -> Iterator[None]:
    """Hold the exclusive lock (flock) of a file for the block.

    The kernel releases the lock when the process ends.

    Args:
        path: the lock file, which is created with its folder and not removed.
        is_awaited: wait until the lock is free.

    Raises:
        BlockingIOError: `is_awaited` is false, and another process holds the lock.
        OSError: the file cannot be created, or its file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX if is_awaited else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, which becomes the file after the block.

    Readers see the whole file or none. An error of the block, such as of a full disk, leaves no
    draft.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def is_locked(path: Path) -> bool:
    """Return whether a process holds the exclusive lock of a file; true for a missing file.

    Raises:
        OSError: the file cannot be read, or its file system has no locks.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return True
    return False


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free at the time of the call."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
