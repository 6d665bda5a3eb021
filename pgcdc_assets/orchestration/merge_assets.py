"""The SCD assets: one step merges all selected tables in one Spark session.

Merging window N folds everything from each table's own watermark through N, so a range run merges
through its newest partition once. A table that cannot be merged fails alone: the others are
reported first, and the failure at the end names the broken ones.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import dagster as dg

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge.report import MergeFailure, MergeReport, TableTarget
from pgcdc_assets.merge.watermark import read_target
from pgcdc_assets.orchestration.failures import dagster_failures, raise_failed
from pgcdc_assets.orchestration.invariant_checks import MergedChecks, invariant_spec
from pgcdc_assets.orchestration.metadata import column_lineage, merge_metadata
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.resources import LakeResource, SparkResource
from pgcdc_assets.orchestration.runs import claim_run
from pgcdc_assets.orchestration.settings import CdcCapture, CdcTable
from pgcdc_assets.orchestration.tables import read_columns
from pgcdc_assets.orchestration.targets import target_of
from pgcdc_assets.raw.zone import RawZone


def build_scd_assets(
    capture: CdcCapture,
    specs: Mapping[tuple[CdcTable, int], dg.AssetSpec],
    sources: Mapping[CdcTable, dg.AssetKey],
    partitions: dg.PartitionsDefinition[str],
) -> dg.AssetsDefinition:
    """Build the assets that merge windows.

    Args:
        specs: one for each table and kind of SCD table.
        sources: the source tables' keys, for column lineage.
    """
    names = Names.of(capture)
    places = {spec.key: place for place, spec in specs.items()}
    keys = {(t.schema, t.table, scd): spec.key for (t, scd), spec in specs.items()}
    checks = {
        (t.schema, t.table, scd): invariant_spec(spec.key, scd) for (t, scd), spec in specs.items()
    }

    @dg.multi_asset(
        name=f"{capture.name}_merge_tables",
        specs=list(specs.values()),
        check_specs=list(checks.values()),
        partitions_def=partitions,
        can_subset=True,
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=names.merge_pool,
        required_resource_keys={names.lake, names.spark},
    )
    def merge(context: dg.AssetExecutionContext) -> Any:
        from pgcdc_assets.merge import merge_tables
        from pgcdc_assets.merge.session import own_sessions

        claim_run(context)
        lake: LakeResource = getattr(context.resources, names.lake)
        spark: SparkResource = getattr(context.resources, names.spark)
        selected = [places[key] for key in context.selected_asset_keys]
        failures: list[MergeFailure] = []
        with dagster_failures(), ExitStack() as held:
            zone = lake.zone(capture.name)
            session = spark.session()
            checked = MergedChecks(
                zone,
                open_session=lambda: held.enter_context(own_sessions(session, 1))[0],
                targets={(t.schema, t.table): target_of(t) for t, _ in specs},
                merging={(t.schema, t.table, scd) for t, scd in selected},
                wanted={
                    place: spec.key
                    for place, spec in checks.items()
                    if spec.key in context.selected_asset_check_keys
                },
            )
            reports: Iterable[MergeReport | MergeFailure] = ()
            # A run of checks alone has no windows.
            if selected:
                through = max(LsnWindow.parse(key) for key in context.partition_keys)
                reports = merge_tables(
                    session,
                    zone,
                    _targets(selected),
                    through,
                    parallelism=capture.merge_parallelism,
                )
            for report in reports:
                if isinstance(report, MergeFailure):
                    context.log.error(f"{report.schema}.{report.table}: {report.error}")
                    failures.append(report)
                    continue
                key = keys[report.schema, report.table, report.scd]
                table = places[key][0]
                yield dg.MaterializeResult(
                    asset_key=key, metadata=_metadata(zone, report, through, sources[table])
                )
                yield from checked.after(report, through.epoch)
            yield from checked.rest()
        if failures:
            raise_failed("Not merged", [(f"{f.schema}.{f.table}", f.error) for f in failures])

    return merge


def _targets(places: Iterable[tuple[CdcTable, int]]) -> list[TableTarget]:
    kinds: dict[CdcTable, list[int]] = {}
    for table, scd in places:
        kinds.setdefault(table, []).append(scd)
    return [
        target_of(table, scds)
        for table, scds in sorted(kinds.items(), key=lambda item: item[0].qualified_name)
    ]


def _metadata(
    zone: RawZone, report: MergeReport, through: LsnWindow, source: dg.AssetKey
) -> dict[str, Any]:
    metadata = merge_metadata(report, through)
    columns = read_columns(zone.lake, report.path)
    metadata["dagster/column_schema"] = dg.TableSchema(columns=columns)
    names = [column.name for column in columns]
    metadata["dagster/column_lineage"] = column_lineage(
        names, [name for name in names if not name.startswith("_")], source
    )
    if report.row_count is None:
        state = read_target(zone.lake, zone.name, report.path)
        if state is not None and state.row_count is not None:
            metadata["dagster/row_count"] = state.row_count
    return metadata
