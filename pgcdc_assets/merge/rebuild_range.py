"""The range of changes that a rebuild folds."""

from __future__ import annotations

from pgcdc_assets.errors import ConfigurationError, RawExpired
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge.replaced_table import ReplacedTable
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.schema_gate import read_gate
from pgcdc_assets.tables.tables_ahead import RawEnd


def find_range(zone: RawZone, target: CdcTable, scd: int, through: Lsn | None) -> LsnWindow:
    """Return the range to be folded; only its epoch and its end are used.

    Raises:
        ConfigurationError: nothing is captured yet, or the LSN is outside of the captured range.
        RawExpired: retention removed the LSN.
    """
    epochs = zone.epochs.all()
    if not epochs:
        raise ConfigurationError(
            reason=f"Nothing was captured for {zone.name} yet. Run `pgcdc sync`."
        )
    # A table that left the publication ends with its last epoch.
    copied = {
        each.epoch for each in zone.snapshots.complete_snapshots() if each.name == target.name
    }
    epoch = next((each for each in reversed(epochs) if each.epoch in copied), epochs[-1])
    captured = zone.changes.captured_through(epoch.epoch) or epoch.start_lsn
    if through is None:
        gate = read_gate(zone, target, scd, None, Position(epoch.epoch, captured))
        waits = gate is not None and gate.heals and gate.hold.epoch == epoch.epoch
        through = min(captured, gate.hold.lsn) if gate is not None and waits else captured
    if through > captured:
        raise ConfigurationError(
            reason=f"{zone.name} is captured through {captured}, so nothing can be rebuilt through "
            f"{through}. Run `pgcdc sync` first, or name an LSN up to {captured}."
        )
    floor = zone.changes.kept_from(epoch.epoch)
    if floor is not None and through < floor:
        raise RawExpired(what=f"A rebuild through {through}", floor=floor, capture=zone.name)
    if through < epoch.start_lsn:
        raise ConfigurationError(
            reason=f"Epoch {epoch.epoch} of {zone.name} starts at {epoch.start_lsn}, so nothing "
            f"can be rebuilt through {through}. Name an LSN from there up to {captured}."
        )
    return LsnWindow.of(epoch.epoch, 0, through)


def is_taken_back(
    zone: RawZone, target: CdcTable, live: ReplacedTable, through: Lsn | None
) -> bool:
    """Return whether the raw zone is older than the table, as after a restore of the raw zone.

    Raises:
        ConfigurationError: the rebuilt table would lack changes of the live table, and no LSN was
            asked for.
    """
    mark, raw_end = live.watermark, RawEnd.read(zone)
    assert raw_end is not None
    end = raw_end.of(target.name)
    if mark is None or mark <= end:
        return False
    found = (
        f"The Delta table {live.path} is merged through {mark.lsn} of epoch {mark.epoch}, but the "
        f"raw zone ends at {end.lsn} of epoch {end.epoch}, as after a restore of an older copy. A "
        "rebuild would lose the changes in between, so the table was not changed."
    )
    if mark.epoch > raw_end.captured.epoch:
        raise ConfigurationError(
            reason=f"{found} Restore the raw zone and the table from one time, or move the table "
            "to another folder; the next merge creates it again."
        )
    if through is None:
        raise ConfigurationError(
            reason=f"{found} Restore the raw zone and the table from one time. To rebuild the "
            f"table without them, name the LSN: --through {raw_end.captured.lsn}"
        )
    return True
