"""Named points at which a test lets the process die, as by `kill -9`.

`PGCDC_FAILPOINT=after_delta_commit` kills the process the first time it comes by there, and
`PGCDC_FAILPOINT=mid_stream:3` the third time. Without the variable a failpoint does nothing.
"""

from __future__ import annotations

import os
import signal

ENVIRONMENT_VARIABLE = "PGCDC_FAILPOINT"

_passed: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Kill this process here, if the environment asks for it; nothing gets a chance to clean up."""
    wanted, _, count = os.environ.get(ENVIRONMENT_VARIABLE, "").partition(":")
    if wanted != name:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] >= int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
