"""The whole pipeline once on the sample shop, with a comparison of every value at the end.

The shop's workload runs during the snapshots, and while the first windows are captured and merged.
Then the workload stops, the remaining changes are captured and merged, and each table of the lake
is compared with its source. All steps are Dagster runs on an instance in `.pgcdc`; `dev` shows
these runs in Dagster's UI.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import dagster as dg

from pgcdc_assets.activity import watched_by
from pgcdc_assets.cli.library_log import library_log
from pgcdc_assets.cli.tables import size
from pgcdc_assets.demo.console import Lines, print_progress, say, table
from pgcdc_assets.demo.interrupts import interrupts_at_signals
from pgcdc_assets.demo.stage import FOLDER, LiveWorkload, stage
from pgcdc_assets.errors import DifferenceFound
from pgcdc_assets.orchestration.feature_warnings import ignore_feature_warnings
from pgcdc_assets.orchestration.jobs.sync import sync_capture
from pgcdc_assets.orchestration.jobs.sync_report import SyncReport
from pgcdc_assets.orchestration.project.code_location import (
    CodeLocation,
    LoadedCapture,
    load_location,
)
from pgcdc_assets.orchestration.project.home import open_instance, state_folder
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.postgres.slots.status import SlotStatus, read_slot_status
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.verify import Comparison, compare_table

CAPTURE = "shop"


@dataclass
class Totals:
    """The figures of all syncs of a demonstration.

    Attributes:
        seconds: wall time by part, as in SyncReport.
        merged_changes: changes of the raw zone that merges folded, over all tables.
        copied_rows: rows of the snapshots.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    window_count: int = 0
    captured_changes: int = 0
    merged_changes: int = 0
    copied_rows: int = 0

    def add(self, report: SyncReport, instance: dg.DagsterInstance) -> None:
        """Add the figures of one sync, and those of its runs in Dagster's event log."""
        for part, seconds in report.seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.window_count += report.window_count
        self.captured_changes += report.change_count
        for run_id in report.run_ids:
            for entry in instance.all_logs(
                run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION
            ):
                event = entry.asset_materialization
                if event is None:
                    continue
                if event.asset_key.path[1] == "snapshot":
                    self.copied_rows += _figure(event, "dagster/partition_row_count")
                if event.asset_key.path[1] == "scd1":
                    self.merged_changes += _figure(event, "changes_read")


def run_demo(
    *,
    connections: int,
    rate: float,
    scale: float,
    seconds: float,
    fresh: bool,
    lake: str = FOLDER,
) -> int:
    """Run the demonstration, after `choose_lake`. SIGINT and SIGTERM stop its servers.

    Args:
        lake: where the lake is.
        seconds: duration of the workload after the merge of the snapshots.

    Raises:
        DifferenceFound: a table of the lake differs from its source.
    """
    with interrupts_at_signals(), library_log(state_folder() / "logs", "demo") as log:
        try:
            return _run(connections, rate, scale, seconds, lake, fresh=fresh)
        finally:
            if log.has_content():
                say(f"Output of libraries is in {log.path}")


def _run(
    connections: int, rate: float, scale: float, seconds: float, lake: str, *, fresh: bool
) -> int:
    _quiet()
    with stage(lake, fresh=fresh, scale=scale) as set_up, open_instance() as instance:
        say("Loading the definitions")
        with print_progress(lambda: "Dagster loads"):
            location = load_location()
        demo = _Demo(location, location.select(CAPTURE)[0], instance)
        with LiveWorkload(set_up.conninfo, connections=connections, rate=rate) as workload:
            say(f"The shop is open: {connections} connections, {rate:g} transactions a second")
            demo.start_spark()
            demo.sync("Snapshots, and changes committed during the snapshots")
            demo.let_lag_grow(seconds)
            committed = workload.stop()
        lag_before = demo.lag()
        say(
            f"The shop is closed after {sum(committed.values()):,} transactions; the slot's lag is "
            f"{size(lag_before)}"
        )
        demo.sync("The changes since")
        demo.sync("WAL that Postgres wrote by itself")
        lag_after = demo.lag()
        return demo.report(lag_before, lag_after)


