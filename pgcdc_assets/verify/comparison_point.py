"""The moment of a comparison: a snapshot of the source, and its LSN.

The creation of a logical slot returns both: exactly the transactions with a commit LSN below the
slot's consistent point are visible in its snapshot. So the rows of the snapshot and a table folded
through this LSN must be equal, also while writers commit.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.copy import hold_snapshot
from pgcdc_assets.postgres.slot_creation import create_slot
from pgcdc_assets.raw.zone import RawZone

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Moment:
    """Where both sides are compared.

    Attributes:
        epoch: the epoch of the capture's slot that the LSN belongs to.
        lsn: everything with a lower commit LSN is in the snapshot, and nothing else.
        snapshot_name: usable by other sessions while the moment is held.
    """

    epoch: int
    lsn: Lsn
    snapshot_name: str


@contextlib.contextmanager
def source_moment(settings: ConnectionSettings, zone: RawZone, slot: str) -> Iterator[Moment]:
    """Take a moment and hold it inside the block; the temporary slot is gone at once.

    A held snapshot keeps VACUUM on the source from removing rows that died since, as any long
    query does.

    Args:
        slot: the capture's slot; the temporary one is named after it.

    Raises:
        ConfigurationError: nothing was captured yet, or no slot is free.
        TransientError: an open transaction did not end within `settings.lock_timeout_ms`.
    """
    epoch = zone.epochs.latest()
    if epoch is None:
        raise ConfigurationError(
            reason=f"Nothing was captured for {zone.name} yet, so there is nothing to compare. Run "
            "`pgcdc sync`."
        )
    marker = f"{slot[:43]}_verify_{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        with create_slot(settings, marker, temporary=True) as made:
            name = stack.enter_context(hold_snapshot(settings, made.snapshot_name))
        yield Moment(epoch.epoch, made.consistent_point, name)


def wait_captured(zone: RawZone, moment: Moment, limit_seconds: float) -> None:
    """Wait until all changes before the moment are captured.

    Raises:
        TransientError: the changes were not captured within the limit.
    """
    deadline = time.monotonic() + limit_seconds
    while True:
        through = zone.changes.captured_through(moment.epoch)
        if through is not None and through >= moment.lsn:
            return
        if time.monotonic() > deadline:
            raise TransientError(
                reason=f"The source was read at {moment.lsn}, but {zone.name} is captured through "
                f"{through or 'nothing'} only, after {limit_seconds:g} s. Turn on the lag sensor, "
                "or run `pgcdc verify`, which captures by itself."
            )
        time.sleep(_POLL_SECONDS)
