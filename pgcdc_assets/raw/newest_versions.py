"""What was read from the newest versions of Delta tables, kept in the process until they change.

Opening a table costs milliseconds, also if nothing has changed: a publication of 500 tables is read
several times a minute. Whether the log of a local table has changed is three calls of `stat`. A
table in an object store is read each time, because the question costs as many requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pgcdc_assets.raw.delta_log import FOLDER, commit_path
from pgcdc_assets.raw.lake import Lake

T = TypeVar("T")


@dataclass(frozen=True)
class _Mark:
    """A log as it was read: every new, deleted or renamed file changes the time of the folder.

    Two changes within some milliseconds may have one time. So the newest commit is compared too,
    and a next commit is looked for.
    """

    version: int
    folder_time: int
    commit_time: int
    commit_size: int


@dataclass
class NewestVersions(Generic[T]):
    """Values that were read from the newest version of a table.

    Threads may share it: a value is replaced as a whole.

    Attributes:
        most: number of values. At this number all are forgotten.
    """

    most: int
    _known: dict[tuple[str, str], tuple[_Mark, T]] = field(default_factory=dict)

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
        if not lake.is_local:
            found = read()
            return None if found is None else found[1]
        key = (path, name)
        known = self._known.get(key)
        if known is not None and known[0] == _read_mark(path, known[0].version):
            return known[1]
        self._known.pop(key, None)
        before = _folder_time(path)
        found = read()
        if found is None:
            return None
        version, value = found
        mark = None if version is None else _read_mark(path, version)
        if mark is not None and mark.folder_time == before:
            if len(self._known) >= self.most:
                self._known.clear()
            self._known[key] = mark, value
        return value


def _folder_time(path: str) -> int | None:
    try:
        return os.stat(os.path.join(path, FOLDER)).st_mtime_ns
    except OSError:
        return None


def _read_mark(path: str, version: int) -> _Mark | None:
    """Return the mark of a log; None if the version is not the newest, or its commit is gone."""
    folder_time = _folder_time(path)
    if folder_time is None or os.path.exists(os.path.join(path, commit_path(version + 1))):
        return None
    try:
        commit = os.stat(os.path.join(path, commit_path(version)))
    except OSError:
        return None
    return _Mark(version, folder_time, commit.st_mtime_ns, commit.st_size)
