"""Write the tables of docs/benchmarks.md from results.json: `python -m benchmarks.page`.

A generated part is between `<!-- results: NAME -->` and `<!-- end results -->`. NAME is a
benchmark, or one of `summary`, `runs`, `machines`, `comparison`, `rows` and `soak_end`. `make
bench` writes the page too. A test fails if the page differs from results.json.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.benchmark import BENCHMARKS
from benchmarks.results import Entry, read_entries, shown
from benchmarks.summary import SUMMARY
from benchmarks.workload import CHANGES_PER_UNIT

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"

_PART = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end results -->)", re.DOTALL)

# The settings of the soak's entries with its last sample, and their descriptions.
_SOAK_END = {
    "windows": "landed windows",
    "files_at_end": "files",
    "dagster_at_end": "Dagster's records",
    "keys_at_end": "partition keys",
    "runs_at_end": "runs that Dagster shows",
    "memory_at_end": "highest memory of a process in the last minute",
}


def write_page() -> None:
    """Update the generated parts."""
    entries = read_entries()
    for page in (PAGE, README):
        page.write_text(generate(page.read_text(), entries))


def generate(text: str, entries: Sequence[Entry]) -> str:
    """Return a page's text with the generated parts for the entries.

    Raises:
        KeyError: the name of a part is neither a benchmark nor a table of several benchmarks.
    """
    return _PART.sub(lambda part: f"{part[1]}\n{_build(part[2], entries)}\n{part[3]}", text)


def _build(name: str, entries: Sequence[Entry]) -> str:
    builders = {
        "summary": build_summary,
        "runs": build_runs,
        "machines": build_machines,
        "comparison": build_comparison,
        "rows": build_rows,
        "soak": build_growths,
        "soak_end": build_soak_end,
    }
    if name in builders:
        return builders[name](entries)
    BENCHMARKS[name]
    return build_results([entry for entry in entries if entry["benchmark"] == name])


def build_results(entries: Sequence[Entry]) -> str:
    """Return the table of one benchmark's results."""
    if not entries:
        return "Not recorded yet.\n"
    rows = [
        (
            f"`{entry['name']}`",
            _with_range(entry["ours"], entry["minimum"], entry["maximum"]),
            _with_range(entry["baseline"], entry["baseline_minimum"], entry["baseline_maximum"]),
            shown(entry["ratio"]),
            entry["unit"],
            str(entry["repetitions"]),
            _recorded(entry),
        )
        for entry in entries
    ]
    return _table(("name", "ours", "baseline", "ratio", "unit", "repetitions", "recorded"), rows)


def build_growths(entries: Sequence[Entry]) -> str:
    """Return the table of the growths of the soak, each with its two medians."""
    rows = []
    for entry in _of_soak(entries):
        settings = entry["settings"]
        rows.append(
            (
                f"`{entry['name']}`",
                _without_zeros(settings["early"]),
                _without_zeros(settings["late"]),
                shown(entry["ours"]),
                settings["samples"],
                _recorded(entry),
            )
        )
    if not rows:
        return "Not recorded yet.\n"
    return _table(("name", "second tenth", "last tenth", "growth", "samples", "recorded"), rows)


def build_soak_end(entries: Sequence[Entry]) -> str:
    """Return the table of the last sample of the soak."""
    settings = next((entry["settings"] for entry in _of_soak(entries)), None)
    if settings is None:
        return "Not recorded yet.\n"
    return _table(("last sample", ""), [(what, settings[key]) for key, what in _SOAK_END.items()])


def _without_zeros(decimals: str) -> str:
    return decimals.rstrip("0").rstrip(".")


def _of_soak(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry["benchmark"] == "soak"]


def build_summary(entries: Sequence[Entry]) -> str:
    """Return the tables of figures for the README, including unfavourable figures."""
    by_name = {entry["name"]: entry for entry in entries}
    marks = _mark_machines(entries)
    used = {
        marks[_hardware(by_name[name])]
        for lines in SUMMARY.values()
        for name, _, _ in lines
        if name in by_name
    }
    parts = []
    for group, lines in SUMMARY.items():
        rows = [
            _summary_row(by_name[name], what, beside, marks)
            for name, what, beside in lines
            if name in by_name
        ]
        if rows:
            names = ("what", "ours", "beside", "ratio", "machine", "recorded")
            parts.append(f"### {group}\n\n{_table(names, rows)}")
    machines = "; ".join(f"{mark} is {it}" for it, mark in marks.items() if mark in used)
    return "\n".join([*parts, f"Machines: {machines}.\n"]) if parts else "Not recorded yet.\n"


def _summary_row(entry: Entry, what: str, beside: str, marks: Mapping[str, str]) -> tuple[str, ...]:
    unit = entry["unit"].partition(",")[0]
    # An entry may be older than its limit.
    is_compared = beside and entry["baseline"] is not None
    # A tool that is too slow for all changes is measured with fewer.
    written = entry["settings"].get("changes_written")
    if written not in (None, str(CHANGES_PER_UNIT)):
        beside += f", {int(written):,} of the changes"
    return (
        what,
        f"{shown(entry['ours'])} {unit}",
        f"{beside}: {shown(entry['baseline'])}" if is_compared else "",
        shown(entry["ratio"]),
        marks[_hardware(entry)],
        _recorded(entry),
    )


