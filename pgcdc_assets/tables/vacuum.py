"""Deletion of files that merges have replaced, once they exceed the size of the table.

A merge of a small table rewrites its files, so replaced files soon exceed the current files. The
commits of the table's log name the files that they remove, so no Spark is needed to find them. A
file that no commit has named is never deleted, so a running merge loses nothing.

To list replaced files, delta-rs would query the store about each file of the last seven days. Here
`_pgcdc/replaced_files.json` in the table's folder lists the files that are not deleted yet, and
each call reads the commits since the last call. The list is a cache: if it is missing or old, files
stay until the VACUUM of the maintenance, which ignores the folder because of its underscore.
Deletion vectors are left to that VACUUM too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import DeltaTable

from pgcdc_assets import failpoints
from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.delta.files import filesystem, write_file
from pgcdc_assets.raw.delta.log_entries import FOLDER as LOG_FOLDER
from pgcdc_assets.raw.delta.log_entries import SET_ASIDE, is_own_path, read_commit
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.checksums import delete_checksum
from pgcdc_assets.tables.maintenance_turns import has_turn
from pgcdc_assets.tables.properties import FILE_RETENTION, OWN_FILE_RETENTION, interval_hours
from pgcdc_assets.tables.read_errors import explain_read_errors
from pgcdc_assets.tables.state import open_table

# Replaced files below this size are kept, however small the table is.
MINIMUM_BYTES = 8 * 1024 * 1024
# Queries of larger tables take long, so their readers need old versions for longer.
SMALL_TABLE_BYTES = 1024**3
# A longer retention leaves little to delete between two runs of the maintenance.
LONGEST_KEEP_HOURS = 24.0
# The log of a table without a list may cover months.
_MOST_COMMITS = 1000
# Number of versions between two checks for files to delete. The number is odd: whether each merge
# writes one version or two, one of three merges checks.
_EVERY = 3

_FOLDER, _FILE = "_pgcdc", "replaced_files.json"
_FORMAT = 1

_DEFAULT_RETENTION_HOURS = 168.0


@dataclass(frozen=True)
class ReplacedFile:
    """A data file that a commit removed from a table.

    Attributes:
        path: relative to the table's folder.
        removed_at: seconds since 1970.
        is_of_large_table: the table had more than `SMALL_TABLE_BYTES` before the commit, or its
            size is not known.
    """

    path: str
    size_bytes: int
    removed_at: float
    is_of_large_table: bool = False


@dataclass(frozen=True)
class VacuumReport:
    """The outcome of one call.

    Attributes:
        live_bytes: size of the files of the current version.
        replaced_bytes: size of the files that only older versions reference, before the call.
    """

    live_bytes: int = 0
    replaced_bytes: int = 0
    deleted_files: int = 0
    deleted_bytes: int = 0


@dataclass(frozen=True)
class _Ledger:
    """Replaced files that are not deleted yet, as of a version."""

    through: int
    files: dict[str, ReplacedFile] = field(default_factory=dict)


def is_check_due(path: str, version: int) -> bool:
    """Return whether `vacuum_after_merge` checks a table at a version."""
    return has_turn(path, version, _EVERY)


def vacuum_after_merge(
    lake: Lake, path: str, keep_hours: float, ratio: float, table: DeltaTable | None = None
) -> VacuumReport:
    """Delete replaced files if they exceed the table; most calls only look at the version.

    Args:
        keep_hours: versions that were replaced within so many hours stay readable.
        ratio: the files are deleted if their bytes are at least this many times the bytes of the
            table, and at least `MINIMUM_BYTES`.
        table: the newest version, if the caller has it.

    Raises:
        TableDamaged: the table's log cannot be read.
        TransientError: a file could not be deleted; the next call tries again.
    """
    table = table or open_table(lake, path)
    if table is None or not is_check_due(path, table.version()):
        return VacuumReport()
    return _delete(lake, path, table, keep_hours, ratio, MINIMUM_BYTES)


def delete_replaced_files(lake: Lake, path: str, keep_hours: float) -> VacuumReport:
    """Delete all files that were replaced earlier, however small they are.

    A table of more than `SMALL_TABLE_BYTES`, and one whose versions stay longer than
    `LONGEST_KEEP_HOURS`, is left to VACUUM.

    Raises:
        TableDamaged: the table's log cannot be read.
        TransientError: a file could not be deleted; the next call tries again.
    """
    table = open_table(lake, path)
    if table is None:
        return VacuumReport()
    return _delete(lake, path, table, keep_hours, 0.0, 0)


def _delete(
    lake: Lake, path: str, table: DeltaTable, keep_hours: float, ratio: float, minimum_bytes: int
) -> VacuumReport:
    with explain_read_errors(path):
        actions = pa.table(table.get_add_actions())
        live = dict(
            zip(
                actions.column("path").to_pylist(),
                actions.column("size_bytes").to_pylist(),
                strict=True,
            )
        )
        keep_hours = max(keep_hours, owner_hours(table.metadata().configuration))
    live_bytes = sum(live.values())
    if live_bytes > SMALL_TABLE_BYTES or keep_hours > LONGEST_KEEP_HOURS:
        return VacuumReport(live_bytes)
    store = filesystem(lake, path)
    try:
        ledger = _caught_up(store, _read_ledger(store), table.version(), live_bytes)
        # RESTORE adds removed files again, and a new deletion vector removes and adds one file at
        # once.
        files = {name: file for name, file in ledger.files.items() if name not in live}
        replaced_bytes = sum(file.size_bytes for file in files.values())
        now = time.time()
        old = [
            file
            for file in files.values()
            # After a TRUNCATE, queries of the large table still run.
            if file.removed_at
            < now - 3600 * (LONGEST_KEEP_HOURS if file.is_of_large_table else keep_hours)
        ]
        old_bytes = sum(file.size_bytes for file in old)
        if not old or old_bytes < max(minimum_bytes, ratio * live_bytes):
            _write_ledger(store, _Ledger(ledger.through, files))
            return VacuumReport(live_bytes, replaced_bytes)
        for file in old:
            with suppress(FileNotFoundError):
                store.delete_file(file.path)
            delete_checksum(lake, store, file.path)
            failpoints.reach(failpoints.AFTER_FILE_DELETED)
        for file in old:
            del files[file.path]
        _write_ledger(store, _Ledger(ledger.through, files))
    except OSError as error:
        raise TransientError(
            reason=f"Replaced files of the Delta table {path} cannot be deleted "
            f"({error.strerror or type(error).__name__}). No row is lost; a later merge tries "
            "again."
        ) from error
    return VacuumReport(live_bytes, replaced_bytes, len(old), old_bytes)


def has_unknown_files(lake: Lake, path: str, table: DeltaTable, keep_hours: float) -> bool:
    """Return whether a VACUUM might delete a file, after `delete_replaced_files`.

    It might if the folder has an old file that neither the current version nor the list of replaced
    files names: of a writer that was killed, a deletion vector, or a file of someone else.

    Raises:
        TableDamaged: the table's log cannot be read.
        OSError: the folder cannot be listed.
    """
    with explain_read_errors(path):
        actions = pa.table(table.get_add_actions())
    live_bytes = sum(actions.column("size_bytes").to_pylist())
    if live_bytes > SMALL_TABLE_BYTES or keep_hours > LONGEST_KEEP_HOURS:
        # These tables have no list.
        return True
    store = filesystem(lake, path)
    known = {*actions.column("path").to_pylist(), *_read_ledger(store).files}
    before = time.time() - keep_hours * 3600
    return any(
        info.type == pafs.FileType.File
        and info.path not in known
        and info.mtime_ns / 1e9 < before
        and not _is_no_data(info.path)
        for info in store.get_file_info(pafs.FileSelector("", recursive=True))
    )


def _is_no_data(path: str) -> bool:
    """Return whether a file belongs to the log or to this package, or is a checksum."""
    folder, _, name = path.rpartition("/")
    return (
        folder.partition("/")[0] in (LOG_FOLDER, _FOLDER)
        or path.startswith(SET_ASIDE)
        or (name.startswith(".") and name.endswith(".crc"))
    )


def owner_hours(properties: dict[str, str]) -> float:
    """Return the retention of a table's own property; 0 if the property is not set.

    A value in another form than Delta's documentation shows counts as Delta's default.
    """
    text = properties.get(FILE_RETENTION)
    if text is None or text == properties.get(OWN_FILE_RETENTION):
        return 0.0
    hours = interval_hours(text)
    return _DEFAULT_RETENTION_HOURS if hours is None else hours


def _caught_up(store: pafs.FileSystem, ledger: _Ledger, version: int, live_bytes: int) -> _Ledger:
    """Add the files that the commits since the last call have removed.

    Args:
        live_bytes: size of the files of the version.
    """
    if ledger.through > version:
        # The table was replaced by a new table at the same path.
        ledger = _Ledger(-1)
    first = max(ledger.through + 1, version + 1 - _MOST_COMMITS)
    found: dict[str, ReplacedFile] = {}
    size_after: int | None = live_bytes
    for number in range(version, first - 1, -1):
        actions = _actions_of(store, number)
        if actions is None:
            # The log has lost the commit, so the size before the commit is not known.
            size_after = None
            continue
        size_before = None if size_after is None else size_after - _growth(actions)
        is_large = size_before is None or size_before > SMALL_TABLE_BYTES
        for file in _removed_by(actions, is_large):
            found.setdefault(file.path, file)
        size_after = size_before
    return _Ledger(version, {**ledger.files, **found})


def _actions_of(store: pafs.FileSystem, version: int) -> list[dict[str, Any]] | None:
    """Read the actions of a commit; None if the log has lost the commit."""
    try:
        return read_commit(store, version)
    except (FileNotFoundError, ValueError):
        return None


def _growth(actions: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of bytes by which a commit changes the size of the table's files."""
    return sum(
        sign * int(action[kind].get("size") or 0)
        for action in actions
        for kind, sign in (("add", 1), ("remove", -1))
        if kind in action
    )


