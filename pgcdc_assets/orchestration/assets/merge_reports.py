"""The events of a merge step: materialisations, observations and results of checks.

Dagster's storage needs some 15 ms for each event, and a check reads the table. If a hundred tables
change all the time, their events take longer than their merges. So a run that continues merges
first, and reports when no window waits, or after `MOST_SECONDS`. The report of a table then covers
all its merges since the last report.

If the run is killed before it has reported, or ends early for its successor, the next run
materialises these windows too, and its first merge reports the table as changed
(`data_versions.py`, `idle_tables.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.orchestration.assets.idle_tables import IdleTables
from pgcdc_assets.orchestration.checks.invariants import MergeChecks
from pgcdc_assets.orchestration.checks.raw import evaluation_of
from pgcdc_assets.orchestration.data_versions import data_version, find_shown_through, version_tags
from pgcdc_assets.orchestration.metadata import (
    THROUGH_METADATA,
    MergeMetadata,
    merge_warnings,
    table_metadata,
)
from pgcdc_assets.orchestration.partitions import MAX_LATER_MATERIALIZATIONS, find_shown_windows
from pgcdc_assets.orchestration.runs.records import MERGE_PURPOSE, is_requested_by
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable

# A merged table is reported after this time, although further windows wait.
MOST_SECONDS = 30.0
# While windows wait, the reports between two merges take this time.
SECONDS_AT_ONCE = 1.0
# The last reports of a run whose successor waits take this time.
SECONDS_BEFORE_SUCCESSOR = 1.0

ScdKey = tuple[CdcTable, int]
Result = dg.MaterializeResult[Any] | dg.AssetCheckResult


@dataclass(frozen=True)
class _First:
    """The merge of the run's partitions."""

    report: MergeReport
    windows: Sequence[LsnWindow]
    recorded: Sequence[WindowSummary]


@dataclass
class _Kept:
    """What is to be reported about one table.

    Attributes:
        since: monotonic time of the first merge that was not reported.
        first: by kind of SCD table, if the first merge of the run was not reported.
        windows: the windows of later merges to materialise, in order.
        recorded: the summaries of these windows.
        reports: of the later merges, by kind of SCD table.
    """

    since: float
    first: dict[int, _First] = field(default_factory=dict)
    windows: list[LsnWindow] = field(default_factory=list)
    recorded: list[WindowSummary] = field(default_factory=list)
    reports: dict[int, MergeReport] = field(default_factory=dict)


