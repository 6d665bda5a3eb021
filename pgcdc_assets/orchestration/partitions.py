"""Partition keys: missing keys, surplus keys, the keys of a run, and their mapping."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import dagster as dg

from pgcdc_assets.errors import ConfigurationError, RawZoneError
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.orchestration.runs.records import UNFINISHED
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone

MAX_ADOPTED = 500

# Dagster's storage needs 16 ms for each materialisation. If only other databases of the server
# wrote for hours, the next merge has thousands of windows for each table.
MAX_MATERIALIZATIONS = 1_000
# Of one report of a run that continues, which has the next windows to merge.
MAX_LATER_MATERIALIZATIONS = 100
PARTITION_TAG = "dagster/partition"
RANGE_TAGS = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")


class SpecificPartitionsPartitionMapping(dg.SpecificPartitionsPartitionMapping):
    """Map every window of an SCD asset to its own table's partition of the snapshot asset.

    Dagster keeps one mapping for each asset and dependency, but refuses a step whose assets map one
    dependency differently. Mappings of this class are equal to each other, and pass that check.

    Dagster serializes an object by the name of its class. The name is therefore that of the base
    class: the web server and the daemon, which do not load this package, read the base class.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dg.SpecificPartitionsPartitionMapping)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(type(self).__name__)


def parse_windows(keys: Iterable[str]) -> list[LsnWindow]:
    """Return the windows of partition keys in the order of the keys.

    A key of another form, which a person has typed in the UI, has no window.
    """
    windows = []
    for key in keys:
        with suppress(ValueError):
            windows.append(LsnWindow.parse(key))
    return windows


def read_run_windows(keys: Iterable[str]) -> list[LsnWindow]:
    """Return the windows of a run's partition keys in stream order.

    Raises:
        ConfigurationError: a key is no window. A person has typed it in the UI.
    """
    windows = []
    for key in keys:
        try:
            windows.append(LsnWindow.parse(key))
        except ValueError:
            raise ConfigurationError(
                reason=f"Partition key {key!r} is no window of WAL. Delete the key, and select "
                "keys that the lag sensor or a capture has added."
            ) from None
    return sorted(windows)


def select_landed(
    zone: RawZone, windows: Iterable[LsnWindow], through: Position
) -> list[LsnWindow]:
    """Return the landed windows among those of partition keys, in stream order.

    A window that was open at the end of its epoch is never landed, although it is below `through`.
    A window from before the start of its epoch is one of an earlier lake.

    Args:
        through: the end of the landed windows of the newest epoch.
    """
    reached = [window for window in windows if window.end_position <= through]
    epochs = {window.epoch for window in reached} - {through.epoch}
    ends = {epoch: zone.changes.captured_through(epoch) or Lsn(0) for epoch in epochs}
    ends[through.epoch] = through.lsn
    starts = {each.epoch: each.start_lsn for each in zone.epochs.all()}
    return sorted(
        window
        for window in reached
        if window.epoch in starts
        and starts[window.epoch] <= window.start
        and window.end <= ends[window.epoch]
    )


def check_landed(zone: RawZone, window: LsnWindow) -> None:
    """Check that a window of a run is landed, and can be merged.

    Raises:
        RawZoneError: it is not. A person has selected it, such as with all partitions.
    """
    captured = zone.changes.captured_through(window.epoch)
    if captured is None or captured < window.end:
        known = "no window is landed" if captured is None else f"landed through {captured}"
        raise RawZoneError(
            raw_zone=zone.uri,
            reason=f"window {window.key} is not landed, so it cannot be merged ({known}). Select "
            "landed windows; the sensors land and merge later windows by themselves.",
        )


def find_unknown_windows(
    zone: RawZone, epoch: Epoch, known: Sequence[LsnWindow], through: Position
) -> list[WindowSummary]:
    """List the landed windows above an instance's newest key; of very many, only the newest.

    A new DAGSTER_HOME has no keys for the windows of an existing lake.
    """
    newest = max((window.end_position for window in known), default=Position(0, Lsn(0)))
    if newest >= through:
        return []
    since = newest.lsn if newest.epoch == epoch.epoch else None
    landed = zone.changes.landed_windows(epoch.epoch, since)
    there = set(known)
    unknown = [each.window for each in landed if each.window not in there]
    return read_summaries(zone, unknown[-MAX_ADOPTED:])


