"""Named points at which a test lets the process die, as a power cut would, or be stopped.

`PGCDC_FAILPOINT=name` kills this process by SIGKILL when it reaches that point, `name:3` at the
third time. Nothing is flushed and no handler runs. `name:3:TERM` sends SIGTERM instead, as who
stops a run does. Unset, a failpoint costs one comparison.
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
    """Die here, or be told to stop, if the environment asks for it."""
    wanted = os.environ.get("PGCDC_FAILPOINT")
    if not wanted:
        return
    wanted_name, _, rest = wanted.partition(":")
    times, _, sent = rest.partition(":")
    if wanted_name == name:
        _passed[name] = _passed.get(name, 0) + 1
        if _passed[name] == int(times or 1):
            os.kill(os.getpid(), signal.Signals[f"SIG{sent or 'KILL'}"])