def _removed_by(actions: Sequence[Mapping[str, Any]], is_large: bool) -> list[ReplacedFile]:
    """List the data files that a commit removes."""
    now = time.time()
    return [
        ReplacedFile(
            remove["path"],
            int(remove.get("size") or 0),
            float(remove.get("deletionTimestamp") or now * 1000) / 1000,
            is_large,
        )
        for remove in (action["remove"] for action in actions if "remove" in action)
        if is_own_path(remove["path"])
    ]


def _read_ledger(store: pafs.FileSystem) -> _Ledger:
    try:
        with store.open_input_stream(f"{_FOLDER}/{_FILE}") as source:
            data: Any = json.loads(source.read())
        if data["format"] != _FORMAT:
            return _Ledger(-1)
        # Earlier releases did not write whether the table was large.
        files = [
            ReplacedFile(str(name), int(size), float(at), bool(large and large[0]))
            for name, size, at, *large in data["files"]
        ]
        return _Ledger(int(data["through"]), {f.path: f for f in files if is_own_path(f.path)})
    except FileNotFoundError:
        return _Ledger(-1)
    except (ValueError, KeyError, TypeError):
        # Truncated or edited: the commits are read again.
        return _Ledger(-1)


def _write_ledger(store: pafs.FileSystem, ledger: _Ledger) -> None:
    files = [
        [f.path, f.size_bytes, f.removed_at, f.is_of_large_table] for f in ledger.files.values()
    ]
    text = json.dumps({"format": _FORMAT, "through": ledger.through, "files": files})
    # The list is a cache, so a full disk that it does not fit on stops no deletion.
    with suppress(OSError):
        store.create_dir(_FOLDER, recursive=True)
        write_file(store, f"{_FOLDER}/{_FILE}", text.encode())