def find_surplus_keys(
    windows: Sequence[LsnWindow],
    keep: int,
    merged_through: Position | None,
    used: LsnWindow | None = None,
) -> list[str]:
    """List the oldest keys beyond the number to keep, if their windows are merged everywhere.

    Args:
        used: the oldest window of an unfinished run; this key and later keys stay.
    """
    surplus = len(windows) - keep
    if surplus <= 0 or merged_through is None:
        return []
    oldest = sorted(windows)[:surplus]
    return [
        window.key
        for window in oldest
        if window.end_position <= merged_through and (used is None or window < used)
    ]


def find_used_window(
    instance: dg.DagsterInstance, windows: Collection[LsnWindow]
) -> LsnWindow | None:
    """Return the oldest partition of all unfinished runs; None without a run of these windows.

    A merge commits before it reports its partitions. Dagster fails a run whose partitions have no
    key any more.
    """
    by_key = {window.key: window for window in windows}
    runs = instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
    tags = [run.tags.get(tag, "") for run in runs for tag in (PARTITION_TAG, *RANGE_TAGS)]
    return min((by_key[key] for key in tags if key in by_key), default=None)


def find_shown_windows(
    windows: Sequence[LsnWindow], asset_count: int, most: int | None = None
) -> Sequence[LsnWindow]:
    """Return the windows that a merge materialises: the newest of the windows that it folds.

    Args:
        most: the number of materialisations of all assets; None: `MAX_MATERIALIZATIONS`.
    """
    most = MAX_MATERIALIZATIONS if most is None else most
    return windows[-max(1, most // max(1, asset_count)) :]


def build_shown_range_tags(keys: Sequence[str], shown: Sequence[LsnWindow]) -> dict[str, str]:
    """Return the tags of a run that materialises windows.

    A range of dynamic partitions follows the order in which the keys were added. If this is not the
    order of the stream, the run materialises the newest window alone: it processes the earlier
    windows too.

    Args:
        keys: all keys, in the order in which they were added.
        shown: the windows to materialise, in the order of the stream.
    """
    wanted = [window.key for window in shown]
    first, last = wanted[0], wanted[-1]
    if list(keys[keys.index(first) : keys.index(last) + 1]) != wanted:
        first = last
    return build_range_tags(first, last)


def read_summaries(zone: RawZone, windows: Sequence[LsnWindow]) -> list[WindowSummary]:
    """Read the summaries of windows from the raw zone."""
    wanted = set(windows)
    found: list[WindowSummary] = []
    for epoch in sorted({window.epoch for window in windows}):
        first = min(window.start for window in windows if window.epoch == epoch)
        found += zone.changes.windows(epoch, first)
    return [summary for summary in found if summary.window in wanted]


def build_range_tags(first: str, last: str) -> dict[str, str]:
    """Return the tags of a run that covers all partitions from one key through another."""
    return dict(zip(RANGE_TAGS, (first, last), strict=True))


def covered_keys(tags: Mapping[str, str], order: Sequence[str]) -> list[str]:
    """List the partitions of a run by its tags: one partition, a range, or all partitions."""
    one = tags.get(PARTITION_TAG)
    if one is not None:
        return [one]
    first, last = (tags.get(tag) for tag in RANGE_TAGS)
    if first in order and last in order:
        return list(order[order.index(first) : order.index(last) + 1])
    return list(order)


def group_neighbours(order: Sequence[str], wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Group adjacent keys as (first, last)."""
    groups: list[tuple[str, str]] = []
    previous = -2
    for index, key in enumerate(order):
        if key not in wanted:
            continue
        if index == previous + 1:
            groups[-1] = (groups[-1][0], key)
        else:
            groups.append((key, key))
        previous = index
    return groups


def change_partitions(instance: dg.DagsterInstance, request: Any) -> None:
    """Add or delete the partitions that a sensor asks for."""
    name = request.partitions_def_name
    if isinstance(request, dg.AddDynamicPartitionsRequest):
        instance.add_dynamic_partitions(name, list(request.partition_keys))
        return
    for key in request.partition_keys:
        instance.delete_dynamic_partition(name, key)
