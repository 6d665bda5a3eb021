"""The terminal shows our own lines; the output of libraries goes to a log file.

Spark's JVM, gRPC and py4j write to the process's file descriptors, where no logging configuration
reaches them. So the descriptors themselves lead to the file, and our own lines keep copies of what
the descriptors were.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

FILES_KEPT = 20
FILE_BYTES = 16 * 1024 * 1024
_SECONDS_BETWEEN_CHECKS = 5.0

_terminal: TextIO | None = None


def terminal() -> TextIO:
    """Return the stream of our own lines besides the result."""
    return sys.stderr if _terminal is None else _terminal


@dataclass
class LibraryLog:
    """The log file of one process, opened by `open_library_log`.

    Attributes:
        path: readable for this user only, since a library may quote values.
    """

    path: Path
    _fd: int
    _kept: dict[int, int] = field(default_factory=dict)
    _streams: tuple[TextIO, TextIO] = field(default_factory=lambda: (sys.stdout, sys.stderr))
    _opened: list[TextIO] = field(default_factory=list)
    _closed: threading.Event = field(default_factory=threading.Event)

    def has_content(self) -> bool:
        """Whether a library has written something."""
        _flush()
        return os.fstat(self._fd).st_size > 0

    def settle(self) -> None:
        """Delete the file if it is empty, else bound its size."""
        if self.has_content():
            trim(self.path, FILE_BYTES)
            return
        self.path.unlink(missing_ok=True)
        for folder in (self.path.parent, self.path.parent.parent):
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
            # What is not written yet may have nowhere to go, as with a closed pipe.
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
        sys.stderr = os.fdopen(os.dup(self._fd), "w", buffering=1, errors="backslashreplace")
        self._opened += {sys.stdout, sys.stderr, _terminal} - {out, err}
        threading.Thread(target=self._watch, name="library log", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed.wait(_SECONDS_BETWEEN_CHECKS):
            with suppress(OSError):
                trim(self.path, FILE_BYTES)


def open_library_log(folder: Path, command: str) -> LibraryLog:
    """Send what libraries write, and programs that are started, to a new file in a folder.

    Only the newest files of the folder are kept.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{command}-{os.getpid()}.log"
    path = folder / name
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for old in sorted(folder.glob("*.log"))[:-FILES_KEPT]:
        old.unlink(missing_ok=True)
    log = LibraryLog(path, fd)
    log._redirect()
    return log


@contextmanager
def library_log(folder: Path, command: str) -> Iterator[LibraryLog]:
    """Send what libraries write in the block to a file, as `open_library_log` does."""
    log = open_library_log(folder, command)
    try:
        yield log
    finally:
        log.close()


def trim(path: Path, byte_count: int) -> None:
    """Keep a quarter of the bound from each end of a file that exceeds it.

    Writers append, so they continue at the new end. Lines that are written in between are lost.
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
        file.write(head + f"\n... {size - 2 * part} bytes are left out ...\n".encode() + tail)
        file.truncate()


def _copy(stream: TextIO, number: int, kept: dict[int, int]) -> TextIO:
    """Return a stream to where a descriptor led; a stream to somewhere else is returned as is."""
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
