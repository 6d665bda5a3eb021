"""`dagster dev` as a child process: its start, and the end of all processes that it started.

A shell starts a background job with SIGINT ignored. `dagster dev` would inherit this, so the
default is restored before the start. At the end all processes of `dagster dev` get the signal, as
from a terminal. Otherwise runs would continue without `dagster dev`. The servers that the processes
use are stopped after all processes have ended.
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
    """Start `dagster dev` in a new session.

    Args:
        environment: variables in addition to those of this process.
        output: file for its output; None: the terminal.
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
    """End `dagster dev` and its processes, with SIGKILL after a time limit."""
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
    """Return whether a process is a watcher, which prints a stack on SIGINT and ends by itself."""
    try:
        return any("watch_orphans" in part for part in process.cmdline())
    except psutil.Error:
        return False