class _Demo:
    """The steps of the demonstration on one loaded capture."""

    def __init__(
        self, location: CodeLocation, loaded: LoadedCapture, instance: dg.DagsterInstance
    ) -> None:
        self.location = location
        self.loaded = loaded
        self.instance = instance
        self.settings = loaded.postgres.settings()
        self.zone: RawZone = loaded.lake.zone(loaded.capture.name)
        self.totals = Totals()

    def start_spark(self) -> None:
        """Start the session of all merges."""
        say("Starting Spark; the first start downloads 87 MB of jars")
        started = time.monotonic()
        with print_progress(self._describe):
            self.loaded.spark.session(self.zone.lake)
        self.totals.seconds["session"] = time.monotonic() - started

    def sync(self, title: str) -> None:
        """Capture and merge every change that is committed at the time of the call."""
        say(title)
        with print_progress(self._describe), watched_by(Lines(say)):
            report = sync_capture(
                self.instance, self.location, self.loaded, say=lambda line: say(f"  {line}")
            )
        self.totals.add(report, self.instance)

    def let_lag_grow(self, seconds: float) -> None:
        """Wait while the workload writes."""
        with print_progress(self._describe):
            time.sleep(seconds)

    def lag(self) -> int:
        """Return the bytes of WAL that the slot has not confirmed."""
        status = self._slot()
        return (status.lag_bytes or 0) if status is not None else 0

    def report(self, lag_before: int, lag_after: int) -> int:
        """Compare all tables, and print the figures.

        Raises:
            DifferenceFound: a table differs from its source.
        """
        say("Comparing each table with its source, value by value")
        comparisons = []
        for each in self.loaded.capture.tables:
            with print_progress(partial("comparing {}".format, each.qualified_name)):
                found = compare_table(
                    self.settings,
                    self.zone,
                    self.loaded.capture.publication,
                    each.schema,
                    each.table,
                    each.key,
                )
            comparisons.append(found)
            say(f"  {each.qualified_name}: {found.source_rows:,} rows")
        print(f"\n{self._contents(comparisons)}\n\n{self._rates(lag_before, lag_after)}\n")
        different = [f"{c.schema}.{c.table}" for c in comparisons if not c.is_equal]
        if different:
            raise DifferenceFound(
                reason=f"These tables differ from their source: {', '.join(different)}. See "
                "`pgcdc verify` for the columns"
            )
        say("Every table of the lake equals its source")
        return 0

    def _contents(self, comparisons: Sequence[Comparison]) -> str:
        copied, changed = self._raw_rows()
        rows = []
        for each in comparisons:
            name = f"{each.schema}.{each.table}"
            rows.append(
                (
                    name,
                    each.source_rows,
                    copied.get(name, 0),
                    changed.get(name, 0),
                    each.target_rows,
                    "yes" if each.is_equal else "NO",
                )
            )
        header = ("table", "source rows", "raw: copied", "raw: changes", "SCD1 rows", "equal")
        return table(header, rows)

    def _rates(self, lag_before: int, lag_after: int) -> str:
        totals = self.totals
        merged = totals.merged_changes + totals.copied_rows
        rows = [
            ("slot lag before, after", f"{size(lag_before)}, {size(lag_after)}", ""),
            _rate("copied rows", totals.copied_rows, totals.seconds.get("snapshot", 0)),
            _rate(
                f"captured changes ({totals.window_count} windows)",
                totals.captured_changes,
                totals.seconds.get("capture", 0),
            ),
            _rate("merged rows and changes", merged, totals.seconds.get("merge", 0)),
            ("start of the Spark session", f"{totals.seconds.get('session', 0):.1f} s", ""),
        ]
        return table(("this demonstration", "amount", "rows per second"), rows)

    def _raw_rows(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the rows of complete snapshots and of changes in the raw zone, by table."""
        copied: dict[str, int] = {}
        for copy in self.zone.snapshots.complete_snapshots():
            name = f"{copy.schema}.{copy.table}"
            copied[name] = copied.get(name, 0) + copy.row_count
        changed: dict[str, int] = {}
        for epoch in self.zone.epochs.all():
            for window in self.zone.changes.windows(epoch.epoch):
                for name, counts in window.counts.items():
                    changed[name] = changed.get(name, 0) + sum(counts.values())
        return copied, changed

    def _slot(self) -> SlotStatus | None:
        with self.loaded.postgres.query_connection("demo") as connection:
            return read_slot_status(connection, self.loaded.capture.slot)

    def _describe(self) -> str:
        status = self._slot()
        if status is None:
            return "no slot yet"
        state = read_state(self.zone, self.loaded.capture)
        waiting = sum(each.needs_merge for each in state.tables)
        return (
            f"slot lag {size(status.lag_bytes or 0)}, "
            f"{waiting} of {len(state.tables)} tables wait for a merge"
        )


def _quiet() -> None:
    """Keep Dagster's log off the console; the log is in Dagster's instance."""
    logging.getLogger("dagster").setLevel(logging.CRITICAL)
    ignore_feature_warnings()


def _rate(name: str, count: int, seconds: float) -> tuple[str, str, str]:
    rate = f"{count / seconds:,.0f}" if seconds > 0 and count else ""
    return name, f"{count:,} in {seconds:.1f} s", rate


def _figure(event: dg.AssetMaterialization, name: str) -> int:
    """Return a number of an event's metadata; 0 if the entry is missing."""
    entry = event.metadata.get(name)
    value = getattr(entry, "value", None)
    return int(value) if isinstance(value, int | float) else 0
