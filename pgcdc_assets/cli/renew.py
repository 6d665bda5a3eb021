"""`pgcdc renew`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgcdc_assets.orchestration.project.code_location import LoadedCapture
    from pgcdc_assets.raw.epochs import Epoch


def run(options: argparse.Namespace) -> int:
    """Begin a new epoch of one capture."""
    from pgcdc_assets.capture.epoch import renew_epoch
    from pgcdc_assets.orchestration.project.code_location import load_location

    for loaded in load_location(options.module).select(options.name):
        capture = loaded.capture
        zone = loaded.lake.zone(capture.name)
        old = zone.epochs.latest()
        renewed = renew_epoch(
            loaded.postgres.settings(),
            zone,
            capture.slot,
            capture.publication,
            adopt_slot=options.adopt_slot,
            slot_policy=capture.slot_policy,
        )
        end = old and (zone.changes.captured_through(old.epoch) or old.start_lsn)
        print(
            f"{capture.name}: epoch {renewed.epoch} of slot {renewed.slot} starts at "
            f"{renewed.start_lsn}; epoch {renewed.epoch - 1} ended at {end}. The next pgcdc "
            "sync, or the sensors, take new snapshots of all tables."
        )
        if old is not None and old.slot != renewed.slot:
            _print_left_slot(loaded, old, renewed)
    return 0


def _print_left_slot(loaded: LoadedCapture, old: Epoch, renewed: Epoch) -> None:
    """Print how to drop the slot of the earlier epoch: the server keeps WAL for it."""
    from pgcdc_assets.postgres.slots.status import read_slot_status

    if old.system_identifier != renewed.system_identifier:
        return
    with loaded.postgres.query_connection("renew") as conn:
        status = read_slot_status(conn, old.slot)
    if status is not None and not status.is_lost:
        print(
            f"Slot {old.slot} of epoch {old.epoch} still exists, and the server keeps WAL for it. "
            f"If no other program reads the slot: select pg_drop_replication_slot('{old.slot}')"
        )
