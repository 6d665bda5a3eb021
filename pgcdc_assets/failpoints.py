"""Failpoints: named points at which a test kills or stops the process.

With `PGCDC_FAILPOINT=name`, the process kills itself by SIGKILL at this point: nothing is flushed,
and no handler runs. With `name:3` the kill happens at the third pass, and with `name:3:TERM` the
signal is SIGTERM, as when a run is terminated. Without the variable, a failpoint costs one
comparison.
"""

from __future__ import annotations

import os
import signal

BEFORE_DELTA_COMMIT = "before_delta_commit"
AFTER_RELATIONS_COMMIT = "after_relations_commit"
AFTER_DELTA_COMMIT = "after_delta_commit"
AFTER_STATUS_PACKET = "after_status_packet"
MID_STREAM = "mid_stream"
AFTER_COLUMNS_ADDED = "after_columns_added"
AFTER_MERGE_STEP = "after_merge_step"
AFTER_FILE_DELETED = "after_file_deleted"

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
