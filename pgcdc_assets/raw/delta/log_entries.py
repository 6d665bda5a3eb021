"""Read the logs of Delta tables by pyarrow."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow.fs as pafs

FOLDER = "_delta_log"
# The names of the files of a damaged log, beside the log, begin so.
SET_ASIDE = f"{FOLDER}_damaged_"
# Names the newest checkpoint.
LAST_CHECKPOINT = f"{FOLDER}/_last_checkpoint"


def is_own_path(path: str) -> bool:
    """Return whether a path of the log is literally a path in the table's folder.

    A shallow clone references files of another table, and the log encodes unusual characters.
    """
    return not re.search(r"[:%]|^/|(^|/)\.\.?(/|$)", path)


def hinted_checkpoint(files: pafs.FileSystem) -> int | None:
    """Return the version of the checkpoint that `_last_checkpoint` names; None if it names none.

    Raises:
        FileNotFoundError, ValueError: the hint is lost or malformed.
        OSError: the hint cannot be read.
    """
    with files.open_input_stream(LAST_CHECKPOINT) as stream:
        hint = json.loads(stream.read())
    version = hint.get("version") if isinstance(hint, dict) else None
    return version if isinstance(version, int) else None


def commit_path(version: int) -> str:
    """Return the path of a commit, relative to the table."""
    return f"{FOLDER}/{version:020d}.json"


def checkpoint_path(version: int) -> str:
    """Return the path of the checkpoint that delta-rs writes, relative to the table."""
    return f"{FOLDER}/{version:020d}.checkpoint.parquet"


def read_commit_lines(files: pafs.FileSystem, version: int) -> list[bytes]:
    """Read the actions of a commit, one JSON text each.

    Args:
        files: the file system whose root is the table's folder.

    Raises:
        FileNotFoundError: the log no longer has the commit.
        OSError: the commit cannot be read.
    """
    with files.open_input_stream(commit_path(version)) as commit:
        return [line for line in commit.read().splitlines() if line.strip()]


def read_commit(files: pafs.FileSystem, version: int) -> list[dict[str, Any]]:
    """Read the actions of a commit.

    Not by `DeltaTable.history`: that reads the newest log, whatever version is loaded, numbers the
    entries as if the loaded version were the newest, and refuses the statistics of a CLONE.

    Raises:
        FileNotFoundError: the log no longer has the commit.
        OSError, ValueError: the commit cannot be read.
    """
    return [json.loads(line) for line in read_commit_lines(files, version)]


def oldest_commit(files: pafs.FileSystem, version: int) -> int | None:
    """Return the version from which on a log has all commits through a version.

    Returns:
        None if the log does not have the commit of the version.
    """
    names = [info.base_name for info in files.get_file_info(pafs.FileSelector(FOLDER))]
    found = {int(name[:20]) for name in names if re.fullmatch(r"[0-9]{20}\.json", name)}
    if version not in found:
        return None
    while version - 1 in found:
        version -= 1
    return version
