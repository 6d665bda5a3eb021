"""`<lake>/<name>/messages`: the captured logical messages as a table of their own, without a JVM.

The table is a function of the raw zone: each message of `raw/changes` is one row, heartbeats of
this package excepted. An append reads the windows above the table's watermark, and commits their
messages and the new watermark together. Of two appends at the same time one is refused by the
commit, and then finds nothing to do. A table that is deleted, or asked for later, is filled from
the windows that the raw zone retains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets import failpoints
from pgcdc_assets.error_text import first_sentence
from pgcdc_assets.errors import (
    DefiniteError,
    RawExpired,
    RawZoneError,
    TableRestored,
    TransientError,
)
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.protocol.empty_batches import HEARTBEAT_PREFIX
from pgcdc_assets.protocol.heads import MESSAGE
from pgcdc_assets.protocol.logical_messages import NO_TRANSACTION
from pgcdc_assets.protocol.utf8 import MARK
from pgcdc_assets.raw.delta.compaction import MINIMUM_FILES, compact
from pgcdc_assets.raw.delta.log_cleanup import shorten_log
from pgcdc_assets.raw.delta.row_groups import gathered
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.delta.table import CommitRefused, RawTable
from pgcdc_assets.raw.delta.vacuum import delete_old_files
from pgcdc_assets.raw.windows.summary import MESSAGES
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.fence import check_writes_not_restored

FOLDER = "messages"

SCHEMA = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("commit_lsn", pa.int64(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("xid", pa.int64()),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("origin", pa.string()),
        pa.field("transactional", pa.bool_(), nullable=False),
        pa.field("prefix", pa.string(), nullable=False),
        pa.field("content", pa.binary(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("is_json", pa.bool_()),
    ]
)
_MEANINGS = {
    "epoch": "Incarnation of the slot.",
    "commit_lsn": "Position of the transaction's commit record; of a non-transactional message, "
    "the last byte of its record.",
    "ordinal": "Position of the row in its transaction.",
    "xid": "Transaction id; NULL for a non-transactional message.",
    "commit_ts": "Commit time; of a non-transactional message, the time at which the server sent "
    "it to the capture.",
    "origin": "Replication origin; NULL for the source's own transactions.",
    "transactional": "Whether the message belongs to the transaction that wrote it.",
    "prefix": "The message's prefix.",
    "content": "The message's bytes.",
    "text": "The content as text; NULL if the bytes are not UTF-8.",
    "is_json": "Whether the text is a JSON document; NULL for a text above 16 MB.",
}
STATISTICS = ("epoch", "commit_lsn", "prefix")

# Whether a longer text is JSON is not determined: the parser needs a multiple of its size.
LONGEST_JSON = 16 * 1024 * 1024

_READ = ("commit_lsn", "ordinal", "xid", "commit_ts", "origin", "new")
_ATTEMPTS = 5


def describe_columns() -> list[tuple[str, str, str]]:
    """Return name, type and meaning of each column."""
    return [(each.name, str(each.type), _MEANINGS[each.name]) for each in SCHEMA]


@dataclass(frozen=True)
class AppendReport:
    """The result of an append.

    Attributes:
        watermark: the position below which the table has all messages; None without a table.
        row_count: number of appended messages.
    """

    watermark: Position | None
    row_count: int = 0


@dataclass(frozen=True)
class MessageTable:
    """The table of logical messages of one capture.

    Attributes:
        zone: the raw zone.
    """

    zone: RawZone

    @cached_property
    def table(self) -> RawTable:
        """The Delta table."""
        lake, name = self.zone.lake, self.zone.name
        return RawTable(lake, lake.path(name, FOLDER), SCHEMA, name, (), STATISTICS)

    def watermark(self) -> Position | None:
        """Return the position below which the table has all messages; None without a table."""
        loaded = self.table.newest()
        return None if loaded is None else self._watermark(loaded)

    def find_waiting(self, since: Position | None, through: Position) -> Position | None:
        """Return the end of the newest window between two positions that has a message, or None.

        Args:
            since: the watermark, or a later position below which no message waits.
            through: the end of the raw zone.
        """
        for part in reversed(self._ranges(since, through)):
            for rows in self._scan(part, ("new",)):
                prefixes = pc.list_element(rows.column("new"), 0)
                if pc.any(pc.not_equal(prefixes, HEARTBEAT_PREFIX)).as_py():
                    return part.end_position
        return None

    def append(self, through: Position, *, commits_empty: bool = False) -> AppendReport:
        """Append the messages of the windows below a position.

        Args:
            through: the end of a landed window.
            commits_empty: also commit the watermark if there is no message.

        Raises:
            RawZoneError: the windows below the position are not landed yet.
            RawExpired: retention has removed windows above the watermark.
            DefiniteError: the owner has brought back older rows of the table.
            TransientError: the lake is not available, or other processes were always faster.
        """
        if self._landed_through(through.epoch) < through:
            raise RawZoneError(
                raw_zone=self.zone.uri,
                reason=f"the windows through {through.lsn} are not landed yet. Capture them first, "
                "then append their messages.",
            )
        for _ in range(_ATTEMPTS):
            loaded = self.table.load_or_create()
            mark = self._watermark(loaded)
            self._check_not_restored(loaded)
            if mark is not None and mark >= through:
                return AppendReport(mark)
            self._check_retained(mark)
            with self.table.writer() as writer:
                for rows in gathered(self._rows(self._ranges(mark, through))):
                    writer.write(rows)
                files = writer.finish()
            if not files and not commits_empty:
                return AppendReport(mark)
            failpoints.reach(failpoints.BEFORE_MESSAGES_COMMIT)
            try:
                self.table.commit(
                    loaded,
                    files,
                    app_id=self._app_id,
                    app_version=loaded.version() + 1,
                    facts={self._epoch_app_id(through.epoch): int(through.lsn)},
                )
            except CommitRefused:
                writer.discard()
                continue
            failpoints.reach(failpoints.AFTER_MESSAGES_COMMIT)
            return AppendReport(through, sum(file.row_count for file in files))
        raise TransientError(
            reason=f"Other processes wrote to {self.table.uri} at the same time, {_ATTEMPTS} "
            "times. Nothing of this attempt was committed; run it again."
        )

    def append_merged(self, merged: Position) -> AppendReport:
        """Append the messages of windows that retention may remove, and move the watermark there.

        Args:
            merged: the lowest watermark of the SCD tables. After a new snapshot, it may be above
                the landed windows.

        Raises:
            RawExpired, DefiniteError, TransientError: as for `append`.
        """
        return self.append(min(merged, self._landed_through(merged.epoch)), commits_empty=True)

    def maintain(self, minimum_files: int = MINIMUM_FILES) -> None:
        """Compact small files, and delete files and log entries that no recent version needs.

        Raises:
            TransientError: the lake could not be written. No row is lost.
            RawZoneError: a file is missing or damaged.
        """
        loaded = self.table.load()
        if loaded is None:
            return
        try:
            application = f"{self._app_id}:compaction"
            compact(self.table, loaded, application, minimum_files=minimum_files)
            loaded = self.table.load_or_create()
            shorten_log(self.table.lake, self.table.uri, loaded)
            delete_old_files(self.table, loaded)
        except (DeltaError, OSError, pa.ArrowException) as error:
            raise TransientError(
                reason=f"The maintenance of {self.table.uri} failed: {first_sentence(error)} No "
                "referenced file was removed. The next maintenance continues."
            ) from error

    @property
    def _app_id(self) -> str:
        """The application id of all appends: two appends at the same time conflict."""
        return f"pgcdc:{self.zone.name}:messages"

    def _epoch_app_id(self, epoch: int) -> str:
        """Return the application id whose transaction version is the epoch's watermark."""
        return f"pgcdc:{self.zone.name}:{epoch}:messages"

    def _watermark(self, loaded: DeltaTable) -> Position | None:
        # After a restore of the raw zone, the table may be in an epoch that the zone does not have.
        for epoch in range(len(self.zone.epochs.all()) + 1, 0, -1):
            version = loaded.transaction_version(self._epoch_app_id(epoch))
            if version is not None:
                return Position(epoch, Lsn(version))
        return None

    def _landed_through(self, number: int) -> Position:
        """Return the end of the landed windows of an epoch: at first the start of the epoch."""
        epochs = (each for each in self.zone.epochs.all() if each.epoch == number)
        return Position(number, next((self.zone.captured_on(each)[0] for each in epochs), Lsn(0)))

    def _check_not_restored(self, loaded: DeltaTable) -> None:
        """Check that no RESTORE has taken messages below the watermark from the table.

        Raises:
            DefiniteError: a RESTORE or CLONE has brought back older rows.
            TransientError: the log cannot be read.
        """
        uri = self.table.uri
        try:
            check_writes_not_restored(self.zone.lake, loaded, uri, self._app_id)
        except TableRestored as error:
            raise DefiniteError(
                reason=f"The table of logical messages {uri} lacks messages that were appended: "
                f"its version {error.version} is a RESTORE or CLONE of older rows, which does not "
                "reset the watermark. Move the table's folder away; the next run then begins a new "
                f"table with the messages of the raw zone{error.undo}"
            ) from None
        except (OSError, ValueError) as error:
            raise TransientError(
                reason=f"The log of {uri} cannot be read: {first_sentence(error)} Run it again."
            ) from error

    def _check_retained(self, mark: Position | None) -> None:
        """Raise RawExpired if windows above the watermark are missing."""
        if mark is None:
            return
        for epoch, start in self._starts(mark):
            floor = self.zone.changes.kept_from(epoch)
            if floor is not None and start < floor:
                raise RawExpired(
                    what=f"The table of logical messages {self.table.uri}, whose watermark is "
                    f"{mark.lsn} of epoch {mark.epoch},",
                    floor=floor,
                    remedy="Move the table's folder away. The next run then begins a new table at "
                    "that LSN.",
                )

    def _starts(self, since: Position | None) -> list[Position]:
        """Return the epochs from a position on, each with the LSN to start at."""
        first, lsn = since or Position(0, Lsn(0))
        epochs = [each.epoch for each in self.zone.epochs.all() if each.epoch >= first]
        return [Position(epoch, lsn if epoch == first else Lsn(0)) for epoch in epochs]

    def _ranges(self, since: Position | None, through: Position) -> list[LsnWindow]:
        """Return the ranges between two positions whose windows have logical messages."""
        found: list[LsnWindow] = []
        for epoch, start in self._starts(since):
            for summary in self.zone.changes.windows(epoch, start):
                window = summary.window
                if not summary.counts.get(MESSAGES) or window.end_position > through:
                    continue
                if found and found[-1].end_position == Position(epoch, window.start):
                    found[-1] = found[-1]._replace(end=window.end)
                else:
                    found.append(window)
        return found

    def _scan(self, part: LsnWindow, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        return scan_changes(
            self.zone.changes.table,
            epoch=part.epoch,
            start=part.start,
            end=part.end,
            columns=columns,
            condition=pc.field("relation_id").is_null() & (pc.field("op") == chr(MESSAGE)),
        )

    def _rows(self, ranges: list[LsnWindow]) -> Iterator[pa.RecordBatch]:
        for part in ranges:
            for rows in self._scan(part, _READ):
                typed = _typed(rows, part.epoch)
                yield typed.filter(pc.not_equal(typed.column("prefix"), HEARTBEAT_PREFIX))


def _typed(rows: pa.RecordBatch, epoch: int) -> pa.RecordBatch:
    """Return rows of the raw zone with the columns of the table."""
    values = rows.column("new")
    prefixes, contents = (pc.list_element(values, index) for index in (0, 1))
    xids = rows.column("xid")
    is_transactional = pc.not_equal(xids, NO_TRANSACTION)
    content, text = _read_contents(contents)
    columns = {
        **{name: rows.column(name) for name in _READ[:-1]},
        "epoch": pa.repeat(pa.scalar(epoch, pa.int32()), rows.num_rows),
        "xid": pc.if_else(is_transactional, xids, None),
        "transactional": is_transactional,
        "prefix": prefixes,
        "content": content,
        "text": text,
        "is_json": pa.array(map(_find_json, text.to_pylist()), pa.bool_()),
    }
    return pa.RecordBatch.from_arrays(
        [columns[each.name].cast(each.type) for each in SCHEMA], schema=SCHEMA
    )


def _read_contents(contents: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the bytes of contents, and their texts; bytes that are not UTF-8 have no text.

    The raw zone writes bytes that are not UTF-8, or begin with U+0000, as hex (`protocol.utf8`).
    """
    is_hex = np.asarray(pc.starts_with(contents, MARK))
    binary, text = contents.cast(pa.large_binary()), contents
    if not is_hex.any():
        return binary, text
    written = [bytes.fromhex(value[len(MARK) :]) for value in contents.filter(is_hex).to_pylist()]
    decoded = pa.array(map(_find_text, written), text.type)
    return (
        pc.replace_with_mask(binary, is_hex, pa.array(written, pa.large_binary())),
        pc.replace_with_mask(text, is_hex, decoded),
    )


def _find_text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _find_json(text: str | None) -> bool | None:
    """Return whether a text is a JSON document; None if this is unknown."""
    if text is None:
        return False
    if len(text) > LONGEST_JSON:
        return None
    try:
        # The values do not matter, and Python limits the digits of a number.
        json.loads(text, parse_int=_ignore, parse_float=_ignore, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _ignore(value: str) -> Any:
    """Accept a number."""


def _refuse(value: str) -> Any:
    """Refuse NaN and infinities, which Python's parser accepts and JSON does not have."""
    raise ValueError(value)