@dataclass
class MergeReports:
    """The reports of one run.

    Attributes:
        specs: the specification for each table and kind of SCD table.
        sources: the source tables' keys, for column lineage.
        open_checks: function that returns the checks of some SCD tables.
    """

    context: dg.AssetExecutionContext
    zone: RawZone
    specs: Mapping[ScdKey, dg.AssetSpec]
    sources: Mapping[CdcTable, dg.AssetKey]
    open_checks: Callable[[Collection[ScdKey]], MergeChecks]
    _kept: dict[CdcTable, _Kept] = field(default_factory=dict)
    _waiting: dict[ScdKey, str] = field(default_factory=dict)
    _by_spark: dict[ScdKey, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._idle = IdleTables.of(self.context)

    def keep(
        self,
        place: ScdKey,
        report: MergeReport,
        windows: Sequence[LsnWindow],
        recorded: Sequence[WindowSummary],
        *,
        is_first: bool,
    ) -> None:
        """Keep the report of a merge for later.

        Args:
            windows: the merged windows, in order.
            is_first: the windows are the partitions of the run.
        """
        table, scd = place
        if not (report.waits_for or self._waiting.get(place)) and self._idle.is_left_out(
            self.specs[place].key, report, windows[-1], is_first=is_first
        ):
            return
        kept = self._kept.setdefault(table, _Kept(time.monotonic()))
        if is_first:
            kept.first[scd] = _First(report, windows, recorded)
            return
        if kept.windows[-1:] != list(windows[-1:]):
            count = len(self.context.selected_asset_keys)
            found = find_shown_windows([*kept.windows, *windows], count, MAX_LATER_MATERIALIZATIONS)
            kept.windows, shown = list(found), set(found)
            kept.recorded = [s for s in [*kept.recorded, *recorded] if s.window in shown]
        before = kept.reports.get(scd)
        kept.reports[scd] = report if before is None else before.followed_by(report)

    def yield_kept(self, is_busy: Callable[[], bool]) -> Iterator[Any]:
        """Yield the kept reports, the oldest first.

        Args:
            is_busy: if it returns true, the rest is kept. Only what is older than `MOST_SECONDS` is
                yielded then, for `SECONDS_AT_ONCE`.
        """
        began = time.monotonic()
        for table in sorted(self._kept, key=lambda table: self._kept[table].since):
            now = time.monotonic()
            is_due = now >= self._kept[table].since + MOST_SECONDS
            if not (is_due and now < began + SECONDS_AT_ONCE) and is_busy():
                return
            yield from self._yield_table(table, self._kept.pop(table))

    def yield_some(self) -> Generator[Any, None, int]:
        """Yield kept reports, the oldest first, for `SECONDS_BEFORE_SUCCESSOR`.

        Returns:
            The number of tables that are not reported. The next run reports them, as after a kill.
        """
        end = time.monotonic() + SECONDS_BEFORE_SUCCESSOR
        yield from self.yield_kept(lambda: time.monotonic() >= end)
        return len(self._kept)

    def _yield_table(self, table: CdcTable, kept: _Kept) -> Iterator[Any]:
        kinds = sorted({*kept.first, *kept.reports})
        checks = self.open_checks([(table, scd) for scd in kinds])
        for scd in kinds:
            place, first, later = (table, scd), kept.first.get(scd), kept.reports.get(scd)
            if first is not None:
                yield from self.yield_report(
                    place, first.report, first.windows, first.recorded, is_first=True
                )
                through, report = first.windows[-1], first.report
            if later is not None:
                yield from self.yield_report(
                    place, later, kept.windows, kept.recorded, is_first=False
                )
                through = kept.windows[-1]
                report = later if first is None else first.report.followed_by(later)
            results = checks.after(report, through.epoch)
            yield from self.yield_results(results, through, is_first=first is not None)
        yield from self.yield_results(checks.rest(), through, is_first=bool(kept.first))

    def yield_report(
        self,
        place: ScdKey,
        report: MergeReport,
        windows: Sequence[LsnWindow],
        recorded: Sequence[WindowSummary],
        *,
        is_first: bool,
    ) -> Iterator[dg.MaterializeResult[Any] | dg.AssetMaterialization | dg.AssetObservation]:
        """Yield the materialisation of a table, or an observation if the table waits.

        Args:
            windows: the windows to materialise, in order.
            is_first: the windows are the partitions of the run.
        """
        key = self.specs[place].key
        name = f"{place[0].qualified_name} (scd{report.scd})"
        for warning in merge_warnings(report):
            self.context.log.warning(f"{name}: {warning}")
        if report.spark_reason not in ("", self._by_spark.get(place)):
            self._by_spark[place] = report.spark_reason
            self.context.log.info(f"{name} was merged by Spark: {report.spark_reason}")
        shown = windows
        if report.waits_for:
            mark = report.watermark_after or Lsn(0)
            shown = [window for window in windows if window.end <= mark]
            if report.waits_for != self._waiting.get(place):
                self.context.log.warning(f"{name} waits at {mark}. {report.waits_for}")
                metadata = {"waits_for": report.waits_for, "watermark": str(mark)}
                yield dg.AssetObservation(key, metadata=metadata)
        self._waiting[place] = report.waits_for
        if not shown or self._idle.is_left_out(key, report, shown[-1], is_first=is_first):
            return
        through = shown[-1]
        merged = MergeMetadata.of(report, through, recorded)
        state = {**merged.state, **table_metadata(self.zone, report, self.sources[place[0]])}
        if is_first and not report.changes_read and report.snapshot_lsn is None:
            state[THROUGH_METADATA] = self._find_newest(key, through).key
        version = data_version(self.context.instance, key, report, through)
        is_whole = is_first and not report.waits_for
        yield from self._materialized(key, state, merged, version, shown, is_whole)

    def _find_newest(self, key: dg.AssetKey, through: LsnWindow) -> LsnWindow:
        """Return the newest merged window of a table after a merge without changes.

        A person may select windows that were merged before. The sensor selects the newest ones.
        """
        if is_requested_by(self.context.run, MERGE_PURPOSE):
            return through
        return max(through, find_shown_through(self.context.instance, key) or through)

    def _materialized(
        self,
        key: dg.AssetKey,
        state: Mapping[str, Any],
        metadata: MergeMetadata,
        version: str,
        windows: Sequence[LsnWindow],
        is_first: bool,
    ) -> Iterator[dg.MaterializeResult[Any] | dg.AssetMaterialization]:
        """Yield the materialisation of windows. Dagster accepts one result per asset and step."""
        if not is_first:
            for window in windows:
                own = metadata.for_window(window.key)
                # The columns need three quarters of the record.
                described = state if window == windows[-1] else metadata.state
                yield dg.AssetMaterialization(
                    key,
                    partition=window.key,
                    metadata={**described, **own},
                    tags=version_tags(version),
                )
            return
        for window in windows:
            # Dagster lists all partitions of the run for each call.
            if window.key in metadata.shown_apart:
                own = metadata.for_window(window.key)
                self.context.add_asset_metadata(own, asset_key=key, partition_key=window.key)
        yield dg.MaterializeResult(
            asset_key=key, metadata=state, data_version=dg.DataVersion(version)
        )

    def yield_results(
        self, results: Iterable[Result], through: LsnWindow, *, is_first: bool
    ) -> Iterator[dg.AssetCheckResult | dg.AssetCheckEvaluation]:
        """Yield results of checks. Dagster accepts one result of a selected check per step.

        Args:
            through: the newest merged window.
        """
        selected = self.context.selected_asset_check_keys
        for result in results:
            assert isinstance(result, dg.AssetCheckResult)
            assert result.asset_key is not None
            assert result.check_name is not None
            check = dg.AssetCheckKey(result.asset_key, result.check_name)
            if is_first and check in selected:
                yield result
            else:
                yield evaluation_of(result, through)
