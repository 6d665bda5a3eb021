"""`pgcdc status`."""

from __future__ import annotations

import argparse

from pgcdc_assets.cli.tables import print_table
from pgcdc_assets.orchestration.loading import LoadedCapture, load_location
from pgcdc_assets.orchestration.state import CaptureState, Position, read_state
from pgcdc_assets.postgres.slots import SlotStatus, read_slot_status


def run(options: argparse.Namespace) -> int:
    """Show where slot, raw zone and tables stand."""
    for loaded in load_location(options.module).select(options.name):
        with loaded.postgres.query_connection("status") as conn:
            slot = read_slot_status(conn, loaded.capture.slot)
        zone = loaded.lake.zone(loaded.capture.name)
        state = read_state(zone, loaded.capture)
        _print_slot(loaded, slot, state)
        _print_tables(state)
    return 0


def _print_slot(loaded: LoadedCapture, slot: SlotStatus | None, state: CaptureState) -> None:
    capture = loaded.capture
    print(f"{capture.name}: publication {capture.publication}, lake {loaded.lake.lake().uri}")
    if slot is None:
        print(f"  slot {capture.slot} {_why_missing(capture.name, state)}")
    else:
        active = "nobody" if slot.active_pid is None else f"process {slot.active_pid}"
        print(
            f"  slot {slot.slot}: {slot.wal_status}, read by {active}, confirmed through "
            f"{slot.confirmed_flush_lsn}, WAL at {slot.current_lsn}, lag {slot.lag_bytes} bytes, "
            f"retains {slot.retained_bytes} bytes"
        )
    if state.captured_through is None:
        print("  nothing is captured yet")
    else:
        print(
            f"  captured through {state.captured_through.lsn} of epoch "
            f"{state.captured_through.epoch}"
        )


def _why_missing(name: str, state: CaptureState) -> str:
    if state.epoch is None:
        return "does not exist yet: the first `pgcdc sync` makes it"
    return (
        f"does not exist, though epoch {state.epoch.epoch} was captured from slot "
        f"{state.epoch.slot}: `pgcdc renew --name {name}` begins a new epoch, with new copies of "
        "the tables"
    )


def _print_tables(state: CaptureState) -> None:
    rows = [
        (
            f"{table.table.qualified_name}",
            f"scd{table.scd}",
            _text(table.copied_at),
            "BROKEN" if table.is_broken else _text(table.merged_through),
            str(table.waiting_changes),
        )
        for table in state.tables
    ]
    if rows:
        print_table(("table", "kind", "copied at", "merged through", "changes waiting"), rows)


def _text(position: Position | None) -> str:
    return "never" if position is None else str(position.lsn)
