"""The fence of an SCD table: of all writes computed from one state of the table, one commits.

A Spark write cannot name the version that it was computed from, but it can carry one application
transaction. Delta skips the write if the table has the transaction with the same or a higher
version, and refuses the write if a concurrent commit changes the transaction. So each state of the
table has a number, the fence, and a write carries the number after the fence of the state that its
rows were computed from (docs/decisions/0013-one-fence-per-table.md).

The same commit carries the watermark, in `userMetadata`. A second commit, without rows, records the
watermark as the application transaction of the epoch, which can be read without reading commits. If
the process dies between the two, readers find the watermark in the first commit. So do readers of a
table whose owner lets application transactions expire (`delta.setTransactionRetentionDuration`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from deltalake import DeltaTable, Transaction

from pgcdc_assets.errors import TableDamaged, TableRestored
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import commit_path, read_commit_lines
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.properties import KEY, TRANSACTION_RETENTION


@dataclass(frozen=True)
class Step:
    """One write of an SCD table, as its commit records it.

    Attributes:
        app_id: the application of the fence.
        number: the fence after the write.
        position: epoch and watermark after the write; None for a table that has none.
        mark: distinguishes the write from other writes with the same number.
        has_changes: the write is more than a new watermark.
        snapshots: positions of the snapshots in the contents that a rebuild has written.
        follows: the version of the table that the write was planned for; None: not recorded.
    """

    app_id: str
    number: int
    position: Position | None
    mark: str = field(default_factory=lambda: str(uuid4()))
    has_changes: bool = True
    snapshots: tuple[Position, ...] = ()
    follows: int | None = None

    @property
    def metadata(self) -> str:
        """The `userMetadata` of the commit."""
        epoch, lsn = self.position or (None, None)
        watermark = None if lsn is None else str(lsn)
        written: dict[str, Any] = {"write": self.mark, "epoch": epoch, "watermark": watermark}
        if not self.has_changes:
            written["changes"] = False
        if self.snapshots:
            written["snapshots"] = [[epoch, str(lsn)] for epoch, lsn in self.snapshots]
        if self.follows is not None:
            written["follows"] = self.follows
        return json.dumps({"pgcdc": written})

    @property
    def options(self) -> dict[str, str]:
        """The options of a writer whose commit is this step."""
        return {
            "txnAppId": self.app_id,
            "txnVersion": str(self.number),
            "userMetadata": self.metadata,
        }

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a session in which the commit of a MERGE is this step."""
        return {
            "spark.databricks.delta.write.txnAppId": self.app_id,
            "spark.databricks.delta.write.txnVersion": str(self.number),
            "spark.databricks.delta.commitInfo.userMetadata": self.metadata,
        }

    def keeping(self, position: Position | None) -> Step:
        """Return another write with the same number and this position."""
        return Step(self.app_id, self.number, position, follows=self.follows)


def fence_app_id(name: str) -> str:
    """Return the application id of the fences of a capture's tables."""
    return f"pgcdc:{name}:fence"


def read_fence(lake: Lake, table: DeltaTable, path: str, name: str) -> int:
    """Read the fence of a table; 0 for a table without a fence.

    Raises:
        TableDamaged: the fence has expired, and the log has lost the newest write.
    """
    fence = table.transaction_version(fence_app_id(name))
    if fence is None and _is_ours(table):
        found = _newest_step(lake, table, path, name)
        fence = None if found is None else found[1].number
    return fence or 0


def is_watermark_recorded(table: DeltaTable, name: str) -> bool:
    """Return whether the watermark is recorded as the application transaction of its epoch."""
    fence = table.transaction_version(fence_app_id(name))
    if fence is None and expires(table):
        return False
    return (table.transaction_version(_settled_app_id(name)) or 0) == (fence or 0)


def expires(table: DeltaTable) -> bool:
    """Return whether the owner of a table lets application transactions expire."""
    return TRANSACTION_RETENTION in table.metadata().configuration


def watermark_transactions(
    zone: RawZone, epoch: int, watermark: Lsn, fence: int
) -> list[Transaction]:
    """Return the application transactions that record the watermark of a state."""
    # Without a time, Spark takes a transaction for an expired one if the table has a limit.
    now = int(time.time() * 1000)
    return [
        Transaction(zone.app_id(epoch), int(watermark), now),
        Transaction(_settled_app_id(zone.name), fence, now),
    ]


