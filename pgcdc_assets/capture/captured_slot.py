"""The slot that a session captures, and the raw zone that it fills."""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.zone import RawZone


@dataclass(frozen=True)
class CapturedSlot:
    """What one session captures.

    Attributes:
        settings: the source database.
        zone: the raw zone.
        slot: the slot's name.
        publication: the publication's name.
        limits: time limits and sizes.
    """

    settings: ConnectionSettings
    zone: RawZone
    slot: str
    publication: str
    limits: CaptureLimits
