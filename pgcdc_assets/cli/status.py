"""`pgcdc status`."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import sys
import time
from collections.abc import Mapping, Sequence

import dagster as dg

from pgcdc_assets.cli.output import complain, discard
from pgcdc_assets.cli.tables import duration, print_table, size
from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.lsn import Position
from pgcdc_assets.orchestration.checks.schema_changes import remedy_of
from pgcdc_assets.orchestration.checks.source_tables import read_table_places
from pgcdc_assets.orchestration.project.code_location import LoadedCapture, load_location
from pgcdc_assets.orchestration.project.home import open_instance
from pgcdc_assets.orchestration.runs.merge_failures import find_merge_failures
from pgcdc_assets.orchestration.state import CaptureState, TableState, left_tables, read_state
from pgcdc_assets.postgres.prepared_transactions import (
    OpenPreparedTransaction,
    read_prepared_transactions,
)
from pgcdc_assets.postgres.slots.health import slot_health
from pgcdc_assets.postgres.slots.status import SlotStatus, read_slot_status
from pgcdc_assets.postgres.snapshots.age import SnapshotAge, read_held_snapshot
from pgcdc_assets.raw.ranges import UnfinishedCopy
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.messages import MessageTable
from pgcdc_assets.tables.tables_ahead import find_tables_ahead

# Control sequences of ECMA-48: cursor to the first line, erase the screen.
_CLEAR = "\x1b[H\x1b[2J"


def run(options: argparse.Namespace) -> int:
    """Print the state of slot, raw zone and tables, once or at an interval until Ctrl-C."""
    captures = load_location(options.module).select(options.name)
    if options.watch is None:
        failures = _print_all(captures)
        if len(captures) == 1 and failures:
            [error] = failures.values()
            raise error
        for name, error in failures.items():
            complain(f"{name}: {error}")
        return max((error.exit_status for error in failures.values()), default=0)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(captures, options.watch)
    except BrokenPipeError:
        discard(sys.stdout)
    return 0


def _watch(captures: Sequence[LoadedCapture], seconds: float) -> None:
    is_screen = sys.stdout is not None and sys.stdout.isatty()
    while True:
        print(f"{_CLEAR if is_screen else ''}{time.strftime('%Y-%m-%d %H:%M:%S')}")
        for name, error in _print_all(captures).items():
            if not isinstance(error, TransientError):
                raise error
            print(f"{name}: UNKNOWN {error}")
        print(flush=True)
        time.sleep(seconds)


def _print_all(captures: Sequence[LoadedCapture]) -> dict[str, PgcdcError]:
    """Print all captures, and return the errors of those that cannot be printed, by their names."""
    failures = {}
    with open_instance() as instance:
        for loaded in captures:
            try:
                _print(instance, loaded)
            except PgcdcError as error:
                failures[loaded.capture.name] = error
    return failures


def _print(instance: dg.DagsterInstance, loaded: LoadedCapture) -> None:
    with loaded.postgres.query_connection("status") as conn:
        slot = read_slot_status(conn, loaded.capture.slot)
        held = read_held_snapshot(conn, loaded.postgres.settings())
        prepared = read_prepared_transactions(conn)
    zone = loaded.lake.zone(loaded.capture.name)
    state = read_state(zone, loaded.capture)
    _print_slot(loaded, slot, state, _seconds_since_landing(instance, loaded))
    if (ahead := find_tables_ahead(zone, loaded.capture).error) is not None:
        print(f"  PROBLEM {ahead}")
    stopped = find_merge_failures(instance, loaded.capture.name, state.tables)
    _print_tables(loaded.capture.name, state, stopped)
    if loaded.capture.has_message_table:
        print_messages(MessageTable(zone), state.captured_through)
    if state.epoch is not None:
        _print_copies(zone.ranges.unfinished_copies(state.epoch.epoch))
    _print_held_snapshot(held)
    _print_prepared(prepared)
    if loaded.capture.selection is not None:
        for table in zone.table_list.read().tables:
            if table.reason:
                print(f"  {table.state.upper()} {table.name}: {table.reason}")
    _print_places(loaded, zone)


def _print_places(loaded: LoadedCapture, zone: RawZone) -> None:
    """Print the declared tables with another name at the source, and those not captured."""
    places = read_table_places(loaded.postgres.settings(), zone, loaded.capture, "status")
    left = left_tables(zone, loaded.capture)
    for table, place in places.items():
        if place.is_renamed:
            print(f"  RENAMED {place.declared} is named {place.name} at the source")
        elif place.error is not None and table.name not in left:
            print(f"  MOVED {place.error}")


def _seconds_since_landing(instance: dg.DagsterInstance, loaded: LoadedCapture) -> float | None:
    event = instance.get_latest_materialization_event(loaded.raw)
    return None if event is None else max(0.0, time.time() - event.timestamp)


def _print_slot(
    loaded: LoadedCapture,
    slot: SlotStatus | None,
    state: CaptureState,
    since_landing: float | None,
) -> None:
    capture = loaded.capture
    print(f"{capture.name}: publication {capture.publication}, lake {loaded.lake.lake().uri}")
    through = None if state.captured_through is None else state.captured_through.lsn
    health = slot_health(slot, through)
    if slot is not None:
        active = "no process" if slot.active_pid is None else f"process {slot.active_pid}"
        print(
            f"  slot {slot.slot}: {health.wal_status}, read by {active}, confirmed through "
            f"{slot.confirmed_flush_lsn}, WAL at {slot.current_lsn}, lag "
            f"{size(slot.lag_bytes or 0)}, retains {size(slot.retained_bytes or 0)} of WAL"
        )
    if slot is None and state.epoch is None:
        print(f"  slot {capture.slot} does not exist yet: the first `pgcdc sync` creates it")
    elif health.problem is not None:
        uri = loaded.lake.zone(capture.name).uri
        print(f"  PROBLEM {health.error(capture.slot, uri, capture.name)}")
    elif health.is_at_risk:
        print(f"  WARNING {health.risk} {health.risk_remedy}")
    if state.captured_through is None:
        print("  nothing is captured yet")
    else:
        print(
            f"  captured through {state.captured_through.lsn} of epoch "
            f"{state.captured_through.epoch}{_uncaptured(slot, state, since_landing)}"
        )


def _uncaptured(slot: SlotStatus | None, state: CaptureState, since_landing: float | None) -> str:
    """Describe the WAL after the captured changes, which includes the WAL of other databases."""
    assert state.captured_through is not None
    if slot is None:
        return ""
    behind = max(0, int(slot.current_lsn) - int(state.captured_through.lsn))
    if not behind:
        return ", 0 B and 0 s behind the server"
    age = "" if since_landing is None else f" and at most {duration(since_landing)}"
    return f", {size(behind)} of WAL{age} behind the server"


def _print_tables(capture: str, state: CaptureState, stopped: Mapping[str, str]) -> None:
    rows = [
        (
            f"{table.table.qualified_name}",
            f"scd{table.scd}",
            _text(table.snapshot_at),
            _text(table.merged_through),
            str(table.waiting_changes),
            _word(table, stopped),
        )
        for table in state.tables
    ]
    if rows:
        header = ("table", "kind", "snapshot at", "merged through", "changes to merge", "state")
        print_table(header, rows)
    for name, reason in stopped.items():
        print(f"  STOPPED {name}: {reason}")
    gates = {t.table.qualified_name: t.gate for t in state.tables if t.gate is not None}
    for name, gate in gates.items():
        print(f"  SCHEMA CHANGE {name}: {gate.reason} {remedy_of(capture, gate)}")


def print_messages(table: MessageTable, captured_through: Position | None) -> None:
    """Print through where logical messages are in their table, and whether messages wait."""
    mark = table.watermark()
    shown = "none yet" if mark is None else f"through {mark.lsn} of epoch {mark.epoch}"
    waits = captured_through is not None and table.find_waiting(mark, captured_through) is not None
    print(f"  logical messages: {shown}{', and more wait for their append' if waits else ''}")


def _word(table: TableState, stopped: Mapping[str, str]) -> str:
    if table.needs_merge and table.table.qualified_name in stopped:
        return "STOPPED"
    if table.is_broken:
        return "BROKEN"
    if table.needs_merge:
        return "waits for its merge"
    if table.has_left:
        return "left the publication"
    if table.snapshot_at is None:
        return "waits for its snapshot"
    return "waits for a re-snapshot" if table.is_held or table.is_healing else "ok"


def _text(position: Position | None) -> str:
    return "never" if position is None else str(position.lsn)


def _print_held_snapshot(held: SnapshotAge | None) -> None:
    """Print the age of the server's snapshot that a running snapshot of tables holds."""
    if held is not None:
        print(
            f"  SNAPSHOT of the server held for {duration(held.seconds)}, "
            f"{held.transactions:,} transactions old"
        )


def _print_prepared(prepared: Sequence[OpenPreparedTransaction]) -> None:
    """Print the prepared transactions that have not ended, with their age."""
    for each in prepared:
        word = "WARNING prepared" if each.is_forgotten else "PREPARED"
        age = duration(each.age.total_seconds())
        remedy = f". {each.remedy}" if each.is_forgotten else ""
        print(f"  {word} transaction {each.gid!r} (xid {each.xid}), {age} old{remedy}")


def _print_copies(copies: Sequence[UnfinishedCopy]) -> None:
    """Print the progress of tables whose snapshot is running, or was interrupted."""
    for copy in copies:
        age = (dt.datetime.now(dt.UTC) - copy.read_at).total_seconds()
        left = duration(copy.seconds_left)
        print(
            f"  COPY of {copy.name}: {copy.pages_read:,} of {copy.page_count:,} pages in "
            f"{copy.range_count} ranges, {copy.row_count:,} rows, {size(copy.byte_count)}; the "
            f"last range {duration(max(0.0, age))} ago, about {left} for the others. "
            "The next snapshot of the table continues an interrupted copy"
        )