def build_runs(entries: Sequence[Entry]) -> str:
    """Return the table of benchmarks, with workload, duration and newest run."""
    rows: list[tuple[str, ...]] = []
    marks = _mark_machines(entries)
    for name, benchmark in BENCHMARKS.items():
        of_benchmark = [entry for entry in entries if entry["benchmark"] == name]
        last = max(of_benchmark, key=lambda entry: entry["date"], default=None)
        seconds = last and last["seconds_of_benchmark"]
        machine = (last and last["machine"]) or {}
        # A benchmark whose heap is not the default has the heap in its results.
        recorded = (last and last["settings"]) or {}
        settings = {**recorded, **benchmark.settings()}
        rows.append(
            (
                f"`{name}`",
                settings["workload"],
                settings.get("heap", ""),
                f"about {benchmark.minutes} min",
                f"{seconds} s" if seconds else "",
                "never" if last is None else _recorded(last),
                "" if last is None else marks[_hardware(last)],
                # Older results have the load average instead.
                str(machine.get("busy_percent_before", "")),
                # Older results lack it.
                str(machine.get("python_loop_ms", "")),
            )
        )
    minutes = sum(benchmark.minutes for benchmark in BENCHMARKS.values())
    rows.append(("all", "", "", f"about {minutes} min", *[""] * 5))
    names = ("ONLY", "works on", "heap", "takes", "took", "last recorded", "machine", "busy, %")
    return _table((*names, "loop, ms"), rows)


def build_machines(entries: Sequence[Entry]) -> str:
    """Return the table of the machines of the results."""
    marks = _mark_machines(entries)
    dates: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        machine = entry["machine"]
        described = (
            marks[_hardware(entry)],
            _hardware(entry),
            f"{machine['os']}, {machine['kernel']}",
            f"Python {machine['python']}, Java {machine['java']}",
        )
        dates.setdefault(described, []).append(entry["date"][:10])
    if not dates:
        return "No result is recorded yet.\n"
    rows = [(*machine, _span(days)) for machine, days in sorted(dates.items())]
    return _table(("", "machine", "system", "programs", "recorded"), rows)


def _mark_machines(entries: Iterable[Entry]) -> dict[str, str]:
    """Return a letter for each kind of machine, by its hardware."""
    machines = sorted({_hardware(entry) for entry in entries})
    return dict(zip(machines, string.ascii_uppercase, strict=False))


def _hardware(entry: Entry) -> str:
    machine = entry["machine"]
    return f"{machine['cores']} cores, {machine['memory_gb']} GB, {machine['cpu']}"


def build_comparison(entries: Sequence[Entry]) -> str:
    """Return the table of other tools, each with our figures of the same rounds."""
    by_name = {entry["name"]: entry for entry in entries}
    rows = []
    for entry in _peers(entries):
        settings, name = entry["settings"], entry["name"]
        if "unavailable" in settings:
            rows.append((settings["version"], "not measured", "", "", "", "", _recorded(entry)))
            continue
        cpu, memory = (by_name[f"{name}_{part}"] for part in ("cpu", "peak_memory"))
        rates = (entry["baseline"], entry["baseline_minimum"], entry["baseline_maximum"])
        rows.append(
            (
                settings["version"],
                _with_range(*rates),
                _with_range(entry["ours"], entry["minimum"], entry["maximum"]),
                f"{shown(cpu['baseline'])} / {shown(cpu['ours'])}",
                f"{shown(memory['baseline'])} / {shown(memory['ours'])}",
                f"{int(settings['changes_written']):,}",
                _recorded(entry),
            )
        )
    if not rows:
        return "Not recorded yet.\n"
    names = (
        "tool",
        "changes/s",
        "ours, same rounds",
        "CPU s per million / ours",
        "peak MB / ours",
        "changes written",
        "recorded",
    )
    return _table(names, rows)


def build_rows(entries: Sequence[Entry]) -> str:
    """Return the table that describes how each tool converts and writes a row."""
    rows = [
        (
            entry["settings"]["version"],
            entry["settings"]["plugin"],
            entry["settings"]["writes"],
            entry["settings"]["row"],
            entry["settings"].get("unavailable", ""),
        )
        for entry in _peers(entries)
    ]
    if not rows:
        return "Not recorded yet.\n"
    return _table(("tool", "reads", "writes", "a row", "why not measured"), rows)


def _peers(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entry of each tool's rate."""
    of_peers = [entry for entry in entries if entry["benchmark"] == "peers"]
    return [entry for entry in of_peers if not entry["name"].endswith(("_cpu", "_peak_memory"))]


def _span(days: Sequence[str]) -> str:
    first, last = min(days), max(days)
    return first if first == last else f"{first} to {last}"


def _with_range(value: float | None, low: float | None, high: float | None) -> str:
    """Format a figure with its minimum and its maximum."""
    if low is None or high is None or low == high:
        return shown(value)
    return f"{shown(value)} ({shown(low)} to {shown(high)})"


def _recorded(entry: Entry) -> str:
    """Format the date and the commit of an entry."""
    day, commit = str(entry["date"])[:10], entry["commit"]
    return f"{day}, {commit}" if commit else day


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    write_page()
