"""The result of a benchmark, and the file with the newest result of each name."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
FIRST = "capture_vs_pg_recvlogical"

# An entry of results.json: a result with the date, the machine and the settings.
Entry = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A measurement with its baseline.

    Attributes:
        ours: median of our repetitions, or the value that the name describes (`_p95`, `_at_most`).
        baseline: median of the baseline's repetitions in the same run, or a fixed limit according
            to the unit; None for a figure without a baseline.
        ratio: ours / baseline.
        unit: unit of ours, baseline and the following values.
        minimum: minimum of our repetitions.
        baseline_minimum: minimum of the baseline's repetitions; None for a limit.
        settings: settings of this result only.
    """

    name: str
    ours: float
    baseline: float | None
    ratio: float | None
    unit: str
    repetitions: int
    minimum: float
    median: float
    maximum: float
    baseline_minimum: float | None = None
    baseline_maximum: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, ours: Sequence[float], baseline: Sequence[float], unit: str) -> Result:
        """Compare the medians of two series that were measured in turns."""
        theirs = statistics.median(baseline)
        return replace(
            cls.reported(name, ours, unit),
            baseline=_rounded(theirs),
            # A process may end before the first sample of its memory.
            ratio=round(statistics.median(ours) / theirs, 3) if theirs else None,
            baseline_minimum=_rounded(min(baseline)),
            baseline_maximum=_rounded(max(baseline)),
        )

    @classmethod
    def against_limit(
        cls,
        name: str,
        ours: Sequence[float],
        limit: float,
        unit: str,
        *,
        value: float | None = None,
    ) -> Result:
        """Compare a series with a fixed limit.

        Args:
            value: the value to compare instead of the median.
        """
        shown = cls.reported(name, ours, f"{unit}, limit {limit:g}", value=value)
        mine = statistics.median(ours) if value is None else value
        return replace(shown, baseline=limit, ratio=round(mine / limit, 3))

    @classmethod
    def reported(
        cls, name: str, ours: Sequence[float], unit: str, *, value: float | None = None
    ) -> Result:
        """Report a series that has no baseline.

        Args:
            value: the value to report instead of the median.
        """
        median = statistics.median(ours)
        return cls(
            name=name,
            ours=_rounded(median if value is None else value),
            baseline=None,
            ratio=None,
            unit=unit,
            repetitions=len(ours),
            minimum=_rounded(min(ours)),
            median=_rounded(median),
            maximum=_rounded(max(ours)),
        )


def entry_of(result: Result, context: Entry) -> Entry:
    """Return a result as an entry of results.json.

    Args:
        context: the fields that all results of a run share. The result's settings are added to
            the settings in the context.
    """
    settings = {**context["settings"], **result.settings}
    return {**asdict(result), **context, "settings": settings}


def read_entries() -> list[Entry]:
    """Return the newest entry of each name."""
    entries: list[Entry] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return entries


def save(entries: Iterable[Entry]) -> None:
    """Replace the entries of the same benchmarks in the file, and keep other entries.

    The next run of a benchmark removes results that the benchmark no longer has.
    """
    new = list(entries)
    run = {entry["benchmark"] for entry in new}
    kept = [entry for entry in read_entries() if entry["benchmark"] not in run]
    ordered = sorted([*kept, *new], key=lambda entry: bool(entry["name"] != FIRST))
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")


def table(results: Iterable[Result]) -> str:
    """Format results as a table for a terminal."""
    rows = [("name", "ours", "min", "max", "baseline", "ratio", "unit", "repetitions")]
    rows += [
        (
            result.name,
            shown(result.ours),
            shown(result.minimum),
            shown(result.maximum),
            shown(result.baseline),
            "" if result.ratio is None else f"{result.ratio:.2f}",
            result.unit,
            str(result.repetitions),
        )
        for result in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def shown(value: float | None) -> str:
    """Format a figure with three or four significant digits."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 2 else f"{value:.2f}"


def _rounded(value: float) -> float:
    return round(value) if abs(value) >= 1000 else round(value, 3)