def fence_transactions(zone: RawZone, epoch: int, watermark: Lsn, fence: int) -> list[Transaction]:
    """Return the application transactions of a commit that is a new state."""
    fence_transaction = Transaction(fence_app_id(zone.name), fence, int(time.time() * 1000))
    return [fence_transaction, *watermark_transactions(zone, epoch, watermark, fence)]


def read_watermarks(
    zone: RawZone, table: DeltaTable, path: str, epochs: Iterable[int]
) -> dict[int, Lsn]:
    """Read the watermark of each epoch in a version of a table.

    Raises:
        TableDamaged: the log has lost the commit with the watermark.
    """
    found = {}
    for epoch in epochs:
        version = table.transaction_version(zone.app_id(epoch))
        if version is not None:
            found[epoch] = Lsn(version)
    has_fence = table.transaction_version(fence_app_id(zone.name)) is not None
    has_lost_all = not (has_fence or found) and _is_ours(table)
    if has_lost_all or not is_watermark_recorded(table, zone.name):
        newest = _newest_step(zone.lake, table, path, zone.name)
        if newest is not None and newest[1].position is not None:
            epoch, watermark = newest[1].position
            found[epoch] = watermark
    return found


def find_step(lake: Lake, table: DeltaTable, path: str, step: Step) -> Step | None:
    """Find the commit of a write; None if Delta skipped the write.

    The number of the commit may be higher than the step's. Later commits do not matter.
    """
    for _, found in _steps(lake, table, path, step.app_id):
        if found.mark == step.mark:
            return found
        if found.number <= step.number:
            return None
    return None


def has_step_at(lake: Lake, table: DeltaTable, path: str, app_id: str, position: Position) -> bool:
    """Return whether the log has a write of changes with exactly this position.

    A rebuild names the positions of the snapshots that it has applied.
    """
    for _, step in _steps(lake, table, path, app_id):
        if position in step.snapshots:
            return True
        if step.has_changes and step.position is not None and step.position <= position:
            return step.position == position
    return False


def check_not_restored(lake: Lake, table: DeltaTable, path: str, name: str) -> Position | None:
    """Check that the rows are not older than the watermark, as after a RESTORE by the owner.

    Delta's RESTORE and CLONE bring back files and properties, but no application transaction. The
    next merge would begin at the watermark, and the changes before it would be lost. So would those
    that a RESTORE has taken from a merge between its plan and its commit: Spark then merges into
    the older rows. The rows of this merge follow the older rows, and no second RESTORE helps.

    Returns:
        The position after the newest write; None if the log does not have it.

    Raises:
        TableRestored: the rows lack changes that were merged.
    """
    return check_writes_not_restored(lake, table, path, fence_app_id(name))


def check_writes_not_restored(
    lake: Lake, table: DeltaTable, path: str, app_id: str
) -> Position | None:
    """Check as `check_not_restored` that a table has the writes of an application.

    Raises:
        TableRestored: the rows lack changes that were written.
    """
    if table.transaction_version(app_id) is None:
        return None
    newest: Step | None = None
    restores: list[tuple[int, int | None]] = []
    # The version whose rows count, and the version for which the write after it was planned.
    at = version = table.version()
    planned: int | None = None
    for version, lines in _commits(lake, table, path):
        step = _parse_step(lines, app_id)
        newest = newest or step
        if step is None:
            operation, parameters = _parse_operation(lines)
            if operation in ("RESTORE", "CLONE"):
                restores.append((version, _restored_version(parameters)))
        elif step.has_changes or not restores:
            _check_restores(path, restores, at, version, is_merged=planned is not None)
            if step.follows is None or step.follows >= version - 1:
                break
            restores, at, planned = [], version - 1, step.follows
        if planned is not None and version - 1 <= planned and not restores:
            break
    else:
        _check_restores(path, restores, at, version, is_merged=planned is not None)
    return None if newest is None else newest.position


def _check_restores(
    path: str,
    restores: Iterable[tuple[int, int | None]],
    at: int,
    written: int,
    *,
    is_merged: bool,
) -> None:
    """Check that RESTOREs have not brought back rows from before a write.

    The newest RESTORE brings back a version, whose rows an earlier RESTORE may have brought back.

    Args:
        restores: the version of each RESTORE and the version that it brings back, the newest first.
        at: the version whose rows count.
        written: the version of the write.
        is_merged: a later write follows the rows.

    Raises:
        TableRestored: they have.
    """
    for version, restored in restores:
        if version > at:
            continue
        if restored is None or restored < written:
            before = None if is_merged else version - 1
            raise TableRestored(path=path, version=version, before=before)
        at = restored


