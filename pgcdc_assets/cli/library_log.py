"""Redirection of the output of libraries to a log file; the terminal shows only our own lines.

Spark's JVM, gRPC and py4j write to the process's file descriptors 1 and 2, which no logging
configuration can redirect. So the descriptors are replaced by the file, and our own lines are
written to copies of the original descriptors.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

FILES_KEPT = 20
FILE_BYTES = 16 * 1024 * 1024
_SECONDS_BETWEEN_CHECKS = 5.0

# Another program may write its logs into the same folder.
_NAME = re.compile(r"\d{8}T\d{6}-[a-z_]+-\d+\.log")

_terminal: TextIO | None = None


def terminal() -> TextIO:
    """Return the stream for our own lines that are not the result.

    A process may have no standard error, as by a shell's `2>&-`. Its lines go nowhere.
    """
    global _terminal
    if _terminal is None and sys.stderr is None:
        _terminal = open(os.devnull, "w")
    return sys.stderr if _terminal is None else _terminal


class _LogFile(io.FileIO):
    """A file that drops what a full disk does not take.

    A library's print must not fail, nor Python at its exit, which would change the exit status.
    """

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


@dataclass
class LibraryLog:
    """The log file of one process, opened by `open_library_log`.

    Attributes:
        path: the file, readable by this user only, because a library may quote values.
    """

    path: Path
    _fd: int
    _made: tuple[Path, ...] = ()
    _kept: dict[int, int] = field(default_factory=dict)
    _streams: tuple[TextIO, TextIO] = field(default_factory=lambda: (sys.stdout, sys.stderr))
    _opened: list[TextIO] = field(default_factory=list)
    _closed: threading.Event = field(default_factory=threading.Event)

    def has_content(self) -> bool:
        """Whether the file has content."""
        _flush()
        return os.fstat(self._fd).st_size > 0

    def settle(self) -> None:
        """Delete the file if it is empty, else limit its size."""
        if self.has_content():
            # The file may be deleted by now, such as by a cleaner of temporary files.
            with suppress(OSError):
                trim(self.path, FILE_BYTES)
            return
        self.path.unlink(missing_ok=True)
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()

    def close(self) -> None:
        """Restore the process's descriptors."""
        global _terminal
        self.settle()
        self._closed.set()
        for number, kept in self._kept.items():
            os.dup2(kept, number)
            os.close(kept)
        sys.stdout, sys.stderr = self._streams
        _terminal = None
        for stream in self._opened:
            # A flush fails on a closed pipe.
            with suppress(OSError):
                stream.close()
        os.close(self._fd)

    def _redirect(self) -> None:
        global _terminal
        out, err = self._streams
        _flush()
        for number in (1, 2):
            # A descriptor may be closed, as by a shell's `2>&-`.
            with suppress(OSError):
                self._kept[number] = os.dup(number)
        sys.stdout = _copy(out, 1, self._kept)
        _terminal = _copy(err, 2, self._kept)
        for number in self._kept:
            os.dup2(self._fd, number)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_LogFile(os.dup(self._fd), "w")),
            errors="backslashreplace",
            line_buffering=True,
        )
        self._opened += {sys.stdout, sys.stderr, _terminal} - {out, err}
        threading.Thread(target=self._watch, name="library log", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed.wait(_SECONDS_BETWEEN_CHECKS):
            with suppress(OSError):
                trim(self.path, FILE_BYTES)


def open_library_log(folder: Path, command: str) -> LibraryLog:
    """Send the output of libraries and child processes to a new file in a folder.

    Old files of the folder are deleted, except those of processes that run.

    Raises:
        OSError: the folder is not writable.
    """
    # A folder that was there before the command belongs to another program, such as TMPDIR.
    made = tuple(each for each in (folder, folder.parent) if not each.exists())
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{command}-{os.getpid()}.log"
    path = folder / name
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    ours = sorted(each for each in folder.glob("*.log") if _NAME.fullmatch(each.name))
    for old in ours[:-FILES_KEPT]:
        if not _is_in_use(old):
            old.unlink(missing_ok=True)
    log = LibraryLog(path, fd, made)
    log._redirect()
    return log


def _is_in_use(path: Path) -> bool:
    """Return whether a process writes to a log file. The lock ends with the process."""
    try:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # The file system has no locks, or another process has deleted the file.
        return False
    return False


@contextmanager
def library_log(folder: Path, command: str) -> Iterator[LibraryLog]:
    """Send the output of libraries in the block to a file, like `open_library_log`."""
    log = open_library_log(folder, command)
    try:
        yield log
    finally:
        log.close()


def trim(path: Path, byte_count: int) -> None:
    """Cut a file that exceeds the limit to its beginning and its end.

    Each part has a quarter of the limit. Writers append, so they continue at the new end. Lines
    that are written during the cut are lost.
    """
    size = path.stat().st_size
    if size <= byte_count:
        return
    part = byte_count // 4
    with path.open("rb+") as file:
        head = file.read(part)
        file.seek(size - part)
        tail = file.read(part)
        file.seek(0)
        file.write(head + f"\n... {size - 2 * part} bytes omitted ...\n".encode() + tail)
        file.truncate()


def _copy(stream: TextIO, number: int, kept: dict[int, int]) -> TextIO:
    """Return a stream to the file of a descriptor, or the stream itself if it has another file."""
    try:
        if stream.fileno() != number:
            return stream
    except (AttributeError, OSError, ValueError):
        return stream
    return os.fdopen(
        os.dup(kept[number]),
        "w",
        buffering=1,
        encoding=stream.encoding,
        errors=stream.errors,
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, _terminal):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
