"""Checkpoints of the versions of an SCD table that delta-rs writes."""

from __future__ import annotations

from contextlib import suppress

from deltalake import DeltaTable, PostCommitHookProperties
from deltalake.exceptions import DeltaError

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import LAST_CHECKPOINT
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.checksums import delete_checksum
from pgcdc_assets.tables.maintenance_turns import has_turn

# For commits by delta-rs. Its interval of checkpoints is not that of Delta. Its removal of old log
# entries takes half a second for 100,000 entries, and trusts a checkpoint that is incomplete.
WITHOUT_UPKEEP = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)

# Delta's name and default.
_INTERVAL = "delta.checkpointInterval"
_DEFAULT_INTERVAL = 10


def is_due(path: str, version: int, interval: int) -> bool:
    """Return whether a table writes the checkpoint of a version.

    It writes one in `interval` versions, and none before as many versions.
    """
    return version >= interval and has_turn(path, version, interval)


def keep_checkpoints(lake: Lake, path: str, table: DeltaTable, *, commits: int = 1) -> None:
    """Write the checkpoint of a version that delta-rs wrote, if it is due.

    Spark writes a checkpoint at every tenth version, if the version is its own commit. If merges
    write odd versions and watermarks even versions, Spark never writes a checkpoint, so the
    watermark's commit writes the checkpoint that is due at one of both.

    Args:
        table: the table before the version was written; it is updated before a checkpoint.
        commits: number of commits of the merge, the last of which is by delta-rs.
    """
    interval = int(table.metadata().configuration.get(_INTERVAL, _DEFAULT_INTERVAL))
    version = table.version() + 1
    if not any(is_due(path, version - number, interval) for number in range(commits)):
        return
    with suppress(DeltaError, OSError):
        table.update_incremental()
        delete_checksum_of_hint(lake, path)
        table.create_checkpoint()


def delete_checksum_of_hint(lake: Lake, path: str) -> None:
    """Delete the checksum of `_last_checkpoint`, before a checkpoint by delta-rs replaces the file.

    With the checksum of an earlier content, Spark waits for three seconds at each first read of the
    table, and then lists the log.
    """
    delete_checksum(lake, filesystem(lake, path), LAST_CHECKPOINT)
