"""`pgcdc renew`."""

from __future__ import annotations

import argparse


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
    return 0
