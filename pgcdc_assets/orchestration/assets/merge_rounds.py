"""The merges of one run: the requested windows, then windows that are landed during the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgcdc_assets.errors import PgcdcError, SchemaChangeError, TableDamaged, TransientError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.orchestration.assets.merge_reports import MergeReports, Result, ScdKey
from pgcdc_assets.orchestration.assets.registration import Registration
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS, MergeChecks, ScdName
from pgcdc_assets.orchestration.partitions import read_summaries
from pgcdc_assets.orchestration.runs.failures import raise_failed
from pgcdc_assets.orchestration.runs.long_runs import LongRun
from pgcdc_assets.orchestration.runs.records import MERGE_PURPOSE, PURPOSE_TAG
from pgcdc_assets.orchestration.runs.snapshot_runs import SNAPSHOTS_TAG, RunningSnapshots
from pgcdc_assets.orchestration.state import read_gates
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import FOLLOW
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.schema_gate import describe_event, is_unforeseen, record_unforeseen
from pgcdc_assets.tables.state import read_scd_state
from pgcdc_assets.tables.vacuum import is_check_due, vacuum_after_merge

if TYPE_CHECKING:
    from pgcdc_assets.spark.session import SparkSession


@dataclass
class MergeRounds:
    """The merges of one run: the requested windows, then windows landed during the run.

    Attributes:
        held: resources to close at the end of the run.
        through: the newest merged window.
        waiting: for each table, the reason why it waits for a snapshot; empty if it does not wait.
    """

    context: dg.AssetExecutionContext
    capture: CdcCapture
    specs: Mapping[ScdKey, dg.AssetSpec]
    sources: Mapping[CdcTable, dg.AssetKey]
    copying: RunningSnapshots
    zone: RawZone
    session: SparkSession
    held: ExitStack
    through: LsnWindow | None = None
    failures: list[MergeFailure] = field(default_factory=list)
    waiting: dict[ScdKey, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        context = self.context
        places = {spec.key: place for place, spec in self.specs.items()}
        self._by_name = {_name(place): place for place in self.specs}
        self._selected = [places[key] for key in context.selected_asset_keys]
        # The state at the sensor's decision: a re-snapshot may have ended since.
        self._snapshots = context.run.tags.get(SNAPSHOTS_TAG) or self._snapshots_digest()
        self._catalog = Registration(self.capture.catalog, self.session, context.log)
        self._reports = MergeReports(
            context, self.zone, self.specs, self.sources, self._merge_checks
        )

    def merge(self, windows: Sequence[LsnWindow]) -> Iterator[Any]:
        """Merge the selected tables through the newest of the run's windows, and report them.

        Args:
            windows: the windows to materialise, in order.
        """
        checked = self._checks()
        recorded = read_summaries(self.zone, windows)
        through = windows[-1]
        for place, report in self._merged(through):
            reported = self._reports.yield_report(place, report, windows, recorded, is_first=True)
            try:
                yield from reported
            except TableDamaged as error:
                # The merge needed the newest commits of the log only. The other tables are merged.
                self._fail(MergeFailure(report.schema, report.table, error), {})
                continue
            results = checked.after(report, through.epoch)
            yield from self._reports.yield_results(results, through, is_first=True)
            self._finish(report)
        self._catalog.register()
        yield from self._reports.yield_results(checked.rest(), through, is_first=True)

    def merge_unreported(self, windows: Sequence[LsnWindow]) -> None:
        """Merge the selected tables through the newest of some landed windows; `report` follows.

        Args:
            windows: the windows of the run, or all windows since the last merge, in order.
        """
        is_first = self.through is None
        recorded = read_summaries(self.zone, windows)
        for place, report in self._merged(windows[-1]):
            self._reports.keep(place, report, windows, recorded, is_first=is_first)
            self._finish(report)
        self._catalog.register()

    def report(self, is_busy: Callable[[], bool] = lambda: False) -> Iterator[Any]:
        """Yield the events of the merges that were not reported; see `MergeReports.yield_kept`."""
        yield from self._reports.yield_kept(is_busy)

    def report_some(self) -> Iterator[Any]:
        """Yield events for a short time, because another run waits; see `MergeReports.yield_some`.

        Merges are visible sooner if the next run begins sooner.
        """
        left = yield from self._reports.yield_some()
        if left:
            self.context.log.info(f"{left} tables are reported by the next run, which waits")

    def _merged(self, through: LsnWindow) -> Iterator[tuple[ScdKey, MergeReport]]:
        """Merge the selected tables, and yield the merged ones; the others are failures."""
        copied = self._being_copied()
        self.failures += map(_held_back, sorted(copied, key=lambda table: table.qualified_name))
        places = [place for place in self._selected if place[0] not in copied]
        self.through = through
        while places:
            unforeseen: dict[TableName, MergeFailure] = {}
            for report in self._merge(places, through):
                if isinstance(report, MergeFailure):
                    self._fail(report, unforeseen)
                    continue
                place = self._by_name[report.schema, report.table, report.scd]
                places.remove(place)
                self.waiting[place] = report.waits_for
                yield place, report
            recovered = self._record(unforeseen, through)
            places = [place for place in places if place[0].name in recovered]

    def _merge(
        self, places: Sequence[ScdKey], through: LsnWindow
    ) -> Iterator[MergeReport | MergeFailure]:
        from pgcdc_assets.merge import merge_tables

        return merge_tables(
            self.session,
            self.zone,
            _targets(places),
            through,
            parallelism=self.capture.merge_parallelism,
            sessions=self._merging_sessions,
            limit=self.capture.merge_step,
        )

    def _fail(self, failure: MergeFailure, unforeseen: dict[TableName, MergeFailure]) -> None:
        """Keep a failure for the end of the run, or for a retry with a recorded schema event."""
        table = next(table for table, _ in self._selected if table.name == failure.name)
        if is_unforeseen(failure.error) and table.schema_policy == FOLLOW:
            unforeseen[failure.name] = failure
            return
        self.context.log.error(f"{failure.qualified_name}: {failure.error}")
        self.failures.append(failure)

    def _record(
        self, unforeseen: Mapping[TableName, MergeFailure], through: LsnWindow
    ) -> set[TableName]:
        """Record schema changes that the capture has not recorded.

        Returns:
            The tables with a new event. The others fail, because a snapshot did not heal them.
        """
        recovered = set()
        for name, failure in unforeseen.items():
            assert isinstance(failure.error, SchemaChangeError)
            event = record_unforeseen(self.zone, name, failure.error, through)
            if event is None:
                self.context.log.error(f"{failure.qualified_name}: {failure.error}")
                self.failures.append(failure)
            else:
                self.context.log.warning(f"{failure.qualified_name}: {describe_event(event)}")
                recovered.add(name)
        return recovered

    def _finish(self, report: MergeReport) -> None:
        """Register a merged table, and delete files that merges replaced.

        A failure does not affect the committed merge.
        """
        self._catalog.add(report)
        if not report.steps and report.snapshot_lsn is None:
            return
        if report.version is not None and not is_check_due(report.path, report.version):
            return
        policy, zone = self.capture.retention, self.zone
        try:
            # The merge keeps the state, so the log is not read again.
            state = read_scd_state(zone.lake, zone.name, report.path)
            if state is not None:
                ratio, hours = policy.replaced_ratio, policy.keep_hours
                vacuum_after_merge(zone.lake, report.path, hours, ratio, state.table)
        except PgcdcError as error:
            self.context.log.warning(str(error))

    def check_only(self) -> Iterator[Result]:
        """Evaluate the selected checks without a merge."""
        yield from self._checks().rest()

    def has_landed(self) -> bool:
        """Return whether windows wait for a merge."""
        assert self.through is not None
        captured = self.zone.changes.captured_through(self.through.epoch)
        return captured is not None and captured > self.through.end

    def landed_since(self, following: LongRun) -> list[LsnWindow] | None:
        """List the windows after the last merge; None if they do not change the selected tables."""
        assert self.through is not None
        epoch, end = self.through.epoch, self.through.end
        captured = self.zone.changes.captured_through(epoch)
        if captured is None or captured <= end:
            return None
        if self._snapshots_digest() != self._snapshots:
            # A table was added or removed, a re-snapshot began or ended, or an epoch began: the
            # sensor requests a suitable run.
            following.stop()
            return None
        landed = self.zone.changes.windows(epoch, end)
        relations = self.zone.source_relations(epoch)
        tables = {table.name for table, _ in self._selected}
        if any(self.waiting.values()):
            gates = read_gates(self.zone, self.capture).items()
            tables -= {name for name, gate in gates if gate.heals}
        names = {name for table in tables for name in relations.names(table)}
        is_changed = any(summary.count_changes(names) for summary in landed)
        return [summary.window for summary in landed] if is_changed else None

    def raise_failures(self) -> None:
        """End the run if a table was not merged; the error names the tables."""
        if self.failures:
            named = [(f.qualified_name, f.error) for f in self.failures]
            raise_failed("Not merged", named, self.capture.name)

    def _being_copied(self) -> set[CdcTable]:
        """Find the selected tables with a running re-snapshot."""
        copied = self.copying.find(self.context.instance, self.zone)
        return {table for table, _ in self._selected if table.partition_key in copied}

    def _snapshots_digest(self) -> str:
        return self.copying.digest(self.zone, self.copying.find(self.context.instance, self.zone))

    def _checks(self) -> MergeChecks:
        """Return all checks of the run."""
        wanted = self.context.selected_asset_check_keys
        selected = {place for place in self.specs if self._check_key(place) in wanted}
        return self._open_checks(self._selected, selected | self._checked)

    def _merge_checks(self, places: Collection[ScdKey]) -> MergeChecks:
        """Return the checks of some SCD tables after a merge."""
        return self._open_checks(places, self._checked.intersection(places))

    def _open_checks(self, merging: Collection[ScdKey], checked: Collection[ScdKey]) -> MergeChecks:
        return MergeChecks(
            self.zone,
            open_session=lambda: self._checking_session,
            targets=self._targets,
            merging={_name(place) for place in merging},
            wanted={_name(place): self._check_key(place) for place in checked},
        )

    def _check_key(self, place: ScdKey) -> dg.AssetCheckKey:
        return dg.AssetCheckKey(self.specs[place].key, INVARIANTS)

    @cached_property
    def _checked(self) -> set[ScdKey]:
        """The SCD tables that are checked after a merge.

        The sensor selects no checks. Dagster would record each selected check at the start of the
        run, and show the checks of idle tables as skipped.
        """
        if self.context.run.tags.get(PURPOSE_TAG) == MERGE_PURPOSE:
            return set(self._selected)
        wanted = self.context.selected_asset_check_keys
        return {place for place in self._selected if self._check_key(place) in wanted}

    @cached_property
    def _targets(self) -> dict[TableName, CdcTable]:
        return {table.name: table for table, _ in self.specs}

    @cached_property
    def _merging_sessions(self) -> list[SparkSession]:
        return self._open_sessions(min(self.capture.merge_parallelism, len(self._selected)))

    @cached_property
    def _checking_session(self) -> SparkSession:
        return self._open_sessions(1)[0]

    def _open_sessions(self, count: int) -> list[SparkSession]:
        """Open sessions for the rest of the run."""
        from pgcdc_assets.spark.session import own_sessions

        return self.held.enter_context(own_sessions(self.session, count))


def _name(place: ScdKey) -> ScdName:
    table, scd = place
    return table.schema, table.table, scd


def _held_back(table: CdcTable) -> MergeFailure:
    reason = f"Table {table.qualified_name} is merged after its running re-snapshot."
    return MergeFailure(table.schema, table.table, TransientError(reason=reason))


def _targets(places: Iterable[ScdKey]) -> list[CdcTable]:
    kinds: dict[CdcTable, list[int]] = {}
    for table, scd in places:
        kinds.setdefault(table, []).append(scd)
    return [
        table.of_kinds(scds)
        for table, scds in sorted(kinds.items(), key=lambda item: item[0].qualified_name)
    ]
