"""Failpoints: named points at which a test kills or stops the process.

With `PGCDC_FAILPOINT=name`, the process kills itself at this point by SIGKILL, so nothing is
flushed and no handler runs. With `name:3`, the kill happens at the third pass. With `name:3:TERM`,
the signal is SIGTERM, as at the termination of a run. Without the variable, a failpoint costs one
comparison.
"""

from __future__ import annotations

import os
import signal
import time

# Capture, in the order of a run.
MID_STREAM = "mid_stream"
BEFORE_DELTA_COMMIT = "before_delta_commit"
AFTER_SCHEMA_EVENTS = "after_schema_events"
AFTER_RELATIONS_COMMIT = "after_relations_commit"
AFTER_PREPARED_COMMIT = "after_prepared_commit"
AFTER_DELTA_COMMIT = "after_delta_commit"
AFTER_STATUS_PACKET = "after_status_packet"
AFTER_TWO_PHASE_RECORDED = "after_two_phase_recorded"
AFTER_PREPARED_REMOVAL = "after_prepared_removal"

# Snapshot and renewal.
AFTER_SLOT_DROP = "after_slot_drop"
AFTER_SLOT_CREATION = "after_slot_creation"
AFTER_EPOCH_COMMIT = "after_epoch_commit"
MID_COPY = "mid_copy"
BEFORE_RANGE_COMMIT = "before_range_commit"
AFTER_RANGE_COMMIT = "after_range_commit"
AFTER_RANGE_REFRESH = "after_range_refresh"
BEFORE_COPY_COMMIT = "before_copy_commit"
AFTER_COPY_COMMIT = "after_copy_commit"

# Merge, rebuild and maintenance.
AFTER_CLUSTERED_OVERWRITE = "after_clustered_overwrite"
AFTER_COLUMNS_REWRITTEN = "after_columns_rewritten"
AFTER_COLUMNS_ADDED = "after_columns_added"
BEFORE_BATCH_COMMIT = "before_batch_commit"
AFTER_BATCH_COMMIT = "after_batch_commit"
AFTER_MERGE_STEP = "after_merge_step"
AFTER_REBUILD_STAGED = "after_rebuild_staged"
AFTER_REBUILD_MOVED = "after_rebuild_moved"
AFTER_REBUILD_COMMIT = "after_rebuild_commit"
BEFORE_MESSAGES_COMMIT = "before_messages_commit"
AFTER_MESSAGES_COMMIT = "after_messages_commit"
AFTER_FILE_DELETED = "after_file_deleted"
AFTER_EVENTS_DELETED = "after_events_deleted"

_HANDLING_SECONDS = 0.5

_passed: dict[str, int] = {}


def reach(name: str) -> None:
    """Send the signal of PGCDC_FAILPOINT to this process if the failpoint's turn has come."""
    wanted = os.environ.get("PGCDC_FAILPOINT")
    if not wanted:
        return
    wanted_name, _, rest = wanted.partition(":")
    times, _, sent = rest.partition(":")
    if wanted_name == name:
        _passed[name] = _passed.get(name, 0) + 1
        if _passed[name] == int(times or 1):
            os.kill(os.getpid(), signal.Signals[f"SIG{sent or 'KILL'}"])
            # The main thread handles the signal, and this may be another thread.
            time.sleep(_HANDLING_SECONDS)
