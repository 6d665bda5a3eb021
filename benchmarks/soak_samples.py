"""The samples of the soak: files, memory of the processes, Dagster's records, and times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import dagster as dg
import psutil

from benchmarks.results import Result
from pgcdc_assets.raw.delta.log_entries import FOLDER as LOG_FOLDER

# The newest materialisations of windows, and commits of a table, that a sample reads.
_WINDOWS, _MERGES = 100, 60

_ROLES = {
    "java": "spark server",
    "dagster_webserver": "webserver",
    "dagster._daemon": "daemon",
    # The code server starts a process for each run.
    "multiprocessing": "run worker",
    "code-server": "code server",
    "grpc": "code server",
    "postgres": "postgres",
}


@dataclass(frozen=True)
class Files:
    """The number and the bytes of files."""

    count: int = 0
    size: int = 0

    def __str__(self) -> str:
        return f"{self.count:,} ({self.size / 1e6:,.1f} MB)"


@dataclass
class Sample:
    """The state of the soak at one time.

    Attributes:
        seconds: time since the first window of the soak.
        windows: number of landed windows.
        window_seconds: median time from one window to the next.
        merge_seconds: median time from one merge of a table to the next.
        files: data files and log files, by name.
        database: bytes of Dagster's records by part.
        keys: number of partition keys.
        runs: number of runs that Dagster shows.
        memory: the highest resident megabytes of a process since the last sample, by role.
    """

    seconds: float
    windows: int
    window_seconds: float | None
    merge_seconds: float | None
    files: Mapping[str, Files]
    database: Mapping[str, int]
    keys: int
    runs: int
    memory: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = (self.window_seconds, self.merge_seconds)
        parts = [
            f"{self.seconds:6.0f} s",
            f"{self.windows:,} windows",
            "window {} merge {}".format(*("-" if t is None else f"{t:.2f} s" for t in times)),
            *(f"{name} {files}" for name, files in self.files.items()),
            *(f"{name} {size / 1e6:,.1f} MB" for name, size in self.database.items()),
            f"{self.keys:,} keys",
            f"{self.runs} runs",
            *(f"{role} {megabytes:,.0f} MB" for role, megabytes in sorted(self.memory.items())),
        ]
        return " | ".join(parts)


def count_files(folder: Path) -> dict[str, Files]:
    """Count the files of a capture's lake: data of `raw` and SCD tables, and all log files."""
    names = {"raw": "raw", "scd1": "scd", "scd2": "history"}
    found = dict.fromkeys((*names.values(), "log"), Files())
    for part, data in names.items():
        for file in (folder / part).rglob("*"):
            try:
                size = file.stat().st_size
            except FileNotFoundError:
                continue
            if file.is_dir():
                continue
            name = "log" if LOG_FOLDER in file.parts else data
            before = found[name]
            found[name] = Files(before.count + 1, before.size + size)
    return found


def measure_database(home: Path) -> dict[str, int]:
    """Return the bytes of Dagster's records: runs with their events and logs, and ticks."""
    sizes = {
        name: sum(_size(file) for file in (home / name).rglob("*") if file.is_file())
        for name in ("history", "storage", "schedules")
    }
    return {"database": sizes["history"] + sizes["storage"], "ticks": sizes["schedules"]}


def find_window_seconds(instance: dg.DagsterInstance, raw: dg.AssetKey) -> float | None:
    """Return the median time between the newest windows."""
    records = instance.fetch_materializations(raw, limit=_WINDOWS).records
    return _median_gap(record.timestamp for record in records)


def find_merge_seconds(table: Path) -> float | None:
    """Return the median time between the newest merges of a small table, one commit for each.

    Dagster does not have these times: a run that continues reports several merges together. The
    commits of OPTIMIZE and VACUUM have no watermark.
    """
    entries = sorted((table / LOG_FOLDER).glob("*.json"))[-_MERGES:]
    times = []
    for entry in entries:
        # The maintenance deletes old entries at the same time.
        with suppress(FileNotFoundError):
            if b'"txn"' in entry.read_bytes():
                times.append(entry.stat().st_mtime)
    return _median_gap(times)


def read_memory(roots: Iterable[int]) -> dict[str, float]:
    """Return the resident megabytes of the largest process of each role.

    Args:
        roots: processes whose descendants count too.
    """
    found: dict[str, float] = {}
    for root in roots:
        try:
            process = psutil.Process(root)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for each in family:
            try:
                role, held = _role(each.cmdline()), each.memory_info().rss / 2**20
            except psutil.Error:
                continue
            if role is not None:
                found[role] = max(held, found.get(role, 0.0))
    return found


def merge_maxima(into: dict[str, float], found: Mapping[str, float]) -> None:
    """Keep the higher value of each role."""
    for role, held in found.items():
        into[role] = max(held, into.get(role, 0.0))


def growth(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the second tenth and of the last tenth of a series."""
    size = max(1, len(values) // 10)
    return statistics.median(values[size : 2 * size] or values), statistics.median(values[-size:])


def growth_result(name: str, values: Sequence[float]) -> Result:
    """Return the growth of a series in one run: one repetition, whose settings have the samples."""
    early, late = growth(values)
    result = Result.reported(name, [late / early if early else 0.0], "times")
    return replace(
        result,
        settings={
            "early": f"{early:,.3f}",
            "late": f"{late:,.3f}",
            "samples": str(len(values)),
        },
    )


def _role(command: Sequence[str]) -> str | None:
    text = " ".join(command)
    if "watch_orphans" in text:
        return None
    return next((role for part, role in _ROLES.items() if part in text), None)


def _median_gap(times: Iterable[float]) -> float | None:
    gaps = [later - earlier for earlier, later in pairwise(sorted(times))]
    return statistics.median(gaps) if gaps else None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
