"""The partition keys of windows in one evaluation of the lag sensor.

Only windows with a key are captured and shown. The instance may have other keys too: Dagster's UI
adds any key that a person types, and the keys of a lake remain when another lake replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from pgcdc_assets.errors import RawExpired, WindowUnavailable
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.orchestration.checks.raw import check_windows, evaluation_of
from pgcdc_assets.orchestration.metadata import window_metadata
from pgcdc_assets.orchestration.partitions import (
    find_surplus_keys,
    find_unknown_windows,
    find_used_window,
    parse_windows,
    select_landed,
)
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture

# A warning names so many keys.
_NAMED = 3
# A killed run leaves one window without a record, or some if it had opened them at once.
_MOST_UNRECORDED = 10

Event = dg.AssetMaterialization | dg.AssetCheckEvaluation


@dataclass
class WindowKeys:
    """The keys of a capture, and the changes that the evaluation requests.

    Attributes:
        through: the end of the landed windows.
        windows: the windows of the keys, in the order of the stream.
        requests: requests to add or delete keys.
    """

    context: dg.SensorEvaluationContext
    capture: CdcCapture
    zone: RawZone
    epoch: Epoch
    through: Position
    windows: list[LsnWindow] = field(init=False)
    requests: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._keys = self.context.instance.get_dynamic_partitions(self.capture.windows_name)
        self._parsed = parse_windows(self._keys)
        # Another process may have begun an epoch since this evaluation has read the epoch.
        self.windows = sorted(w for w in self._parsed if w.epoch <= self.epoch.epoch)

    @property
    def landed(self) -> list[LsnWindow]:
        """The windows that are landed."""
        return select_landed(self.zone, self.windows, self.through)

    @property
    def open(self) -> tuple[LsnWindow, ...]:
        """The windows that are not landed."""
        return tuple(window for window in self.windows if window.end_position > self.through)

    def add(self, *windows: LsnWindow) -> None:
        """Request keys for windows."""
        keys = [window.key for window in windows]
        self.requests.append(dg.AddDynamicPartitionsRequest(self.capture.windows_name, keys))

    def delete(self, *keys: str) -> None:
        """Request the deletion of keys."""
        self.requests.append(dg.DeleteDynamicPartitionsRequest(self.capture.windows_name, [*keys]))

    def delete_foreign(self, read_wal_end: Callable[[], Lsn]) -> None:
        """Delete the keys that no capture of this lake has added, and that would delay all windows.

        These are keys of another form, of an epoch that the lake does not have, of WAL from before
        an epoch, of WAL that the server has not written, and of windows that were open at the end
        of their epoch. No capture may run: it adds keys.

        Args:
            read_wal_end: function that returns the end of the server's WAL.
        """
        known = {window.key: window for window in self._parsed}
        foreign = {key for key in self._keys if key not in known}
        if any(window.epoch > self.epoch.epoch for window in known.values()):
            latest = self.zone.epochs.latest() or self.epoch
            foreign |= {key for key, window in known.items() if window.epoch > latest.epoch}
        past = {window for window in known.values() if window.end_position <= self.through}
        never = past.difference(select_landed(self.zone, past, self.through))
        foreign |= {window.key for window in never}
        if self.open:
            # The keys were read before the end of the WAL.
            end = read_wal_end()
            foreign |= {window.key for window in self.open if window.end > end}
        if not foreign:
            return
        named = ", ".join(sorted(foreign)[:_NAMED]) + (", ..." if len(foreign) > _NAMED else "")
        self.context.log.warning(f"Partition keys without a window of this lake deleted: {named}")
        self.windows = [window for window in self.windows if window.key not in foreign]
        self.delete(*sorted(foreign))

    def add_landed(self, raw: dg.AssetKey) -> list[dg.AssetMaterialization]:
        """Request the missing keys of landed windows, and return their materialisations.

        Args:
            raw: the raw asset.
        """
        unknown = find_unknown_windows(self.zone, self.epoch, self.windows, self.through)
        if unknown:
            self.windows += [summary.window for summary in unknown]
            self.add(*(summary.window for summary in unknown))
        return [_materialization(raw, summary) for summary in unknown]

    def record_landed(self, raw: dg.AssetKey) -> list[Event]:
        """Return the events of the newest landed windows without a materialisation.

        Their run was killed or terminated after the commit of the window. No capture may run: it
        records its windows itself.

        Args:
            raw: the raw asset.
        """
        events: list[Event] = []
        for window in find_unrecorded(self.context.instance, raw, self.landed):
            # A window whose rows are missing has failed its run, and gets no materialisation.
            with suppress(WindowUnavailable, RawExpired):
                recount = self.zone.changes.recount(window)
                events.append(_materialization(raw, recount.check()))
                checks = check_windows(self.zone, raw, [recount], self.capture.table_names)
                events += [evaluation_of(check, window) for check in checks]
        return events

    def prune(self) -> None:
        """Delete the oldest keys if there are more than the setting allows."""
        keep = self.capture.windows.keep
        if len(self.windows) <= keep:
            return
        used = find_used_window(self.context.instance, self.windows)
        merged = read_state(self.zone, self.capture).merged_through
        old = find_surplus_keys(self.windows, keep, merged, used)
        if old:
            self.delete(*old)


def find_unrecorded(
    instance: dg.DagsterInstance, raw: dg.AssetKey, landed: Sequence[LsnWindow]
) -> list[LsnWindow]:
    """Return the newest landed windows without a materialisation.

    Args:
        raw: the raw asset.
        landed: the landed windows, in the order of the stream.
    """
    found = list[LsnWindow]()
    newest = instance.get_latest_materialization_event(raw)
    event = None if newest is None else newest.asset_materialization
    shown = None if event is None else event.partition
    for window in reversed(landed[-_MOST_UNRECORDED:]):
        of_window = dg.AssetRecordsFilter(asset_key=raw, asset_partitions=[window.key])
        if window.key == shown or instance.fetch_materializations(of_window, limit=1).records:
            break
        found.append(window)
    return found[::-1]


def _materialization(raw: dg.AssetKey, summary: WindowSummary) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        raw, partition=summary.window.key, metadata=window_metadata(summary)
    )
