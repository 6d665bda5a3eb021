"""The slot that a session captures, and the raw zone that it fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.zone import RawZone

# The highest watermark of the SCD tables in an epoch.
MergedThrough = Callable[[int], Lsn | None]


def nothing_merged(epoch: int) -> Lsn | None:
    """Return None: the watermarks are not known, or there are none."""


@dataclass(frozen=True)
class CapturedSlot:
    """What one session captures.

    Attributes:
        settings: the source database.
        zone: the raw zone.
        slot: the slot's name.
        publication: the publication's name.
        limits: time limits and sizes.
        merged_through: the highest watermark of the SCD tables, which is above the end of a raw
            zone that was restored from an older copy.
    """

    settings: ConnectionSettings
    zone: RawZone
    slot: str
    publication: str
    limits: CaptureLimits
    merged_through: MergedThrough = nothing_merged
