"""Commits that fail: of a table that delta-rs cannot write, after another commit, on a full disk.

If the answer to a conditional PUT is lost, or the answer to a hard link over NFS, delta-rs finds
its own log entry, and takes the entry for the commit of another process. So each commit of a raw
table has a unique mark.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any
from uuid import uuid4

import pyarrow.fs as pafs
from deltalake.exceptions import CommitFailedError

from pgcdc_assets.error_text import FULL_DISK, first_line
from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.raw.delta.log_entries import FOLDER, read_commit

# The key of the mark in the `commitInfo` of a commit.
_MARK = "pgcdcCommit"

# In the texts of delta-rs.
_FULL_DISK = re.compile(rf"\(os error (?:{'|'.join(map(str, sorted(FULL_DISK)))})\)")

# Table features that delta-rs writes. Spark writes all that an owner may turn on.
WRITTEN_FEATURES = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "variantType",
    }
)


class NotCommitted(TransientError):
    """A commit did not fit on the disk, so its files belong to no version of the table."""


def is_full_disk(error: Exception) -> bool:
    """Return whether an error of delta-rs is about a full disk of this machine."""
    return _FULL_DISK.search(str(error)) is not None


def new_mark() -> dict[str, Any]:
    """Return the entry of a commit's `commitInfo` that marks the commit."""
    return {_MARK: uuid4().hex}


def has_mark(files: pafs.FileSystem, after: int, mark: dict[str, Any]) -> bool:
    """Return whether a log has the commit with a mark after a version.

    Raises:
        OSError, ValueError: the log cannot be read.
    """
    try:
        for version in count(after + 1):
            for action in read_commit(files, version):
                if mark.items() <= action.get("commitInfo", {}).items():
                    return True
    except FileNotFoundError:
        return False
    raise AssertionError("a log has an end")


def is_unsupported(error: Exception) -> bool:
    """Return whether delta-rs cannot write the table, such as one with clustering, or read it."""
    return "Unsupported table features" in str(error)


def unsupported_error(uri: str, error: CommitFailedError) -> ConfigurationError:
    """Return the error of a raw table to which another program has added a feature.

    Args:
        uri: path or URI of the table.
    """
    return ConfigurationError(
        reason=f"Another program has turned on a feature of the Delta table {uri} that captures "
        f"cannot write: {first_line(error)}. Nothing was committed. Remove the feature in Spark "
        "(ALTER TABLE ... DROP FEATURE), and run it again. Spark cannot drop some features, such "
        f"as clustering: unless OPTIMIZE has followed, delete the files of {FOLDER} of the "
        "versions from the change on. No capture has written them."
    )
