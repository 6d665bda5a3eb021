"""Logs of tables in an S3 store that a process follows commit by commit.

delta-rs opens a table by two GETs for each log entry after the last checkpoint, and reads an
application transaction by another GET for each. A process that knew an earlier version needs the
commits since then only. The ETag of the last known commit shows whether they follow it: another
log, such as one from a backup, has other commits.

A local log is read as a whole, which takes milliseconds. So is a log in another object store, whose
ETags are unknown here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import commit_path
from pgcdc_assets.raw.lake import Lake

# With more commits since the known version, delta-rs reads fewer entries after a checkpoint.
_MOST_COMMITS = 50
_MOST_TABLES = 4_000


@dataclass(frozen=True)
class _Transactions:
    """The versions of application transactions as of a version of a table.

    Attributes:
        tag: ETag of the version's commit.
        values: version by application id, of those that were asked for or committed since; None for
            an application without a transaction. Callers add to it.
    """

    version: int
    tag: bytes
    values: dict[str, int | None]


_TRANSACTIONS: dict[str, _Transactions] = {}
# A table object keeps the options of its lake: time limits, credentials.
_TableKey = tuple[str, str, tuple[tuple[str, str], ...]]
_TABLES: dict[_TableKey, tuple[DeltaTable, bytes]] = {}


def transactions_at(lake: Lake, uri: str, version: int) -> dict[str, int | None]:
    """Return the known transactions of a table's version, to which the caller adds others.

    Args:
        version: a version whose commit is in the log.
    """
    if not lake.is_s3:
        return {}
    files, known = filesystem(lake, uri), _TRANSACTIONS.get(uri)
    try:
        found = None if known is None else _advanced(files, known, version)
        if found is None:
            found = _Transactions(version, _tag(files, version), {})
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    if len(_TRANSACTIONS) >= _MOST_TABLES:
        _TRANSACTIONS.clear()
    _TRANSACTIONS[uri] = found
    return found.values


def take_table(lake: Lake, uri: str, name: str) -> DeltaTable | None:
    """Return the newest version of a table that this process committed to; None if it is unknown.

    The object belongs to the caller, until `give_back`.

    Args:
        name: name of the capture that owns the table.
    """
    table, tag = _TABLES.pop(_key(lake, uri, name), (None, b""))
    if table is None:
        return None
    try:
        if _tag(filesystem(lake, uri), table.version()) != tag:
            return None
        table.update_incremental()
    except (DeltaError, OSError, LookupError, TypeError):
        return None
    return table


def give_back(lake: Lake, uri: str, name: str, table: DeltaTable) -> None:
    """Keep a table object that the caller no longer uses, for `take_table`."""
    if not lake.is_s3:
        return
    known, version = _TRANSACTIONS.get(uri), table.version()
    try:
        if known is not None and known.version == version:
            tag = known.tag
        else:
            tag = _tag(filesystem(lake, uri), version)
    except (OSError, LookupError, TypeError):
        return
    if len(_TABLES) >= _MOST_TABLES:
        _TABLES.clear()
    _TABLES[_key(lake, uri, name)] = table, tag


def _key(lake: Lake, uri: str, name: str) -> _TableKey:
    return uri, name, tuple(sorted((lake.delta_options or {}).items()))


def _advanced(files: pafs.FileSystem, known: _Transactions, version: int) -> _Transactions | None:
    """Return the transactions of a later version; None if it does not follow on the known one."""
    if not known.version <= version <= known.version + _MOST_COMMITS:
        return None
    if _tag(files, known.version) != known.tag:
        return None
    if version == known.version:
        return known
    tag, values = known.tag, dict(known.values)
    for number in range(known.version + 1, version + 1):
        with files.open_input_stream(commit_path(number)) as commit:
            tag = commit.metadata()["ETag"]
            lines = commit.read().splitlines()
        for transaction in (json.loads(line)["txn"] for line in lines if b'"txn"' in line[:8]):
            values[transaction["appId"]] = int(transaction["version"])
    return _Transactions(version, tag, values)


def _tag(files: pafs.FileSystem, version: int) -> bytes:
    """Return the ETag of a commit.

    Raises:
        OSError: the log does not have the commit, or cannot be read.
        LookupError, TypeError: the store gives no ETag.
    """
    with files.open_input_file(commit_path(version)) as commit:
        tag: bytes = commit.metadata()["ETag"]
    return tag
