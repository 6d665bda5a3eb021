"""The form of a benchmark's result, and the file that keeps the newest ones."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")
FIRST = "capture_vs_pg_recvlogical"


@dataclass(frozen=True)
class Result:
    """One measurement beside its baseline.

    Attributes:
        ours: median of our repetitions.
        baseline: median of the baseline's repetitions in the same run, or a fixed limit, as the
            unit says; None when a figure is only reported.
        ratio: ours / baseline.
        unit: of ours and baseline.
    """

    name: str
    ours: float
    baseline: float | None
    ratio: float | None
    unit: str
    repetitions: int

    @classmethod
    def of(cls, name: str, ours: Sequence[float], baseline: Sequence[float], unit: str) -> Result:
        """Compare the medians of two series taken in turns."""
        mine, theirs = statistics.median(ours), statistics.median(baseline)
        return cls(name, _rounded(mine), _rounded(theirs), round(mine / theirs, 3), unit, len(ours))

    @classmethod
    def against_limit(cls, name: str, ours: Sequence[float], limit: float, unit: str) -> Result:
        """Compare the median of a series with a fixed limit."""
        mine = statistics.median(ours)
        return cls(
            name,
            _rounded(mine),
            limit,
            round(mine / limit, 3),
            f"{unit}, limit {limit:g}",
            len(ours),
        )

    @classmethod
    def reported(cls, name: str, ours: Sequence[float], unit: str) -> Result:
        """Report the median of a series that has no baseline."""
        return cls(name, _rounded(statistics.median(ours)), None, None, unit, len(ours))


def save(results: Iterable[Result]) -> None:
    """Replace the results of the same names in the file, and keep the others."""
    known = (
        {entry["name"]: entry for entry in json.loads(RESULTS.read_text())}
        if RESULTS.exists()
        else {}
    )
    known.update({result.name: asdict(result) for result in results})
    ordered = sorted(known.values(), key=lambda entry: entry["name"] != FIRST)
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")


def table(results: Iterable[Result]) -> str:
    """Lay results out for people."""
    rows = [("name", "ours", "baseline", "ratio", "unit", "repetitions")]
    rows += [
        (
            result.name,
            f"{result.ours:,}",
            "" if result.baseline is None else f"{result.baseline:,}",
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


def _rounded(value: float) -> float:
    return round(value) if abs(value) >= 1000 else round(value, 3)
