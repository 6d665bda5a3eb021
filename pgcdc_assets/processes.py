"""The unique identity of a process.

A process id is not unique: each container counts from 1, ids are reused, and containers may share a
host name. So the identity consists of host, boot, PID namespace, process id and start time. A
process is looked up in /proc only from its own namespace.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN = "unknown"
_ENDED = "ended"


@dataclass(frozen=True)
class ProcessNamespace:
    """A PID namespace of a running system, in which ids of running processes are unique.

    Attributes:
        boot: id of the kernel's boot.
        namespace: number of the PID namespace.
    """

    host: str
    boot: str
    namespace: str

    @property
    def is_known(self) -> bool:
        """Whether the namespace is known; false if /proc is missing or shows another namespace."""
        return _UNKNOWN not in (self.boot, self.namespace)


@dataclass(frozen=True)
class ProcessIdentity:
    """One process.

    Attributes:
        started: clock ticks from the boot to the start of the process.
    """

    place: ProcessNamespace
    pid: int
    started: str

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessIdentity:
        """Return the identity of a process of this namespace; the default is this process."""
        number = os.getpid() if pid is None else pid
        return cls(this_namespace(), number, start_ticks(number))

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """Parse the result of `str`; None for text of another form."""
        parts = text.split(":")
        if len(parts) != 5 or not parts[3].isdigit():
            return None
        host, boot, namespace, pid, started = parts
        return cls(ProcessNamespace(host, boot, namespace), int(pid), started)

    def __str__(self) -> str:
        place = self.place
        return f"{place.host}:{place.boot}:{place.namespace}:{self.pid}:{self.started}"

    @property
    def is_visible(self) -> bool:
        """Whether this process can look the process up in /proc."""
        return self.place.is_known and self.place == this_namespace()

    @property
    def has_ended(self) -> bool:
        """Whether a visible process has certainly ended."""
        now = start_ticks(self.pid)
        return now != _UNKNOWN and now != self.started


@cache
def this_namespace() -> ProcessNamespace:
    """Return the namespace of this process."""
    try:
        boot = _BOOT_ID.read_text().strip()
        namespace = "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
        shown = os.readlink("/proc/self")
    except OSError:
        boot = namespace = shown = ""
    if shown != str(os.getpid()):
        # /proc belongs to another namespace, where the ids are those of other processes.
        namespace = ""
    return ProcessNamespace(socket.gethostname(), boot or _UNKNOWN, namespace or _UNKNOWN)


def start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot (/proc/PID/stat, proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _ENDED if _is_free(pid) else _UNKNOWN
    fields = stat.rpartition(")")[2].split()
    return _ENDED if fields[0] == "Z" else fields[19]


def has_no_process(pid: int) -> bool:
    """Return whether a process id of this namespace is certainly that of no running process."""
    return start_ticks(pid) == _ENDED


def _is_free(pid: int) -> bool:
    """Return whether no process has the id. /proc may hide processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
