"""Folders for the data of Postgres servers, in memory if the machine has enough.

Each test creates and drops a database, which is 300 files. On an ext4 file system without a
journal, as on many virtual machines, Linux passes by the inodes of all files that were deleted
within the last minutes when it creates a file. That took an eighth of the processor time of all
tests.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil

PREFIX = "pgcdc-test-"
MEMORY = Path("/dev/shm")
# A server needs some 100 MB. A container has 64 MB in this folder by default.
_LEAST_FREE_BYTES = 8 * 2**30


def new_server_folder(name: str, memory: Path = MEMORY) -> Path:
    """Create a folder for the data of servers of this process.

    A test run that is killed leaves its folders. Those in memory are deleted by the next run.

    Args:
        name: what the servers are for.
        memory: a folder whose files are in memory.
    """
    own = f"{PREFIX}{name}-{os.getpid()}-"
    if not _is_roomy(memory):
        return Path(tempfile.mkdtemp(prefix=own))
    for folder in memory.glob(f"{PREFIX}*"):
        if not psutil.pid_exists(_pid_of(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=own, dir=memory))


def _is_roomy(folder: Path) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and found.f_bavail * found.f_frsize >= _LEAST_FREE_BYTES


def _pid_of(folder: Path) -> int:
    return int(folder.name.split("-")[-2])
