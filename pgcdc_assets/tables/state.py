"""The paths, states and watermarks of SCD tables, read by delta-rs without a JVM.

A table's watermark is committed together with the rows, and then recorded as the version of
the application transaction `pgcdc:{name}:{epoch}` in the table's own log (`fence.py`). Each epoch
has its own watermark, because LSNs of different epochs do not compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError

from pgcdc_assets.error_text import first_sentence
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.delta.log_table import open_delta_table
from pgcdc_assets.raw.delta.newest_versions import NewestVersions
from pgcdc_assets.raw.delta.refused_commits import is_unsupported
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.store_errors import explain_store_error
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import folder_name
from pgcdc_assets.tables.checkpoints import WITHOUT_UPKEEP, keep_checkpoints
from pgcdc_assets.tables.columns import IS_CURRENT
from pgcdc_assets.tables.deleted_rows import deleted_rows
from pgcdc_assets.tables.fence import (
    Step,
    check_not_restored,
    fence_app_id,
    fence_transactions,
    find_step,
    has_step_at,
    is_watermark_recorded,
    read_fence,
    read_watermarks,
    watermark_transactions,
)
from pgcdc_assets.tables.properties import KEY
from pgcdc_assets.tables.read_errors import explain_read_errors
from pgcdc_assets.tables.row_counts import rescued_rows, written_rows

_ATTEMPTS = 5
# The values of the column that a history is partitioned by.
_IS_CURRENT = f"partition.{IS_CURRENT}"


def table_path(
    lake: Lake, name: str, schema: str, table: str, scd: int, root: str | None = None
) -> str:
    """Return the address of an SCD table.

    Args:
        root: the address of a folder in place of the capture's folder.
    """
    place = f"scd{scd}", folder_name(schema), folder_name(table)
    return lake.path(name, *place) if root is None else "/".join((root.rstrip("/"), *place))


def read_watermark(lake: Lake, name: str, schema: str, table: str, scd: int) -> Position | None:
    """Read the watermark of a table; None before the first merge."""
    path = table_path(lake, name, schema, table, scd)

    def read() -> tuple[int, Position | None] | None:
        found = open_table(lake, path)
        if found is None:
            return None
        return found.version(), read_position(RawZone(lake, name), found, path)

    with explain_read_errors(path):
        return _POSITIONS.get(lake, path, name, read)


@dataclass(frozen=True)
class ScdState:
    """An SCD table as its log describes it.

    Attributes:
        version: of the table.
        watermark: None for a table without a merge.
        fence: the number of this state, see `fence.py`.
        is_watermark_recorded: the watermark is recorded as the application transaction of its
            epoch.
        columns: names in order.
        schema: in JSON, the form of Delta's log.
        description: empty without a description.
        row_count: None if a file has no statistics.
        has_deletion_vectors: some rows of the files are marked as deleted.
        files: the add actions from delta-rs, flattened.
        table: the table, at this version until `own_commits.py` has followed a commit.
    """

    path: str
    version: int
    watermark: Position | None
    fence: int
    is_watermark_recorded: bool
    properties: Mapping[str, str]
    columns: tuple[str, ...]
    schema: str = field(repr=False)
    description: str = field(repr=False)
    row_count: int | None
    has_deletion_vectors: bool
    files: pa.Table = field(compare=False, repr=False)
    table: DeltaTable = field(compare=False, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether the files have no rows, deleted rows included."""
        return written_rows(self.files) == 0

    @property
    def is_keyless(self) -> bool:
        """Whether the table was merged without a key, so rows cannot be replaced by key."""
        return self.properties.get(KEY) == ""

    @property
    def current_files(self) -> pa.Table:
        """The files whose rows a merge may change: of a history, those of the current versions."""
        if _IS_CURRENT not in self.files.column_names:
            return self.files
        return self.files.filter(pc.field(_IS_CURRENT))

    @property
    def size_bytes(self) -> int:
        """The total size of the files whose rows a merge may change."""
        return int(pc.sum(self.current_files.column("size_bytes")).as_py() or 0)

    @property
    def rescued(self) -> dict[str, int | None]:
        """The number of rows with rescued values by file; None without statistics."""
        return rescued_rows(self.files)


