"""First epochs of a capture."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import TYPE_CHECKING

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.epochs import Epoch

if TYPE_CHECKING:
    from pgcdc_assets.postgres.slots.status import ServerIdentity

# The first epoch of a slot that does not exist. `dataclasses.replace` derives other epochs.
EPOCH = Epoch(
    epoch=1,
    start_lsn=Lsn(99),
    slot="pgcdc_test",
    publication="shop",
    database="db",
    system_identifier="7000000000000000001",
    timeline=1,
    server_version=180004,
    created_at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
)


def first_epoch(identity: ServerIdentity, slot: str, publication: str, start: Lsn) -> Epoch:
    """Return the first epoch of a slot of a server."""
    return replace(
        EPOCH,
        start_lsn=start,
        slot=slot,
        publication=publication,
        database=identity.database,
        system_identifier=identity.system_identifier,
        timeline=identity.timeline,
        server_version=identity.server_version,
        created_at=dt.datetime.now(dt.UTC),
    )
