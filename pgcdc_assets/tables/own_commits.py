"""The state of a small table after a commit of this process, without opening the table again.

Opening a table lists its log and reads a checkpoint, which takes longer than a small commit. After
a commit of whole files the process knows the new state, and delta-rs reads the one new log entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Lock

import pyarrow as pa
from deltalake.exceptions import DeltaError

from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.fence import Step
from pgcdc_assets.tables.row_counts import written_rows
from pgcdc_assets.tables.state import STATES, ScdState

# States of one table share the table's object, which a commit moves to the next version.
_LOCKS: dict[str, Lock] = {}


@contextmanager
def following(zone: RawZone, state: ScdState, step: Step) -> Iterator[bool]:
    """Keep the state that a commit in the block makes.

    The block commits the version after the state's: only files without deletion vectors, and the
    transactions of the step (`fence_transactions`). Then the kept state is what `read_scd_state`
    would read. If another process has committed since, the state is read at its next use.

    Yields:
        Whether the table is still at the state's version. If it is not, another thread of this
        process has committed, and the block must not commit.
    """
    with _LOCKS.setdefault(state.path, Lock()):
        is_current = state.table.version() == state.version
        yield is_current
        if is_current:
            with suppress(DeltaError, OSError, pa.ArrowException):
                _follow(zone, state, step)


def _follow(zone: RawZone, state: ScdState, step: Step) -> None:
    if state.table.version() == state.version:
        # A checkpoint that was due has updated the table already.
        state.table.update_incremental()
    version = state.table.version()
    if version != state.version + 1:
        return
    files = pa.table(state.table.get_add_actions(flatten=True))
    made = replace(
        state,
        version=version,
        watermark=step.position,
        fence=step.number,
        is_watermark_recorded=True,
        row_count=written_rows(files),
        has_deletion_vectors=False,
        files=files,
    )
    STATES.put(zone.lake, state.path, zone.name, version, made)
