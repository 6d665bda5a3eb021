"""Measurement of a command as a whole process: time from fork to exit, CPU and memory.

Child processes count too if the command waits for them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_SAMPLE_SECONDS = 0.1
_SHOWN_OUTPUT = 3000
_KILOBYTES = re.compile(r"^Vm(RSS|HWM):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """The time, CPU and memory of a command.

    Attributes:
        seconds: time from fork to exit.
        cpu_seconds: CPU of the process and of all children that it has waited for.
        peak_mb: peak of the total resident memory of the process and its descendants. It is sampled
            ten times a second, and is at least the kernel's peak of any of these processes.
        output: the command's standard output.
    """

    seconds: float
    cpu_seconds: float
    peak_mb: float
    output: str


class CommandFailedError(RuntimeError):
    """A measured command failed or exceeded its time limit."""


def run_measured(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    limit_seconds: float = 3600,
) -> Usage:
    """Run a command and measure it.

    Args:
        environment: variables in addition to those of this process.
        folder: working folder of the command.
        limit_seconds: time limit, after which the command and its children are killed.

    Raises:
        CommandFailedError: the command failed. The message ends with the last lines of its output.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        watch = _Watch(process.pid, began + limit_seconds)
        watch.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.monotonic() - began
        except BaseException:
            # In a new session the command does not get Ctrl-C.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            watch.stop()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        said = output.read()
        if process.returncode != 0:
            reason = "took too long" if watch.is_killed else f"ended with {process.returncode}"
            last = (said + errors.read()).strip()[-_SHOWN_OUTPUT:]
            raise CommandFailedError(f"{Path(command[0]).name} {reason}: {last}")
    return Usage(
        seconds=seconds,
        cpu_seconds=used.ru_utime + used.ru_stime,
        peak_mb=watch.peak_bytes / 2**20,
        output=said,
    )


class _Watch(threading.Thread):
    """Samples the memory of a process and its descendants, and kills them at the time limit."""

    def __init__(self, pid: int, end: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.peak_bytes = 0
        self.is_killed = False
        self._pid = pid
        self._end = end
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, *_resident_bytes(self._pid))
            if time.monotonic() > self._end and not self.is_killed:
                self.is_killed = True
                os.killpg(self._pid, signal.SIGKILL)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def _resident_bytes(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process and its descendants, and the highest peak of one.

    The peak is that of the address space. `ru_maxrss` is unsuitable: it includes the peak of the
    parent, which the kernel keeps across fork and exec.
    """
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    held, peak = 0, 0
    for process in family:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue
        kilobytes = {name: int(number) for name, number in _KILOBYTES.findall(status)}
        held += kilobytes.get("RSS", 0) * 1024
        peak = max(peak, kilobytes.get("HWM", 0) * 1024)
    return held, peak
