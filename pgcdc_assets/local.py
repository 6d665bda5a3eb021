"""What processes of one machine share: locks by files, and TCP ports."""

from __future__ import annotations

import fcntl
import socket
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


def free_port() -> int:
    """Name a port of the loopback address that nobody listened on a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
