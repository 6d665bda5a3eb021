"""The form of a benchmark's result, and the file that keeps the newest one of each name."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
FIRST = "capture_vs_pg_recvlogical"

# An entry of results.json: a result, and when, on what and with which settings it was measured.
Entry = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One measurement beside its baseline.

    Attributes:
        ours: median of our repetitions, or what the name says (`_p95`, `_at_most`).
        baseline: median of the baseline's repetitions in the same run, or a fixed limit, as the
            unit says; None when a figure is only reported.
        ratio: ours / baseline.
        unit: of ours and baseline, and of all that follows.
        minimum: the least of our repetitions; `median` and `maximum` follow.
        baseline_minimum: the least of the baseline's repetitions; None for a limit.
        settings: what holds for this result only.
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
        """Compare the medians of two series taken in turns."""
        theirs = statistics.median(baseline)
        return replace(
            cls.reported(name, ours, unit),
            baseline=_rounded(theirs),
            # A process may end before its memory is read for the first time.
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
            value: what is compared, if not the median of the series.
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
        context: what all results of one run of a benchmark share; the result's own settings come
            on top of those in it.
    """
    settings = {**context["settings"], **result.settings}
    return {**asdict(result), **context, "settings": settings}


def read_entries() -> list[Entry]:
    """Return the newest entry of each name."""
    entries: list[Entry] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return entries


def save(entries: Iterable[Entry]) -> None:
    """Put entries in the place of those of their benchmarks in the file; the others stay.

    A result that a benchmark no longer has does not outlive its next run.
    """
    new = list(entries)
    run = {entry["benchmark"] for entry in new}
    kept = [entry for entry in read_entries() if entry["benchmark"] not in run]
    ordered = sorted([*kept, *new], key=lambda entry: bool(entry["name"] != FIRST))
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")


def table(results: Iterable[Result]) -> str:
    """Lay results out for a terminal."""
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
    """Write a figure with three or four digits that count."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 2 else f"{value:.2f}"


def _rounded(value: float) -> float:
    return round(value) if abs(value) >= 1000 else round(value, 3)
