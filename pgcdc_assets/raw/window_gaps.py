"""Ranges of WAL that no landed window has, between windows that are landed."""

from __future__ import annotations

from itertools import pairwise

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.zone import RawZone


def find_gaps(zone: RawZone, first: LsnWindow) -> list[tuple[Lsn, Lsn]]:
    """Return the gaps and overlaps directly before a landed window, and after it.

    Args:
        zone: the raw zone.
        first: the window.

    Returns:
        End of a window and start of the next, where the two differ.
    """
    since = Lsn(max(first.start - 1, 0))
    landed = [each.window for each in zone.changes.landed_windows(first.epoch, since)]
    borders = [(before.end, after.start) for before, after in pairwise(landed)]
    if landed and landed[0].start == first.start:
        borders.insert(0, (_find_end_before(zone, first), first.start))
    return [(end, start) for end, start in borders if end != start]


def _find_end_before(zone: RawZone, first: LsnWindow) -> Lsn:
    """Return the end of the window before, or where the first window of the epoch has to begin."""
    earlier = zone.changes.landed_windows(first.epoch, until=first.start)
    if earlier:
        return earlier[-1].window.end
    starts = {epoch.epoch: epoch.start_lsn for epoch in zone.epochs.all()}
    return zone.changes.kept_from(first.epoch) or starts.get(first.epoch, first.start)
