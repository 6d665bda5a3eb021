"""The SCD assets: one step merges all selected tables in one Spark session.

A merge of window N folds every change from the watermark of each table through N, so a run of a
range merges once, through its newest partition. If a table fails, the run merges and reports the
other tables, then fails with the names of the failed tables. A run that the merge sensor requested
continues with windows that are landed later, until a table fails (`merge_rounds.py`).
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import dagster as dg

from pgcdc_assets.orchestration.assets.merge_reports import ScdKey
from pgcdc_assets.orchestration.assets.merge_rounds import MergeRounds
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS, invariant_spec
from pgcdc_assets.orchestration.names import Names, StepKeys
from pgcdc_assets.orchestration.partitions import check_landed, read_run_windows
from pgcdc_assets.orchestration.resources import LakeResource, SparkResource
from pgcdc_assets.orchestration.runs.claims import claimed_step
from pgcdc_assets.orchestration.runs.failures import dagster_failures
from pgcdc_assets.orchestration.runs.long_runs import LongRun
from pgcdc_assets.orchestration.runs.snapshot_runs import RunningSnapshots
from pgcdc_assets.settings import CdcCapture, CdcTable


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
    step = _step_keys(capture)
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
            zone = lake.zone(capture.name)
            # A run of checks alone has no windows.
            asked = read_run_windows(context.partition_keys) if context.selected_asset_keys else []
            if asked:
                check_landed(zone, asked[-1])
            rounds = MergeRounds(
                context,
                capture,
                specs,
                sources,
                copying,
                zone,
                spark.session(zone.lake),
                held,
            )
            if not asked:
                yield from rounds.check_only()
                return
            if following.seconds:
                rounds.merge_unreported(asked)
                yield from rounds.report(rounds.has_landed)
            else:
                yield from rounds.merge(asked)
            while not rounds.failures and (
                windows := following.find(lambda: rounds.landed_since(following))
            ):
                rounds.merge_unreported(windows)
                yield from rounds.report(rounds.has_landed)
            if not rounds.failures and following.is_ending:
                yield from rounds.report_some()
            else:
                yield from rounds.report()
            rounds.raise_failures()

    return step.restore(merge)


def find_scd_tables(
    repository: dg.RepositoryDefinition, capture: CdcCapture
) -> dict[dg.AssetKey, CdcTable]:
    """Return the table of each SCD asset, whose key may be that of a user's translator."""
    step, wanted = _step_keys(capture), Names.of(capture).merge_step
    for definition in repository.assets_defs_by_key.values():
        if definition.is_executable and definition.node_def.name == wanted:
            keys = definition.keys_by_output_name
            outputs = {
                step.output(f"scd{scd}", table): table
                for table in capture.tables
                for scd in table.scd
            }
            return {keys[output]: table for output, table in outputs.items() if output in keys}
    return {}


def _step_keys(capture: CdcCapture) -> StepKeys:
    return StepKeys(capture.name, [INVARIANTS])
