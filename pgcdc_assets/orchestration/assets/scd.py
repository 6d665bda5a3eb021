"""The SCD assets: one step merges all selected tables in one Spark session.

A merge of window N folds every change from the watermark of each table through N, so a run of a
range merges once, through its newest partition. If a table fails, the run merges and reports the
other tables, then fails with the names of the failed tables. A run that the merge sensor requested
continues with windows that are landed later, until a table fails.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgcdc_assets.errors import PgcdcError, SchemaChangeError, TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeFailure, MergeReport
from pgcdc_assets.orchestration.assets.idle_tables import IdleTables
from pgcdc_assets.orchestration.assets.registration import Registration
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS, MergeChecks, invariant_spec
from pgcdc_assets.orchestration.checks.raw import evaluation_of
from pgcdc_assets.orchestration.data_versions import data_version, version_tags
from pgcdc_assets.orchestration.metadata import MergeMetadata, merge_warnings, table_metadata
from pgcdc_assets.orchestration.names import Names, StepKeys
from pgcdc_assets.orchestration.partitions import find_shown_windows, read_summaries
from pgcdc_assets.orchestration.resources import LakeResource, SparkResource
from pgcdc_assets.orchestration.runs.claims import claimed_step
from pgcdc_assets.orchestration.runs.failures import dagster_failures, raise_failed
from pgcdc_assets.orchestration.runs.long_runs import LongRun
from pgcdc_assets.orchestration.runs.records import MERGE_PURPOSE, PURPOSE_TAG
from pgcdc_assets.orchestration.runs.snapshot_runs import RunningSnapshots
from pgcdc_assets.orchestration.state import newest_snapshots, read_gates
from pgcdc_assets.policies import FOLLOW
from pgcdc_assets.raw.window_summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.schema_gate import describe_event, is_unforeseen, record_unforeseen
from pgcdc_assets.tables.vacuum import vacuum_after_merge

if TYPE_CHECKING:
    from pgcdc_assets.spark.session import SparkSession

ScdKey = tuple[CdcTable, int]
Result = dg.MaterializeResult[Any] | dg.AssetCheckResult


def build_scd_assets(
    capture: CdcCapture,
    specs: Mapping[ScdKey, dg.AssetSpec],
    sources: Mapping[CdcTable, dg.AssetKey],
    partitions: dg.PartitionsDefinition[str],
    snapshot: dg.AssetKey,
) -> dg.AssetsDefinition:
    """Build the assets that merge windows.

    Args:
        specs: the specification for each table and kind of SCD table.
        sources: the source tables' keys, for column lineage.
        snapshot: the snapshot asset.
    """
    names = Names.of(capture)
    copying = RunningSnapshots(capture, snapshot)
    step = StepKeys(capture.name, [INVARIANTS])
    keys = {
        (table, scd): step.key(f"scd{scd}", table, spec.key) for (table, scd), spec in specs.items()
    }

    @dg.multi_asset(
        name=names.merge_step,
        # A table that waits for a re-snapshot does not materialise the run's partitions.
        specs=[s.replace_attributes(key=keys[p], skippable=True) for p, s in specs.items()],
        check_specs=[invariant_spec(key, scd) for (_, scd), key in keys.items()],
        partitions_def=partitions,
        can_subset=True,
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=names.merge_pool,
        required_resource_keys={names.lake, names.spark},
    )
    @claimed_step
    def merge(context: dg.AssetExecutionContext) -> Any:
        lake: LakeResource = getattr(context.resources, names.lake)
        spark: SparkResource = getattr(context.resources, names.spark)
        following = LongRun.of(context, names.merge_pool, capture.windows)
        with dagster_failures(capture.name), ExitStack() as held:
            rounds = _Rounds(
                context,
                capture,
                specs,
                sources,
                copying,
                lake.zone(capture.name),
                spark.session(lake.lake()),
                held,
            )
            if not context.selected_asset_keys:
                # A run of checks alone has no windows.
                yield from rounds.check_only()
                return
            asked = sorted(LsnWindow.parse(key) for key in context.partition_keys)
            yield from rounds.merge(asked)
            while not rounds.failures and (
                windows := following.find(lambda: rounds.landed_since(following))
            ):
                shown = find_shown_windows(windows, len(context.selected_asset_keys))
                yield from rounds.merge(shown, is_first=False)
            rounds.raise_failures()

    return step.restore(merge)


@dataclass
class _Rounds:
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
    session: "SparkSession"
    held: ExitStack
    through: LsnWindow | None = None
    failures: list[MergeFailure] = field(default_factory=list)
    waiting: dict[ScdKey, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        context = self.context
        places = {spec.key: place for place, spec in self.specs.items()}
        self._by_name = {(t.schema, t.table, scd): (t, scd) for t, scd in self.specs}
        self._selected = [places[key] for key in context.selected_asset_keys]
        self._copied = self._copied_tables()
        self._idle = IdleTables.of(context)
        self._catalog = Registration(self.capture.catalog, self.session, context.log)

    def merge(self, windows: Sequence[LsnWindow], *, is_first: bool = True) -> Iterator[Any]:
        """Merge the selected tables through the newest of the windows, and check the changed rows.

        Args:
            windows: the windows to materialise, in order.
            is_first: the windows are the partitions of the run.
        """
        through = windows[-1]
        checked = self._checks()
        recorded = read_summaries(self.zone, windows)
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
                yield from self._reported(place, report, windows, recorded, is_first)
                yield from self._results(checked.after(report, through.epoch), is_first)
                self._vacuum(report)
                self._catalog.add(report)
            recovered = self._record(unforeseen, through)
            places = [place for place in places if place[0].name in recovered]
        self._catalog.register()
        yield from self._results(checked.rest(), is_first)

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

    def _reported(
        self,
        place: ScdKey,
        report: MergeReport,
        windows: Sequence[LsnWindow],
        recorded: Sequence[WindowSummary],
        is_first: bool,
    ) -> Iterator[dg.MaterializeResult[Any] | dg.AssetMaterialization | dg.AssetObservation]:
        """Yield the materialisation of a table, or an observation if the table waits."""
        key = self.specs[place].key
        name = f"{place[0].qualified_name} (scd{report.scd})"
        for warning in merge_warnings(report):
            self.context.log.warning(f"{name}: {warning}")
        shown = windows
        if report.waits_for:
            mark = report.watermark_after or Lsn(0)
            shown = [window for window in windows if window.end <= mark]
            if report.waits_for != self.waiting.get(place):
                self.context.log.warning(f"{name} waits at {mark}. {report.waits_for}")
                metadata = {"waits_for": report.waits_for, "watermark": str(mark)}
                yield dg.AssetObservation(key, metadata=metadata)
        self.waiting[place] = report.waits_for
        if not shown or self._idle.is_left_out(key, report, shown[-1], is_first=is_first):
            return
        through = shown[-1]
        merged = MergeMetadata.of(report, through, recorded)
        state = {**merged.state, **table_metadata(self.zone, report, self.sources[place[0]])}
        version = data_version(self.context.instance, key, report, through)
        is_whole = is_first and not report.waits_for
        yield from self._materialized(key, state, merged, version, shown, is_whole)

    def _vacuum(self, report: MergeReport) -> None:
        """Delete files that merges replaced. A failure does not affect the committed merge."""
        if not report.steps and report.snapshot_lsn is None:
            return
        policy = self.capture.retention
        try:
            vacuum_after_merge(
                self.zone.lake, report.path, policy.keep_hours, policy.replaced_ratio
            )
        except PgcdcError as error:
            self.context.log.warning(str(error))

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

    def _results(
        self, results: Iterable[Result], is_first: bool
    ) -> Iterator[dg.AssetCheckResult | dg.AssetCheckEvaluation]:
        """Yield results of checks. Dagster accepts one result of a selected check per step."""
        selected = self.context.selected_asset_check_keys
        for result in results:
            assert isinstance(result, dg.AssetCheckResult)
            assert result.asset_key is not None
            assert result.check_name is not None
            check = dg.AssetCheckKey(result.asset_key, result.check_name)
            if is_first and check in selected:
                yield result
            else:
                yield evaluation_of(result, self.through)

    def check_only(self) -> Iterator[Result]:
        """Evaluate the selected checks without a merge."""
        yield from self._checks().rest()

    def landed_since(self, following: LongRun) -> list[LsnWindow] | None:
        """List the windows after the last merge; None if they do not change the selected tables."""
        assert self.through is not None
        epoch, end = self.through.epoch, self.through.end
        captured = self.zone.changes.captured_through(epoch)
        if captured is None or captured <= end:
            return None
        if self._copied_tables() != self._copied or self._being_copied():
            # A table was added or removed, or an epoch began: the sensor requests a suitable run.
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

    def _copied_tables(self) -> tuple[int, set[TableName]]:
        epoch = self.zone.epochs.latest()
        return (
            (0, set()) if epoch is None else (epoch.epoch, set(newest_snapshots(self.zone, epoch)))
        )

    def _checks(self) -> MergeChecks:
        wanted = set(self.context.selected_asset_check_keys)
        if self.context.run.tags.get(PURPOSE_TAG) == MERGE_PURPOSE:
            # The sensor selects no checks. Dagster would record each selected check at the start of
            # the run, and show the checks of idle tables as skipped.
            wanted |= {
                dg.AssetCheckKey(self.specs[place].key, INVARIANTS) for place in self._selected
            }
        keys = {name: self.specs[place].key for name, place in self._by_name.items()}
        return MergeChecks(
            self.zone,
            open_session=lambda: self._checking_session,
            targets={t.name: t for t, _ in self.specs},
            merging={(t.schema, t.table, scd) for t, scd in self._selected},
            wanted={
                name: check
                for name, key in keys.items()
                if (check := dg.AssetCheckKey(key, INVARIANTS)) in wanted
            },
        )

    @cached_property
    def _merging_sessions(self) -> "list[SparkSession]":
        return self._open_sessions(min(self.capture.merge_parallelism, len(self._selected)))

    @cached_property
    def _checking_session(self) -> "SparkSession":
        return self._open_sessions(1)[0]

    def _open_sessions(self, count: int) -> "list[SparkSession]":
        """Open sessions for the rest of the run."""
        from pgcdc_assets.spark.session import own_sessions

        return self.held.enter_context(own_sessions(self.session, count))


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
