"""What was read from the newest versions of Delta tables, kept in the process until they change.

Opening a table costs milliseconds, also if nothing has changed: a publication of 500 tables is read
several times a minute. In an object store it costs a LIST, and two GETs for each entry after the
last checkpoint. To see whether the log has changed costs three calls of `stat`, or two HEADs in an
S3 store. In other object stores a table is read each time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import pyarrow.fs as pafs

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import FOLDER, commit_path
from pgcdc_assets.raw.lake import Lake

T = TypeVar("T")

# A new table has the first commit. A copied table may not have it, and is noticed after this time.
_ABSENT_SECONDS = 60.0


@dataclass(frozen=True)
class _Mark:
    """A log as it was read.

    Every new, deleted or renamed file changes the time of a local folder. Two changes within some
    milliseconds may have one time. So the newest commit is compared too, and a next commit is
    looked for.

    Attributes:
        commit: time and size of the newest commit, or the tag that an S3 store gives its content.
        folder_time: None in an object store.
    """

    version: int
    commit: tuple[int, int] | bytes
    folder_time: int | None


@dataclass
class NewestVersions(Generic[T]):
    """Values that were read from the newest version of a table.

    Threads may share it: a value is replaced as a whole.

    Attributes:
        most: number of values. At this number all are forgotten.
    """

    most: int
    _known: dict[tuple[str, str], tuple[_Mark, T]] = field(default_factory=dict)
    _absent_at: dict[tuple[str, str], float] = field(default_factory=dict)

    def get(
        self, lake: Lake, path: str, name: str, read: Callable[[], tuple[int | None, T] | None]
    ) -> T | None:
        """Return the value of a table, read again if its log has changed; None without a table.

        Args:
            path: address of the table.
            name: name of the capture that reads.
            read: returns version and value; None without a table. A value without a version is
                not kept.
        """
        if not (lake.is_local or lake.is_s3):
            found = read()
            return None if found is None else found[1]
        key = (path, name)
        known = self._known.get(key)
        if known is not None and known[0] == _read_mark(lake, path, known[0].version):
            return known[1]
        if self._is_absent(lake, path, key):
            return None
        self._known.pop(key, None)
        before = _folder_time(lake, path)
        found = read()
        if found is None:
            self._absent_at[key] = time.monotonic()
            return None
        version, value = found
        mark = None if version is None else _read_mark(lake, path, version)
        if mark is not None and mark.folder_time == before:
            self._keep(key, mark, value)
        return value

    def put(self, lake: Lake, path: str, name: str, version: int, value: T) -> None:
        """Keep a value that follows from a commit of this process, if its version is the newest."""
        if lake.is_local or lake.is_s3:
            mark = _read_mark(lake, path, version)
            if mark is not None:
                self._keep((path, name), mark, value)

    def _keep(self, key: tuple[str, str], mark: _Mark, value: T) -> None:
        if len(self._known) >= self.most:
            self._known.clear()
        self._known[key] = mark, value

    def _is_absent(self, lake: Lake, path: str, key: tuple[str, str]) -> bool:
        """Return whether a table of an S3 store does not exist, as a moment ago."""
        absent_at = self._absent_at.pop(key, None)
        if lake.is_local or absent_at is None or time.monotonic() > absent_at + _ABSENT_SECONDS:
            return False
        if _has_commit(filesystem(lake, path), 0) is not False:
            return False
        self._absent_at[key] = absent_at
        return True


def _folder_time(lake: Lake, path: str) -> int | None:
    if not lake.is_local:
        return None
    try:
        return os.stat(os.path.join(path, FOLDER)).st_mtime_ns
    except OSError:
        return None


def _read_mark(lake: Lake, path: str, version: int) -> _Mark | None:
    """Return the mark of a log; None if the version is not the newest, or its commit is gone."""
    if not lake.is_local:
        return _read_store_mark(filesystem(lake, path), version)
    folder_time = _folder_time(lake, path)
    if folder_time is None or os.path.exists(os.path.join(path, commit_path(version + 1))):
        return None
    try:
        commit = os.stat(os.path.join(path, commit_path(version)))
    except OSError:
        return None
    return _Mark(version, (commit.st_mtime_ns, commit.st_size), folder_time)


def _read_store_mark(files: pafs.FileSystem, version: int) -> _Mark | None:
    if _has_commit(files, version + 1) is not False:
        return None
    try:
        with files.open_input_file(commit_path(version)) as commit:
            return _Mark(version, commit.metadata()["ETag"], None)
    except (OSError, KeyError, TypeError):
        return None


def _has_commit(files: pafs.FileSystem, version: int) -> bool | None:
    """Return whether a log has a commit; None if the store does not answer."""
    try:
        # One HEAD. For `get_file_info` Arrow lists the objects below the name too.
        files.open_input_file(commit_path(version)).close()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return True
