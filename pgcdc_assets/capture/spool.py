"""The spool of open transactions: in memory up to a bound, beyond it in files of the local disk.

Each process has a folder of its own below a common folder. The process holds the lock (flock) of a
file in its folder until it ends, also by SIGKILL. A folder whose lock is free is a leftover: the
next process removes it. The pid and the time in the folder's name are for people. The common
folder's lock excludes that a folder is removed between its creation and its lock.

The files contain row values. The folders therefore belong to the process's user, with mode 0700,
and a folder that another user prepared is refused.

A file holds one Arrow IPC stream per write. A file is open only during a write or a read, so any
number of transactions may be open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pyarrow as pa

from pgcdc_assets.error_text import FULL_DISK
from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.local import locked

_LOCK = ".lock"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")

# The bound of the rows in memory. A batch of a stream is smaller.
MEMORY_BYTES = 96 * 1024 * 1024


def default_folder() -> Path:
    """Return the common folder of this user's spools, in the folder of temporary files."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        # No folder can be written. Most captures do not write, and a write reports it.
        folder = "/tmp"
    return Path(folder) / f"pgcdc-spool-{os.geteuid()}"


class TransactionSpool:
    """A spool of this process, a context manager. It implements `open_transaction.Spool`.

    The folder is created at the first write to disk. Leftovers of other processes are removed at
    once, because they contain row values.

    Args:
        folder: the common folder; None: `default_folder`.
        memory_bytes: bound of the rows in memory; the largest transaction is written beyond it.

    Attributes:
        written_bytes: bytes written to disk so far.
    """

    def __init__(self, folder: Path | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        self._common = folder or default_folder()
        self._memory_bytes = memory_bytes
        self._in_memory: dict[int, list[pa.RecordBatch]] = {}
        self._sizes: dict[int, int] = {}
        self._size = 0
        self._writes: dict[int, int] = {}
        self._on_disk: dict[int, int] = {}
        self._folder: Path | None = None
        self._lock = contextlib.ExitStack()
        self.written_bytes = 0
        # A write reports a folder that cannot be used: most captures do not write.
        with contextlib.suppress(OSError, ConfigurationError):
            _check_private(self._common)
            with locked(self._common / _LOCK):
                _remove_leftovers(self._common)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk now."""
        return sum(self._on_disk.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def append(self, xid: int, rows: pa.RecordBatch) -> None:
        """Append rows to a transaction, and write the largest transactions beyond the bound.

        Raises:
            TransientError: the disk is full, or cannot be written.
            ConfigurationError: another user can access the common folder.
        """
        self._in_memory.setdefault(xid, []).append(rows)
        size = rows.get_total_buffer_size()
        self._sizes[xid] = self._sizes.get(xid, 0) + size
        self._size += size
        while self._size > self._memory_bytes:
            self._write(max(self._sizes, key=self._sizes.__getitem__))

    def read(self, xid: int) -> Iterator[pa.RecordBatch]:
        """Yield a transaction's batches in the order of their appends.

        Raises:
            TransientError: a file cannot be read.
        """
        if self._writes.get(xid):
            try:
                with self._path(xid).open("rb") as file:
                    for _ in range(self._writes[xid]):
                        with pa.ipc.open_stream(file) as reader:
                            yield from reader
            except (OSError, pa.ArrowInvalid) as error:
                raise self._failure("read", error) from error
        yield from self._in_memory.get(xid, ())

    def drop(self, xid: int) -> None:
        """Remove a transaction's rows. A transaction without rows is ignored."""
        self._in_memory.pop(xid, None)
        self._size -= self._sizes.pop(xid, 0)
        self._on_disk.pop(xid, None)
        if self._writes.pop(xid, 0):
            self._path(xid).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all rows."""
        for xid in {*self._in_memory, *self._writes}:
            self.drop(xid)

    def close(self) -> None:
        """Remove all rows, and the process's folder."""
        self.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._lock.close()

    def _write(self, xid: int) -> None:
        batches = self._in_memory.pop(xid)
        self._size -= self._sizes.pop(xid)
        try:
            if self._folder is None:
                self._folder = self._create_folder()
            path = self._path(xid)
            self._writes[xid] = self._writes.get(xid, 0) + 1
            # A write to an unbuffered Python file may be shorter on a full disk, without an error.
            with (
                pa.OSFile(str(path), "ab") as file,
                pa.ipc.new_stream(file, batches[0].schema, options=_OPTIONS) as writer,
            ):
                for batch in batches:
                    writer.write_batch(batch)
            size = path.stat().st_size
        except OSError as error:
            raise self._failure("written", error) from error
        self.written_bytes += size - self._on_disk.get(xid, 0)
        self._on_disk[xid] = size

    def _path(self, xid: int) -> Path:
        assert self._folder is not None, "rows were written"
        return self._folder / f"{xid}.arrows"

    def _create_folder(self) -> Path:
        with contextlib.suppress(FileExistsError):
            self._common.mkdir(mode=0o700, parents=True)
        _check_private(self._common)
        with locked(self._common / _LOCK):
            prefix = f"{os.getpid()}-{int(time.time())}-"
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._common))
            self._lock.enter_context(locked(folder / _LOCK, is_awaited=False))
        return folder

    def _failure(self, done: str, error: Exception) -> TransientError:
        number = getattr(error, "errno", None)
        is_full = number in FULL_DISK
        remedy = "Free space on its disk" if is_full else "Check its disk"
        cause = os.strerror(number) if number else type(error).__name__
        return TransientError(
            reason=f"The spool of open transactions in {self._common} cannot be {done}: {cause}. "
            f"{remedy}, or set TMPDIR to another folder. No change is lost; "
            "run it again."
        )


def _check_private(folder: Path) -> None:
    """Raise ConfigurationError if another user can read, replace or fill the folder."""
    found, parent = folder.lstat(), folder.parent.stat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    # In a folder that other users can write, only the sticky bit prevents a replacement.
    is_fixed = bool(parent.st_mode & stat.S_ISVTX) or not parent.st_mode & 0o022
    if not is_own or found.st_mode & 0o077 or not is_fixed:
        raise ConfigurationError(
            reason=f"The spool folder {folder} must be a folder of this user with mode 0700, and "
            "other users must not be able to replace it, because the folder will contain row "
            "values. Remove it, or set TMPDIR to another folder."
        )


def _remove_leftovers(common: Path) -> None:
    """Remove the folders of processes that have ended. The caller holds the common lock."""
    for folder in common.iterdir():
        if folder.is_symlink() or not folder.is_dir():
            continue
        # Its process may remove the folder at the same time.
        with contextlib.suppress(BlockingIOError, PermissionError, FileNotFoundError):
            with (folder / _LOCK).open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