def newest_write_time(lake: Lake, table: DeltaTable, path: str, name: str) -> float:
    """Return when the log entry of the newest write was written, in seconds since 1970.

    The result is 0 for a table without a write.

    Raises:
        TableDamaged: the log has lost the entry.
        OSError: the log cannot be read.
    """
    found = _newest_step(lake, table, path, name)
    if found is None:
        return 0.0
    return float(filesystem(lake, path).get_file_info(commit_path(found[0])).mtime_ns / 1e9)


def _is_ours(table: DeltaTable) -> bool:
    return KEY in table.metadata().configuration


def _newest_step(lake: Lake, table: DeltaTable, path: str, name: str) -> tuple[int, Step] | None:
    """Find the write that carries the fence; None if the whole log has no write.

    If the fence has expired, the newest write is the one.
    """
    fence = table.transaction_version(fence_app_id(name))
    for version, step in _steps(lake, table, path, fence_app_id(name)):
        if fence in (None, step.number):
            return version, step
    if fence is None and filesystem(lake, path).get_file_info(commit_path(0)).is_file:
        return None
    raise TableDamaged(path=path, reason="its log has lost the commit with the newest watermark")


def _steps(lake: Lake, table: DeltaTable, path: str, app_id: str) -> Iterator[tuple[int, Step]]:
    """Yield the writes in a table's log with their versions, the newest first."""
    for version, lines in _commits(lake, table, path):
        step = _parse_step(lines, app_id)
        if step is not None:
            yield version, step


def _commits(lake: Lake, table: DeltaTable, path: str) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the versions and lines of a log's commits, the newest first, as far as they exist."""
    log = filesystem(lake, path)
    for version in range(table.version(), -1, -1):
        try:
            yield version, read_commit_lines(log, version)
        except FileNotFoundError:
            return


def _parse_operation(lines: Iterable[bytes]) -> tuple[str, dict[str, Any]]:
    """Return the operation of a commit and its parameters; empty if the commit names none."""
    for line in lines:
        if line.startswith(b'{"commitInfo":'):
            info = json.loads(line)["commitInfo"]
            return str(info.get("operation")), info.get("operationParameters") or {}
    return "", {}


def _restored_version(parameters: dict[str, Any]) -> int | None:
    """Return the version that a RESTORE brings back; None if its commit does not say."""
    try:
        return int(parameters["version"])
    except (KeyError, TypeError, ValueError):
        return None


def _parse_step(lines: Iterable[bytes], app_id: str) -> Step | None:
    number: int | None = None
    written: dict[str, Any] = {}
    recorded: list[Position] = []
    prefix = app_id.removesuffix("fence")
    for line in lines:
        # Only these actions are parsed: there may be many others.
        if line.startswith(b'{"txn":'):
            transaction = json.loads(line)["txn"]
            kind = transaction["appId"].removeprefix(prefix)
            if transaction["appId"] == app_id:
                number = int(transaction["version"])
            elif kind.isdecimal():
                recorded.append(Position(int(kind), Lsn(transaction["version"])))
        elif line.startswith(b'{"commitInfo":'):
            written = _parse_metadata(json.loads(line)["commitInfo"].get("userMetadata"))
    if number is None:
        return None
    epoch, watermark = written.get("epoch"), written.get("watermark")
    has_changes = bool(written.get("changes", True))
    position: Position | None
    if epoch is not None and watermark is not None:
        position = Position(int(epoch), Lsn.parse(watermark))
    else:
        # Earlier releases wrote no metadata when a watermark moved without changes.
        position, has_changes = max(recorded, default=None), not recorded
    named = written.get("snapshots", ())
    snapshots = tuple(Position(int(epoch), Lsn.parse(lsn)) for epoch, lsn in named)
    follows = written.get("follows")
    return Step(
        app_id, number, position, str(written.get("write")), has_changes, snapshots, follows
    )


def _parse_metadata(text: str | None) -> dict[str, Any]:
    """Return what a write of this package records; nothing for metadata of another program."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, TypeError):
        return {}
    written = found.get("pgcdc") if isinstance(found, dict) else None
    return written if isinstance(written, dict) else {}


def _settled_app_id(name: str) -> str:
    return f"pgcdc:{name}:settled"