def read_scd_state(lake: Lake, name: str, path: str) -> ScdState | None:
    """Read a table's state; None if there is no table.

    Raises:
        TableDamaged: files of the log are missing or truncated.
    """

    def read() -> tuple[int | None, ScdState] | None:
        table = open_table(lake, path)
        if table is None:
            return None
        state = _read_state(lake, name, path, table)
        return table.version() if state.files.num_rows <= _MOST_FILES else None, state

    with explain_read_errors(path):
        return STATES.get(lake, path, name, read)


def _read_state(lake: Lake, name: str, path: str, table: DeltaTable) -> ScdState:
    files = pa.table(table.get_add_actions(flatten=True))
    written = written_rows(files)
    deleted = deleted_rows(lake, path, table, files)
    metadata = table.metadata()
    return ScdState(
        path=path,
        version=table.version(),
        watermark=read_position(RawZone(lake, name), table, path),
        fence=read_fence(lake, table, path, name),
        is_watermark_recorded=is_watermark_recorded(table, name),
        properties=metadata.configuration,
        columns=tuple(field.name for field in table.schema().fields),
        schema=table.schema().to_json(),
        description=metadata.description or "",
        row_count=None if written is None else written - sum(deleted.values()),
        has_deletion_vectors=bool(deleted),
        files=files,
        table=table,
    )


_POSITIONS = NewestVersions[Position | None](20_000)
STATES = NewestVersions[ScdState](2_000)
# Of a state that is kept in memory.
_MOST_FILES = 1_000


def next_step(zone: RawZone, state: ScdState | None, epoch: int, watermark: Lsn) -> Step:
    """Return the step of a write that was computed from a table's state.

    Args:
        state: None if the write creates the table.
    """
    position = Position(epoch, watermark)
    if state is None:
        return Step(fence_app_id(zone.name), 1, position)
    return Step(fence_app_id(zone.name), state.fence + 1, position, follows=state.version)


def check_not_overtaken(zone: RawZone, path: str, state: ScdState) -> None:
    """Check that no other write has changed a table since its state was read.

    The fence prevents a late write in any case. This check saves the work, and detects merges of
    earlier releases, which have no fence.

    Raises:
        TransientError: another merge has committed.
    """
    newest = read_scd_state(zone.lake, zone.name, path)
    if newest is None or (newest.fence, newest.watermark) != (state.fence, state.watermark):
        raise overtaken_error(path)


def finish_step(zone: RawZone, path: str, step: Step) -> ScdState:
    """Check that a write was committed, record its watermark, and read the new state.

    Delta skips a write without an error if the table has its application transaction. The table is
    opened once, because opening it lists its log.

    Raises:
        TransientError: the write was skipped, because another merge has committed.
    """
    table = _record_watermark(zone, path, check_written(zone, path, step))
    with explain_read_errors(path):
        state = _read_state(zone.lake, zone.name, path, table)
    if state.files.num_rows <= _MOST_FILES:
        STATES.put(zone.lake, path, zone.name, state.version, state)
    return state


def check_written(zone: RawZone, path: str, step: Step) -> DeltaTable:
    """Check that a write was committed, and return the table.

    Raises:
        TransientError: the write was skipped, because another merge has committed.
    """
    table = _find_written(zone, path, step)
    if table is None:
        raise overtaken_error(path)
    return table


def is_written(zone: RawZone, path: str, step: Step) -> bool:
    """Return whether the log of a table has the commit of a step.

    Raises:
        TableDamaged: its log cannot be read.
    """
    return _find_written(zone, path, step) is not None


def _find_written(zone: RawZone, path: str, step: Step) -> DeltaTable | None:
    """Open a table; None if its log does not have the commit of a step."""
    table = open_table(zone.lake, path)
    if table is None or find_step(zone.lake, table, path, step) is None:
        return None
    return table


def has_applied(zone: RawZone, path: str, position: Position) -> bool:
    """Return whether a write of a table has left it at exactly this position.

    Each partial snapshot is such a write, and so is each complete one that has rows, or a rebuild
    names it. A table that was merged past its LSN, by a merge that was planned before it was
    landed, has no such write.
    """
    table = open_table(zone.lake, path)
    if table is None:
        return False
    with explain_read_errors(path):
        return has_step_at(zone.lake, table, path, fence_app_id(zone.name), position)


