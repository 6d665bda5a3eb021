"""Merge of the workload's orders into SCD1, beside a Spark job that copies the raw rows.

The baseline writes the same raw rows unchanged to a Delta table, without types, order and key. Both
sides run in one warm embedded session, in turns, and the figures are medians. The workload is
captured as two windows. `merge_scd1_vs_plain_write` folds both windows into a new table.
`merge_scd1_second_window_vs_plain_write` folds the second window into the table of the first
window, so that rows are matched, updated and deleted.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks import workload
from benchmarks.results import Result
from benchmarks.source import Source, log, source
from benchmarks.turns import in_turns
from pgcdc_assets.capture.window import capture_window
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.session import spark_session

REPETITIONS = 5
_WARM_UP = 2
_NAME = "bench"
ORDERS = CdcTable("public", "orders")


def run() -> Iterator[Result]:
    """Measure both merges."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-bench-merge-") as folder:
        root = Path(folder)
        with source(workload.run) as server:
            windows = capture_orders(server, RawZone(Lake(str(root / "captured")), _NAME))
        spark = spark_session("pgcdc benchmark")
        try:
            yield from _measure(spark, root, windows)
        finally:
            spark.stop()


def capture_orders(server: Source, zone: RawZone) -> list[LsnWindow]:
    """Land the workload as two windows, after empty snapshots."""
    middle = Lsn((server.start + server.end) // 2)
    windows = [
        LsnWindow.of(1, server.start, middle),
        LsnWindow.of(1, middle, server.end),
    ]
    settings = ConnectionSettings(conninfo=server.conninfo(), name=_NAME)
    with server.slot() as slot:
        server.record_epoch(zone, slot)
        for window in windows:
            report = capture_window(settings, zone, slot, workload.PUBLICATION, window)
            log(f"captured {report.row_count:,} changes")
    for version in zone.relations.versions(1):
        zone.snapshots.land_snapshot(1, server.start, version.relation, version.version, [])
    return windows


def _measure(spark: SparkSession, root: Path, windows: Sequence[LsnWindow]) -> Iterator[Result]:
    taken: defaultdict[str, list[float]] = defaultdict(list)
    changes = second_changes = 0
    for number in range(_WARM_UP + REPETITIONS):
        # Each repetition has its own lake, so that neither Spark nor Delta has cached the tables.
        both, apart = (copy_lake(root, f"{kind}-{number}") for kind in ("both", "apart"))
        whole = in_turns(
            {
                "plain": partial(_write, spark, both, windows[0].start),
                "ours": partial(merge_orders, spark, both, windows[1]),
            },
            number,
        )
        merge_orders(spark, apart, windows[0])
        second = in_turns(
            {
                "plain": partial(_write, spark, apart, windows[1].start),
                "ours": partial(merge_orders, spark, apart, windows[1]),
            },
            number,
        )
        changes, second_changes = whole["ours"][1], second["ours"][1]
        seconds = {f"whole_{side}": timing[0] for side, timing in whole.items()}
        seconds |= {f"second_{side}": timing[0] for side, timing in second.items()}
        log(", ".join(f"{name} {each:.1f} s" for name, each in seconds.items()))
        if number >= _WARM_UP:
            for name, each in seconds.items():
                taken[name].append(each)
    yield Result.of("merge_scd1_vs_plain_write", taken["whole_ours"], taken["whole_plain"], "s")
    yield Result.reported("merge_scd1", [changes / s for s in taken["whole_ours"]], "changes/s")
    yield Result.of(
        "merge_scd1_second_window_vs_plain_write",
        taken["second_ours"],
        taken["second_plain"],
        "s",
    )
    yield Result.reported(
        "merge_scd1_second_window",
        [second_changes / s for s in taken["second_ours"]],
        "changes/s",
    )


def copy_lake(root: Path, name: str) -> RawZone:
    """Create a lake with the captured raw zone and without tables."""
    capture = root / name / _NAME
    capture.mkdir(parents=True)
    (capture / "raw").symlink_to(root / "captured" / _NAME / "raw")
    return RawZone(Lake(str(root / name)), _NAME)


def _write(spark: SparkSession, zone: RawZone, start: int) -> tuple[float, int]:
    """Copy the raw rows of orders from a commit LSN on into a new Delta table."""
    began = time.monotonic()
    rows = spark.read.format("delta").load(zone.changes.table.uri)
    rows = rows.where(f"table = 'orders' AND commit_lsn >= {int(start)}")
    rows.write.format("delta").save(zone.lake.path(_NAME, f"plain-{int(start)}"))
    return time.monotonic() - began, 0


def merge_orders(
    spark: SparkSession, zone: RawZone, through: LsnWindow, table: CdcTable = ORDERS
) -> tuple[float, int]:
    """Merge orders, and return seconds and number of changes."""
    began = time.monotonic()
    (report,) = merge_tables(spark, zone, [table], through)
    seconds = time.monotonic() - began
    if not isinstance(report, MergeReport):
        raise SystemExit(f"not merged: {report.error}")
    return seconds, report.changes_read
