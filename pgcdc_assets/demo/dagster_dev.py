"""`dagster dev` as a child process, and its end with everything that it started.

A shell that starts a job in the background makes it ignore SIGINT, and `dagster dev` takes over
what it inherits and then reacts to nothing: who starts it restores the default first. At the end
all of its processes get the signal, as from a terminal, because `dagster dev` itself leaves runs to
go on without it; and all are waited for, so that what they use can be stopped after them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

_SECONDS_TO_STOP = 60.0


def start_dagster(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `dagster dev` in a session of its own.

    Args:
        environment: what it has besides this process's own.
        output: where it writes; None: to the terminal.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "dagster", "dev", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def stop_dagster(process: subprocess.Popen[bytes]) -> None:
    """End it and what it started; by force only what does not go."""
    if process.poll() is not None:
        return
    dagster = psutil.Process(process.pid)
    family = [dagster, *dagster.children(recursive=True)]
    for each in psutil.process_iter():
        if _is_in_group(each, process.pid) and not _is_watcher(each):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGINT)
    _, left = psutil.wait_procs(family, timeout=_SECONDS_TO_STOP)
    for each in left:
        each.kill()
    psutil.wait_procs(left, timeout=_SECONDS_TO_STOP)
    process.wait()


def _is_in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group
    except ProcessLookupError:
        return False


def _is_watcher(process: psutil.Process) -> bool:
    """Whether it is a watcher, which ends with its parent and prints a stack on SIGINT."""
    try:
        return any("watch_orphans" in part for part in process.cmdline())
    except psutil.Error:
        return False