def record_watermark(zone: RawZone, path: str) -> None:
    """Record the watermark of a table's newest write as the application transaction of its epoch.

    A failure loses nothing: the commit of the write has the watermark, and the next merge tries
    again. delta-rs cannot write tables with clustering or row tracking, so their watermarks are
    never recorded so (`spark_watermarks.py`).
    """
    table = open_table(zone.lake, path)
    if table is not None:
        _record_watermark(zone, path, table)


def _record_watermark(zone: RawZone, path: str, table: DeltaTable) -> DeltaTable:
    """Record the watermark of a table, and return the table as it is then."""
    for _ in range(_ATTEMPTS):
        if is_watermark_recorded(table, zone.name):
            break
        position = read_position(zone, table, path)
        if position is None:
            break
        fence = read_fence(zone.lake, table, path, zone.name)
        try:
            if table.transaction_version(fence_app_id(zone.name)) is None:
                # The fence has expired. The commit is a new state, so that a write finds its own.
                _commit_state(zone, table, position, fence + 1)
            else:
                _commit(table, watermark_transactions(zone, *position, fence))
        except CommitFailedError as error:
            if is_unsupported(error):
                break
            table = open_table(zone.lake, path) or table
            continue
        except (DeltaError, OSError):
            break
        keep_checkpoints(zone.lake, path, table, commits=2)
        with explain_read_errors(path):
            table.update_incremental()
        break
    return table


def advance_watermark(zone: RawZone, path: str, before: Position | None, after: Position) -> bool:
    """Advance the watermark of a table without changes, by one commit without rows.

    Args:
        before: the position from which there were no changes. A table at another position, such
            as after another merge or a rebuild, is left unchanged.

    Returns:
        False if delta-rs cannot write the table, so Spark has to commit.

    Raises:
        TransientError: the log cannot be written.
    """
    table = open_table(zone.lake, path)
    if table is None or read_position(zone, table, path) != before:
        return True
    fence = read_fence(zone.lake, table, path, zone.name)
    try:
        _commit_state(zone, table, after, fence + 1)
        keep_checkpoints(zone.lake, path, table)
    except CommitFailedError as error:
        # Otherwise another writer has committed. The next merge can record the watermark.
        return not is_unsupported(error)
    except (DeltaError, OSError) as error:
        raise explain_store_error(path, error) or TransientError(
            reason=f"The Delta table {path} cannot be written: {first_sentence(error)} Check that "
            "the lake has space and is writable, then run it again."
        ) from error
    return True


def _commit_state(zone: RawZone, table: DeltaTable, position: Position, fence: int) -> None:
    """Commit a new state without changes of rows, see `_commit`."""
    step = Step(fence_app_id(zone.name), fence, position, has_changes=False)
    _commit(table, fence_transactions(zone, *position, fence), step)


def _commit(table: DeltaTable, transactions: list[Transaction], step: Step | None = None) -> None:
    """Commit application transactions as the version after the loaded version, or fail.

    Args:
        step: of a commit that is a new state.
    """
    table.create_write_transaction(
        [],
        "append",
        table.schema(),
        commit_properties=CommitProperties(
            custom_metadata=None if step is None else {"userMetadata": step.metadata},
            app_transactions=transactions,
            max_commit_retries=0,
        ),
        post_commithook_properties=WITHOUT_UPKEEP,
    )


def overtaken_error(path: str) -> TransientError:
    """Return the error of a merge that another merge of the table has overtaken."""
    return TransientError(
        reason=f"Another process merged the Delta table {path} at the same time, and this merge "
        "wrote nothing to it. Run the merge again: it continues from there."
    )


def open_table(lake: Lake, path: str) -> DeltaTable | None:
    """Open an SCD table; None if there is no table.

    Raises:
        TableDamaged: its log cannot be read.
    """
    with explain_read_errors(path):
        return open_delta_table(lake, path)


def read_position(zone: RawZone, table: DeltaTable, path: str) -> Position | None:
    """Read the newest epoch and its watermark in a version of a table.

    Raises:
        TableDamaged: the log has lost the watermark, or the rows are older.
    """
    written = check_not_restored(zone.lake, table, path, zone.name)
    newest = zone.epochs.latest()
    epochs = range(1, (newest.epoch if newest else 1) + 1)
    if written is not None and written.epoch not in epochs:
        # The raw zone was restored from a time before the epoch.
        return written
    watermarks = read_watermarks(zone, table, path, epochs)
    return max((Position(*mark) for mark in watermarks.items()), default=None)
