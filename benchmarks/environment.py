"""The commit, the machine and the programs of a result."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import timeit
from pathlib import Path

import psutil

from pgcdc_assets.demo.programs import find_binaries

ROOT = Path(__file__).resolve().parents[1]
# `make bench` itself changes these files.
_WRITTEN_BY_BENCHMARKS = ("benchmarks/results.json", "docs/benchmarks.md", "README.md")


def find_commit(root: Path = ROOT) -> str | None:
    """Return the commit of the code, with `-dirty` if the work tree differs from the commit.

    Returns:
        None outside a clone.
    """
    head = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    ours = [f":(exclude){path}" for path in _WRITTEN_BY_BENCHMARKS]
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--", ".", *ours)
    return head if changed == "" else f"{head}-dirty"


def describe_machine(postgres: int | None) -> dict[str, str | int | float | None]:
    """Return cores, speed, memory and versions of the machine.

    Virtual machines of the same name may differ in speed by half. `python_loop_ms` shows it.

    Args:
        postgres: the major version of the measured server.
    """
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "cpu": _cpu_model(),
        "os": platform.freedesktop_os_release().get("PRETTY_NAME"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "java": _java_version(),
        "postgres": None if postgres is None else _postgres_version(postgres),
        "python_loop_ms": _loop_ms(),
    }


def _cpu_model() -> str | None:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else None


def _loop_ms() -> int:
    """Return the milliseconds of a million additions in Python, the shortest of three times."""
    loop = "for i in range(1_000_000): n += i"
    return round(min(timeit.repeat(loop, "n = 0", number=1, repeat=3)) * 1000)


def _java_version() -> str | None:
    home = os.environ.get("JAVA_HOME")
    said = _output(str(Path(home, "bin", "java")) if home else "java", "-version")
    found = re.search(r'version "([^"]+)"', said or "")
    return found[1] if found else None


def _postgres_version(major: int) -> str | None:
    said = _output(str(find_binaries(major) / "postgres"), "--version")
    return said.removeprefix("postgres (PostgreSQL) ") if said else None


def _output(*command: str) -> str | None:
    """Return the output of a command; None if the command fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    # `java -version` writes to stderr.
    return done.stdout.strip() or done.stderr.strip()
