"""`raw/epochs`: which slot of which server each epoch was captured from."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, fields

import pyarrow as pa

from pgcdc_assets.errors import RawZoneError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.scan import data_files, scan
from pgcdc_assets.raw.table import CommitRefused, RawTable


@dataclass(frozen=True)
class Epoch:
    """One incarnation of the slot.

    Attributes:
        epoch: its number: 1, 2, ...
        start_lsn: the slot's consistent point; the first window starts here.
        server_version: `server_version_num`.
    """

    epoch: int
    start_lsn: Lsn
    slot: str
    publication: str
    database: str
    system_identifier: str
    timeline: int
    server_version: int
    created_at: dt.datetime


@dataclass(frozen=True)
class EpochLog:
    """The epochs of one capture, in order."""

    table: RawTable
    capture: str

    def all(self) -> list[Epoch]:
        """List the epochs, oldest first."""
        loaded = self.table.load()
        if loaded is None:
            return []
        names = [f.name for f in fields(Epoch)]
        epochs = [
            Epoch(**{**row, "start_lsn": Lsn(row["start_lsn"])})
            for batch in scan(self.table, data_files(loaded), names)
            for row in batch.to_pylist()
        ]
        return sorted(epochs, key=lambda epoch: epoch.epoch)

    def latest(self) -> Epoch | None:
        """Give the epoch that is captured now; None before the first."""
        epochs = self.all()
        return epochs[-1] if epochs else None

    def append(self, epoch: Epoch) -> None:
        """Record a new epoch.

        Raises:
            RawZoneError: its number does not follow the last one.
            TransientError: another process recorded an epoch at the same moment.
        """
        table = self.table.load_or_create()
        latest = self.latest()
        expected = 1 if latest is None else latest.epoch + 1
        if epoch.epoch != expected:
            raise RawZoneError(
                raw_zone=self.table.uri,
                reason=f"epoch {epoch.epoch} cannot be recorded, the next one is {expected}.",
            )
        row = {f.name: getattr(epoch, f.name) for f in fields(Epoch)}
        rows = pa.Table.from_pylist([row], schema=self.table.schema)
        with self.table.writer() as writer:
            writer.write(rows)
            files = writer.finish()
        try:
            self.table.commit(
                table,
                files,
                app_id=f"pgcdc:{self.capture}:epochs",
                app_version=epoch.epoch,
                record={"epoch": epoch.epoch, "slot": epoch.slot},
            )
        except CommitRefused as refusal:
            raise TransientError(
                reason=f"Another process recorded an epoch in {self.table.uri} at the same moment. "
                "Run it again."
            ) from refusal

    def check_source(self, *, slot: str, database: str, system_identifier: str) -> Epoch | None:
        """Give the current epoch, after checking that it was captured from this very slot.

        Raises:
            RawZoneError: the raw zone was filled from another slot, database or cluster.
        """
        latest = self.latest()
        if latest is None:
            return None
        found = (latest.slot, latest.database, latest.system_identifier)
        if found != (slot, database, system_identifier):
            raise RawZoneError(
                raw_zone=self.table.uri,
                reason=f"it was filled from {_source(*found)}, not from "
                f"{_source(slot, database, system_identifier)}. If the same data moved there, as "
                "by a dump and restore, begin a new epoch with pgcdc renew; if not, give this "
                "capture another lake or another name.",
            )
        return latest


def _source(slot: str, database: str, system_identifier: str) -> str:
    return f"slot {slot} of database {database} on cluster {system_identifier}"
