"""One Delta table of the raw zone: load, creation and commit.

Data files are written first (`files.py`), and one commit makes all of them visible. A file without
a commit is an orphan, which maintenance deletes.

delta-rs accepts an application transaction that repeats a version. A repetition is therefore
detected in two steps: the caller reads the transaction's version from a loaded table, and `commit`
commits on top of the same loaded version. If another commit with the same application id came in
between, delta-rs refuses the commit (`CommitRefused`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import RemoveAction

from pgcdc_assets.error_text import first_line, first_sentence
from pgcdc_assets.errors import ConfigurationError, RawZoneError, TransientError
from pgcdc_assets.raw.delta.commit_records import RECORD, LogEntry, read_entries
from pgcdc_assets.raw.delta.commits import add_actions, commit_actions
from pgcdc_assets.raw.delta.files import FileWriter, WrittenFile, filesystem, push_to_disk
from pgcdc_assets.raw.delta.log_entries import (
    LAST_CHECKPOINT,
    checkpoint_path,
    commit_path,
    oldest_commit,
)
from pgcdc_assets.raw.delta.log_table import open_delta_table
from pgcdc_assets.raw.delta.log_tail import give_back, take_table
from pgcdc_assets.raw.delta.newest_versions import NewestVersions
from pgcdc_assets.raw.delta.refused_commits import (
    NotCommitted,
    has_mark,
    is_full_disk,
    is_unsupported,
    new_mark,
    unsupported_error,
)
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.store_errors import explain_store_error

MARK = "pgcdc.capture"
DELETED_FILE_RETENTION = "delta.deletedFileRetentionDuration"

_NOT_COMMITTED = "Nothing was committed."
# A checkpoint is written after the log entry, for example.
_MAY_BE_COMMITTED = "The next run finds out whether the commit is in the log."
_DELETED = (
    "another program deleted the table at the same time. Stop that program, and restore the table "
    "from a backup if it had rows."
)

_PROPERTIES = {
    # Opening a table reads the log entries after the last checkpoint: with thousands of small
    # windows, a checkpoint every 50 commits bounds the number of entries.
    "delta.checkpointInterval": "50",
    # `changes.windows` reads the records in log entries. Maintenance saves the records before it
    # removes log entries; no other writer may remove log entries.
    "delta.enableExpiredLogCleanup": "false",
    # Readers use the newest version of an append-only table: a day is enough for running readers.
    "delta.logRetentionDuration": "interval 1 day",
}


_TABLES = NewestVersions[DeltaTable](64)


class CommitRefused(Exception):
    """Another process committed with the same application id after the table was loaded."""


@dataclass(frozen=True)
class RawTable:
    """A table of one capture's raw zone.

    Attributes:
        lake: the lake.
        uri: path or URI of the table.
        schema: the table's columns.
        capture: name of the owning capture, which is a table property and checked on each load.
        partition_by: the partition columns.
        statistics: the columns with minimum and maximum in the log, for file skipping.
        file_retention: how long VACUUM of any engine keeps files, also those without a commit yet;
            the package deletes replaced files after a day (`vacuum.py`).
    """

    lake: Lake
    uri: str
    schema: pa.Schema
    capture: str
    partition_by: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    file_retention: str = "interval 7 days"

    def load(self) -> DeltaTable | None:
        """Return the newest version; None if the table does not exist.

        Raises:
            RawZoneError: the table belongs to another capture.
            ConfigurationError: the table cannot be read.
        """
        try:
            table = open_delta_table(self.lake, self.uri)
        except (DeltaError, OSError) as error:
            raise self._unreadable(error) from error
        if table is None:
            return None
        owner = table.metadata().configuration.get(MARK)
        if owner != self.capture:
            raise RawZoneError(
                raw_zone=self.uri,
                reason=f"the table belongs to capture {owner or '(none)'}, not to {self.capture}. "
                f"Give capture {self.capture} another lake or another name.",
            )
        return table

    def newest(self) -> DeltaTable | None:
        """Return the newest version like `load`, for readers only: callers share the object."""

        def read() -> tuple[int, DeltaTable] | None:
            table = self.load()
            return None if table is None else (table.version(), table)

        return _TABLES.get(self.lake, self.uri, self.capture, read)

    def take(self) -> DeltaTable:
        """Return the newest version like `load_or_create`, as an object of the caller alone.

        After a commit, the caller gives the object back by `give_back`: the next call then reads
        the commits since then only.
        """
        return take_table(self.lake, self.uri, self.capture) or self.load_or_create()

    def give_back(self, table: DeltaTable) -> None:
        """Give back the object of `take`."""
        give_back(self.lake, self.uri, self.capture, table)

    def load_or_create(self) -> DeltaTable:
        """Return the newest version of the table, and create the table if it does not exist.

        A table of an early release gets the missing columns.
        """
        table = self.load()
        if table is not None:
            return self._with_new_columns(table)
        self.lake.check_writable()
        configuration = _PROPERTIES | {DELETED_FILE_RETENTION: self.file_retention}
        configuration[MARK] = self.capture
        if self.statistics:
            configuration["delta.dataSkippingStatsColumns"] = ",".join(self.statistics)
        try:
            DeltaTable.create(
                self.uri,
                self.schema,
                mode="ignore",
                partition_by=list(self.partition_by),
                configuration=configuration,
                storage_options=self.lake.delta_options,
                raise_if_key_not_exists=False,
            )
        except CommitFailedError:
            # Another process created the table at the same time.
            pass
        except (DeltaError, OSError) as error:
            raise self._unwritable(error) from error
        table = self.load()
        if table is None:
            raise RawZoneError(raw_zone=self.uri, reason=_DELETED)
        if self.lake.is_local:
            self.push_log_to_disk(0)
            folder = Path(self.uri)
            while folder.is_relative_to(self.lake.uri):
                push_to_disk(folder)
                folder = folder.parent
        return table

    def _with_new_columns(self, table: DeltaTable) -> DeltaTable:
        there = {field.name for field in table.schema().fields}
        if there.issuperset(self.schema.names):
            return table
        new = [field for field in Schema.from_arrow(self.schema).fields if field.name not in there]
        try:
            table.alter.add_columns(new)
        except CommitFailedError as error:
            # Otherwise another process added the columns at the same time.
            if is_unsupported(error):
                raise unsupported_error(self.uri, error) from error
        except (DeltaError, OSError) as error:
            raise self._unwritable(error) from error
        if self.lake.is_local:
            self.push_log_to_disk(table.version())
        loaded = self.load()
        if loaded is None:
            raise RawZoneError(raw_zone=self.uri, reason=_DELETED)
        return loaded

    def writer(self, partition_values: Mapping[str, str] | None = None) -> FileWriter:
        """Return a writer of data files for the next commit."""
        return FileWriter(
            self.lake,
            self.uri,
            self.schema,
            self.partition_by,
            self.statistics,
            partition_values=partition_values,
        )

    def commit(
        self,
        table: DeltaTable,
        added: Sequence[WrittenFile],
        *,
        removed: Sequence[RemoveAction] = (),
        app_id: str | None = None,
        app_version: int = 0,
        excludes: str | None = None,
        facts: Mapping[str, int] | None = None,
        record: Mapping[str, Any] | None = None,
        data_change: bool = True,
    ) -> None:
        """Commit added and removed files. A local commit is synchronised to the disk.

        Args:
            table: the loaded version that the caller's decision is based on.
            added: files of a writer.
            removed: remove actions.
            app_id: application id of the transaction; None: no application transaction.
            app_version: version of the application transaction.
            excludes: a second application id; concurrent commits with this id conflict.
            facts: versions of further application transactions, by application id.
            record: JSON object in the commit's `commitInfo`, which `records` reads.
            data_change: false if the commit moves rows between files only.

        Raises:
            CommitRefused: another commit after `table` was loaded has the same application id, or
                removed the same files.
            ConfigurationError: another program has turned on a feature that delta-rs cannot write.
            NotCommitted: the log entry does not fit on the disk.
            TransientError: an added file is missing, or the log could not be written.
        """
        self._check_present(added)
        transactions = [Transaction(app_id, app_version)] if app_id else []
        transactions += [Transaction(name, value) for name, value in (facts or {}).items()]
        if excludes:
            transactions.append(Transaction(excludes, table.version() + 1))
        mark = new_mark()
        metadata = mark if record is None else {**mark, RECORD: dict(record)}
        try:
            commit_actions(
                table,
                add_actions(added, data_change=data_change),
                removed,
                transactions,
                schema=self.schema,
                partition_by=self.partition_by,
                metadata=metadata,
                reload=self.load,
            )
        except CommitFailedError as error:
            if is_unsupported(error):
                raise unsupported_error(self.uri, error) from error
            if not self._is_committed(table.version(), mark):
                raise CommitRefused(str(error)) from error
        except (DeltaError, OSError) as error:
            # A checkpoint is written after the log entry.
            if is_full_disk(error) and not self._is_committed(table.version(), mark):
                raise NotCommitted(reason=str(self._unwritable(error))) from error
            raise self._unwritable(error, _MAY_BE_COMMITTED) from error
        if self.lake.is_local:
            self.push_log_to_disk(table.version() + 1)

    def commit_rows(
        self,
        table: DeltaTable,
        rows: list[dict[str, Any]],
        *,
        app_id: str,
        app_version: int,
        partition_values: Mapping[str, str] | None = None,
        removed: Sequence[RemoveAction] = (),
        record: Mapping[str, Any] | None = None,
    ) -> bool:
        """Write a few rows to a new file, and commit the file. For arguments see `commit`.

        Returns:
            False if another process committed after `table` was loaded. Nothing is stored.

        Raises:
            TransientError: the lake cannot be written, or the end of the commit is uncertain.
        """
        columns = [column for column in self.schema if column.name not in self.partition_by]
        with self.writer(partition_values) as writer:
            writer.write(pa.Table.from_pylist(rows, schema=pa.schema(columns)))
            files = writer.finish()
        # Outside of the block, which removes the files after an error: a commit whose end is
        # uncertain may need the files.
        try:
            self.commit(
                table,
                files,
                removed=removed,
                app_id=app_id,
                app_version=app_version,
                record=record,
            )
        except CommitRefused:
            writer.discard()
            return False
        except NotCommitted:
            writer.discard()
            raise
        return True

    def entries(self, table: DeltaTable, first_version: int) -> list[LogEntry]:
        """Return the log entries from `first_version` through the loaded version.

        Raises:
            FileNotFoundError: a log entry was removed.
        """
        versions = range(first_version, table.version() + 1)
        return read_entries(self.lake, self.uri, str(table.metadata().id), versions)

    def remaining_entries(self, table: DeltaTable) -> list[LogEntry]:
        """Return the entries that the log has without a gap through the loaded version."""
        try:
            return self.entries(table, 1)
        except FileNotFoundError:
            oldest = oldest_commit(filesystem(self.lake, self.uri), table.version())
        return [] if oldest is None else self.entries(table, oldest)

    def _check_present(self, added: Sequence[WrittenFile]) -> None:
        """Check that no VACUUM has deleted the written files.

        Raises:
            TransientError: a file is missing, or has another size.
        """
        if not added:
            return
        sizes = {file.path: file.size_bytes for file in added}
        try:
            found = filesystem(self.lake, self.uri).get_file_info(list(sizes))
        except OSError as error:
            raise self._unwritable(error) from error
        gone = [info.path for info in found if info.size != sizes[info.path]]
        if gone:
            raise TransientError(
                reason=f"{len(gone)} of {len(sizes)} files that were written to {self.uri} were "
                "deleted before their commit. Nothing was committed. Check that no VACUUM with a "
                "short retention runs on this table, then run it again."
            )

    def _is_committed(self, after: int, mark: dict[str, Any]) -> bool:
        """Return whether a refused commit is in the log.

        Raises:
            TransientError: the log cannot be read.
        """
        try:
            return has_mark(filesystem(self.lake, self.uri), after, mark)
        except (OSError, ValueError) as error:
            raise self._unwritable(error, _MAY_BE_COMMITTED) from error

    def push_log_to_disk(self, version: int) -> None:
        """Synchronise a local table's log from `version` on, because delta-rs does not.

        delta-rs opens no table with a damaged checkpoint, also if all log entries are there.
        """
        table = Path(self.uri)
        while (entry := table / commit_path(version)).exists():
            push_to_disk(entry)
            if (table / checkpoint_path(version)).exists():
                for path in (checkpoint_path(version), LAST_CHECKPOINT):
                    if (table / path).exists():
                        push_to_disk(table / path)
            version += 1

    def _unreadable(self, error: Exception) -> ConfigurationError | TransientError:
        return explain_store_error(self.uri, error) or ConfigurationError(
            reason=f"The Delta table {self.uri} cannot be read: {first_line(error)}"
        )

    def _unwritable(
        self, error: Exception, outcome: str = _NOT_COMMITTED
    ) -> ConfigurationError | TransientError:
        return explain_store_error(self.uri, error) or TransientError(
            reason=f"The Delta table {self.uri} cannot be written: {first_sentence(error)} "
            f"{outcome} Check that the lake has space and is writable, then run it again."
        )
