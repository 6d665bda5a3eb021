"""Tables and figures on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as columns."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  " + "  ".join(cells).rstrip())


def size(byte_count: float) -> str:
    """Format a number of bytes, such as `4.8 MB`."""
    for unit in ("B", "kB", "MB"):
        if byte_count < 1000:
            return f"{byte_count:.0f} {unit}" if unit == "B" else f"{byte_count:.1f} {unit}"
        byte_count /= 1000
    return f"{byte_count:.1f} GB"


def duration(seconds: float) -> str:
    """Format a duration, such as `12 s`, `3 min 20 s`, `2 h 5 min` or `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, more = divmod(hours, 24)
    if days:
        return f"{days} d {more} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
