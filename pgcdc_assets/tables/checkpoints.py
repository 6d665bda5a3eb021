"""Checkpoints of the versions of an SCD table that delta-rs writes."""

from __future__ import annotations

from contextlib import suppress

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.raw.delta_log import FOLDER, open_delta_table
from pgcdc_assets.raw.files import filesystem
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.checksums import delete_checksum

# Delta's name and default. The default of delta-rs is another one.
_INTERVAL = "delta.checkpointInterval"
_DEFAULT_INTERVAL = 10

_LAST_CHECKPOINT = f"{FOLDER}/_last_checkpoint"


def keep_checkpoints(lake: Lake, path: str, before: DeltaTable) -> None:
    """Write the checkpoint of a version that delta-rs wrote.

    Spark writes a checkpoint at every tenth version, if the version is its own commit. If merges
    write odd versions and watermarks even versions, Spark never writes a checkpoint.

    Args:
        before: the table before the version was written.
    """
    interval = int(before.metadata().configuration.get(_INTERVAL, _DEFAULT_INTERVAL))
    if (before.version() + 1) % interval:
        return
    with suppress(DeltaError, OSError):
        table = open_delta_table(lake, path)
        if table is not None:
            # With the checksum of an earlier content, Spark waits for three seconds at each first
            # read of the table, and then lists the log.
            delete_checksum(lake, filesystem(lake, path), _LAST_CHECKPOINT)
            table.create_checkpoint()
