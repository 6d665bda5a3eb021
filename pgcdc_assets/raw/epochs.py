"""`raw/epochs`: slot, database and server of each epoch."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pgcdc_assets.errors import RawZoneError, TransientError, renewal_command
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta.newest_versions import NewestVersions
from pgcdc_assets.raw.delta.scan import data_files, scan
from pgcdc_assets.raw.delta.table import RawTable


@dataclass(frozen=True)
class Epoch:
    """One incarnation of the slot.

    Attributes:
        epoch: number of the epoch: 1, 2, ...
        start_lsn: the slot's consistent point, which is the start of the first window.
        slot: the slot's name.
        publication: the publication's name.
        database: the database's name.
        system_identifier: identifier of the cluster, from pg_control_system().
        timeline: the server's timeline at the start of the epoch.
        server_version: `server_version_num`.
        created_at: time of the epoch's start.
        shared_through: LSN through which the server has the WAL of the epochs before; None: all of
            it. 0 if the server has lost WAL, and it is not known from where on.
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
    shared_through: Lsn | None = None


_EPOCHS = NewestVersions[tuple[Epoch, ...]](100)


@dataclass(frozen=True)
class EpochLog:
    """The epochs of one capture.

    Attributes:
        table: the Delta table.
        capture: the capture's name.
    """

    table: RawTable
    capture: str

    def all(self) -> list[Epoch]:
        """Return the epochs, oldest first."""
        return list(_EPOCHS.get(self.table.lake, self.table.uri, self.capture, self._read) or ())

    def _read(self) -> tuple[int, tuple[Epoch, ...]] | None:
        loaded = self.table.load()
        if loaded is None:
            return None
        names = [f.name for f in fields(Epoch)]
        epochs = [
            _epoch(row)
            for batch in scan(self.table, data_files(loaded), names)
            for row in batch.to_pylist()
        ]
        return loaded.version(), tuple(sorted(epochs, key=lambda epoch: epoch.epoch))

    def create_id(self) -> str:
        """Return the identifier of the table, which is created if it does not exist.

        The table of a copied lake has the same identifier.
        """
        return str(self.table.load_or_create().metadata().id)

    def find_id(self) -> str | None:
        """Return the identifier of the table; None if the table does not exist."""
        table = self.table.load()
        return None if table is None else str(table.metadata().id)

    def latest(self) -> Epoch | None:
        """Return the current epoch; None before the first epoch."""
        epochs = self.all()
        return epochs[-1] if epochs else None

    def append(self, epoch: Epoch) -> None:
        """Record a new epoch.

        Raises:
            RawZoneError: the epoch's number is not the next number.
            TransientError: another process recorded an epoch at the same time.
        """
        table = self.table.load_or_create()
        latest = self.latest()
        expected = 1 if latest is None else latest.epoch + 1
        if epoch.epoch != expected:
            raise RawZoneError(
                raw_zone=self.table.uri,
                reason=f"epoch {epoch.epoch} cannot be recorded, the next epoch is {expected}.",
            )
        row = {f.name: getattr(epoch, f.name) for f in fields(Epoch)}
        if not self.table.commit_rows(
            table,
            [row],
            app_id=f"pgcdc:{self.capture}:epochs",
            app_version=epoch.epoch,
            record={"epoch": epoch.epoch, "slot": epoch.slot},
        ):
            raise TransientError(
                reason=f"Another process recorded an epoch in {self.table.uri} at the same time. "
                "Run it again."
            )

    def check_source(self, *, slot: str, database: str, system_identifier: str) -> Epoch | None:
        """Return the current epoch; None before the first epoch.

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
                reason=f"the lake was filled from {_source(*found)}, not from "
                f"{_source(slot, database, system_identifier)}. If the same data was moved, such "
                f"as by dump and restore, begin a new epoch with {renewal_command(self.capture)}; "
                "otherwise give this capture another lake or another name.",
            )
        return latest


def _epoch(row: Mapping[str, Any]) -> Epoch:
    # Early releases did not write `shared_through`.
    shared = row["shared_through"]
    lsns = {
        "start_lsn": Lsn(row["start_lsn"]),
        "shared_through": None if shared is None else Lsn(shared),
    }
    return Epoch(**{**row, **lsns})


def _source(slot: str, database: str, system_identifier: str) -> str:
    return f"slot {slot} of database {database} on cluster {system_identifier}"
