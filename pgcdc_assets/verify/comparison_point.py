"""The moment of a comparison: a snapshot of the source and its LSN.

The creation of a logical slot returns a snapshot and an LSN, the consistent point. The snapshot
shows exactly the transactions with a commit LSN below the consistent point. So the rows of the
snapshot equal a table that is merged through this LSN, also while writers commit.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from pgcdc_assets.capture.source_checks import check_server_timeline
from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.reader import hold_snapshot
from pgcdc_assets.postgres.slots.creation import create_slot
from pgcdc_assets.postgres.slots.status import read_server_identity
from pgcdc_assets.postgres.wal.timelines import server_timeline
from pgcdc_assets.raw.zone import RawZone

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Moment:
    """The moment at which source and target are compared.

    Attributes:
        epoch: the epoch of the LSN.
        lsn: the snapshot shows exactly the transactions with a lower commit LSN.
        snapshot_name: name of the snapshot for other sessions while the moment is held.
    """

    epoch: int
    lsn: Lsn
    snapshot_name: str


@contextlib.contextmanager
def source_moment(settings: ConnectionSettings, zone: RawZone, slot: str) -> Iterator[Moment]:
    """Choose a moment, and hold its snapshot inside the block. The temporary slot is dropped first.

    A held snapshot prevents VACUUM on the source from removing dead rows, as a long query does.

    Args:
        slot: the capture's slot; the name of the temporary slot is derived from its name.

    Raises:
        ConfigurationError: nothing is captured yet, or the server has no free slot.
        RawZoneError: the lake was filled from another source, or from WAL that the server lacks.
        TransientError: an open transaction did not end within `settings.lock_timeout_ms`.
    """
    epoch = zone.epochs.latest()
    if epoch is None:
        raise ConfigurationError(
            reason=f"Nothing is captured for {zone.name} yet, so there is nothing to compare. Run "
            "`pgcdc sync`."
        )
    _check_source(settings, zone, slot)
    marker = f"{slot[:43]}_verify_{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        with create_slot(settings, marker, temporary=True) as made:
            name = stack.enter_context(hold_snapshot(settings, made.snapshot_name))
        yield Moment(epoch.epoch, made.consistent_point, name)


def _check_source(settings: ConnectionSettings, zone: RawZone, slot: str) -> None:
    """Check that the LSNs of the server are those of the lake, as a capture does.

    Raises:
        RawZoneError: the lake was filled from another source, or from WAL that the server lacks.
    """
    with query_connection(settings, "verify") as conn:
        server = read_server_identity(conn)
    zone.epochs.check_source(
        slot=slot, database=server.database, system_identifier=server.system_identifier
    )
    with server_timeline(settings) as found:
        check_server_timeline(zone, found)


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
                "or run `pgcdc verify`, which captures the changes itself."
            )
        time.sleep(_POLL_SECONDS)
