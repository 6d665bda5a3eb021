"""One Delta table of the raw zone: opened, created with the capture's mark, and committed to.

Files are written first (`files.py`) and become visible by one commit that names them: nothing is
ever half written, and a file without a commit is an orphan that upkeep removes. delta-rs accepts an
application transaction that repeats a version, so a repeat is found in two steps: the caller asks
the table it has loaded, and `commit` commits against that very load. delta-rs then refuses when any
commit in between carries the same application id, and the loser learns it (`CommitRefused`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from pgcdc_assets.errors import ConfigurationError, RawZoneError, TransientError
from pgcdc_assets.raw.files import FileWriter, WrittenFile, filesystem, push_to_disk
from pgcdc_assets.raw.lake import Lake

MARK = "pgcdc.capture"
DELETED_FILE_RETENTION = "delta.deletedFileRetentionDuration"
RECORD = "pgcdc"

_LOG_READERS = 8

_PROPERTIES = {
    # One checkpoint per 50 commits keeps opening a table cheap while thousands of small windows
    # come in.
    "delta.checkpointInterval": "50",
    # Commit records are read by `changes.windows`; only our own upkeep, which saves them first, may
    # remove old log entries.
    "delta.enableExpiredLogCleanup": "false",
    # An append-only table of changes is not read in old versions: a day is for readers at work.
    "delta.logRetentionDuration": "interval 1 day",
    # VACUUM of any engine spares files of that age, and so those that a slow landing has not
    # committed yet. Our own maintenance deletes replaced files after a day (`vacuum.py`).
    DELETED_FILE_RETENTION: "interval 7 days",
}


class CommitRefused(Exception):
    """Another process committed under the same application id since the table was loaded."""


@dataclass(frozen=True)
class RawTable:
    """A table of one capture's raw zone.

    Attributes:
        uri: where it lies.
        schema: its columns.
        capture: name of the capture it belongs to; written into the table, and checked on each
            load.
        partition_by: its partition columns.
        statistics: the columns whose minimum and maximum the log carries, for skipping files.
    """

    lake: Lake
    uri: str
    schema: pa.Schema
    capture: str
    partition_by: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    def load(self) -> DeltaTable | None:
        """Load the newest version; None when the table does not exist yet.

        Raises:
            RawZoneError: the table belongs to another capture.
        """
        try:
            table = DeltaTable(self.uri, storage_options=dict(self.lake.storage_options) or None)
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise self._unreadable(error) from error
        owner = table.metadata().configuration.get(MARK)
        if owner != self.capture:
            raise RawZoneError(
                raw_zone=self.uri,
                reason=f"it belongs to capture {owner or '(none)'}, not to {self.capture}. Give "
                f"capture {self.capture} another lake or another name.",
            )
        return table

    def load_or_create(self) -> DeltaTable:
        """Load the newest version; the first caller creates the table.

        A table of an earlier release gets the columns that it lacks.
        """
        table = self.load()
        if table is not None:
            return self._with_new_columns(table)
        self.lake.check_writable()
        configuration = {**_PROPERTIES, MARK: self.capture}
        if self.statistics:
            configuration["delta.dataSkippingStatsColumns"] = ",".join(self.statistics)
        try:
            DeltaTable.create(
                self.uri,
                self.schema,
                mode="ignore",
                partition_by=list(self.partition_by),
                configuration=configuration,
                storage_options=dict(self.lake.storage_options) or None,
                raise_if_key_not_exists=False,
            )
        except CommitFailedError:
            # Another process created it between our look and our commit.
            pass
        except (DeltaError, OSError) as error:
            raise self._unwritable(error) from error
        table = self.load()
        if table is None:
            raise RawZoneError(raw_zone=self.uri, reason="the table vanished after it was created.")
        if self.lake.is_local:
            self._push_log_to_disk(0)
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
        except CommitFailedError:
            # Another process added them between our look and our commit.
            pass
        except (DeltaError, OSError) as error:
            raise self._unwritable(error) from error
        if self.lake.is_local:
            self._push_log_to_disk(table.version())
        loaded = self.load()
        if loaded is None:
            raise RawZoneError(raw_zone=self.uri, reason="the table vanished.")
        return loaded

    def writer(self, partition_values: Mapping[str, str] | None = None) -> FileWriter:
        """Open a writer of data files for the next commit."""
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
        """Make the files visible in one commit; return once it would survive a power cut.

        Args:
            table: the load that the caller's decision was made on.
            app_id: application id of the transaction, with `app_version`.
            excludes: a second application id, whose commits since `table` was loaded make this one
                be refused too, and the other way round.
            facts: numbers that the table carries from now on, each as an application transaction
                of its own.
            record: facts kept in the commit, readable through the table's history.
            data_change: False when rows only moved between files.

        Raises:
            CommitRefused: a commit since `table` was loaded carries the same application id, or
                removed the same files.
            TransientError: an added file is gone, or the log could not be written.
        """
        self._check_present(added)
        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(
                file.path,
                file.size_bytes,
                dict(file.partition_values),
                now,
                data_change,
                json.dumps(file.statistics),
            )
            for file in added
        ]
        transactions = [Transaction(app_id, app_version)] if app_id else []
        transactions += [Transaction(name, value) for name, value in (facts or {}).items()]
        if excludes:
            transactions.append(Transaction(excludes, table.version() + 1))
        properties = CommitProperties(
            custom_metadata={RECORD: dict(record)} if record is not None else None,
            app_transactions=transactions or None,
        )
        try:
            table.create_write_transaction(
                [*actions, *removed],
                "append",
                self.schema,
                partition_by=list(self.partition_by),
                commit_properties=properties,
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
        except CommitFailedError as error:
            raise CommitRefused(str(error)) from error
        except (DeltaError, OSError) as error:
            raise self._unwritable(error) from error
        if self.lake.is_local:
            self._push_log_to_disk(table.version() + 1)

    def set_file_retention(self, table: DeltaTable) -> None:
        """Give a table of an earlier release the retention that new tables are created with.

        Raises:
            DeltaError, OSError: the log could not be written.
        """
        wanted = _PROPERTIES[DELETED_FILE_RETENTION]
        if table.metadata().configuration.get(DELETED_FILE_RETENTION) == wanted:
            return
        table.alter.set_table_properties({DELETED_FILE_RETENTION: wanted})
        if self.lake.is_local:
            self._push_log_to_disk(table.version())

    def shorten_log(self, table: DeltaTable) -> None:
        """Write a checkpoint, and remove log entries that it stands for and that have expired.

        Raises:
            DeltaError, OSError: the log could not be written.
        """
        table.create_checkpoint()
        if self.lake.is_local:
            # Without it a power cut could leave neither the entries nor what replaces them.
            log = Path(self.uri) / "_delta_log"
            for entry in log.glob(f"{table.version():020d}.checkpoint*"):
                push_to_disk(entry)
            push_to_disk(log / "_last_checkpoint")
        table.cleanup_metadata()

    def records(self, table: DeltaTable, after_version: int) -> list[dict[str, Any]]:
        """Read the records of the commits above a version, up to the loaded one, oldest first.

        Not by `DeltaTable.history`: that reads the newest log, whatever version is loaded, and
        numbers its entries as if the loaded version were the newest.

        Raises:
            FileNotFoundError: a log entry was cleaned away.
        """
        versions = range(after_version + 1, table.version() + 1)
        files = filesystem(self.lake, self.uri)

        def read(version: int) -> list[dict[str, Any]]:
            with files.open_input_stream(f"_delta_log/{version:020d}.json") as entry:
                actions = [json.loads(line) for line in entry.read().splitlines() if line.strip()]
            infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
            return [info[RECORD] for info in infos if RECORD in info]

        with ThreadPoolExecutor(_LOG_READERS) as readers:
            return [record for records in readers.map(read, versions) for record in records]

    def _check_present(self, added: Sequence[WrittenFile]) -> None:
        """Refuse to name files that a VACUUM has deleted since they were written.

        Raises:
            TransientError: a file is not there, or has another size.
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
                reason=f"{len(gone)} of {len(sizes)} files that were written to {self.uri} are "
                "gone before their commit; nothing was committed. See that no VACUUM with a short "
                "retention runs on this table, then run it again."
            )

    def _push_log_to_disk(self, version: int) -> None:
        """Push a local table's log from a version on to the disk; delta-rs leaves that undone."""
        log = Path(self.uri) / "_delta_log"
        while (entry := log / f"{version:020d}.json").exists():
            push_to_disk(entry)
            version += 1

    def _unreadable(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            reason=f"The Delta table {self.uri} cannot be read: {first_line(error)}"
        )

    def _unwritable(self, error: Exception) -> TransientError:
        return TransientError(
            reason=f"The Delta table {self.uri} cannot be written: {first_line(error)} "
            "Nothing was committed; see that the lake has space and is writable, then run it again."
        )


def first_line(error: Exception) -> str:
    """Shorten an engine's error to what a sentence can quote."""
    return (str(error).splitlines() or [type(error).__name__])[0]
