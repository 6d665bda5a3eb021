"""The raw asset: one window of WAL is one partition, landed once.

A run lands one window, or several that follow each other. A window that is there already is
verified and reported again with the same figures, and nothing else happens: so materialising a
partition twice is safe.
"""

from typing import Any

import dagster as dg

from pgcdc_assets.capture import CaptureLimits, capture_window
from pgcdc_assets.errors import PgcdcError, WindowUnavailable
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.checks import (
    COUNTED_AS_DECODED,
    WITHOUT_GAPS,
    check_windows,
    rows_missing,
)
from pgcdc_assets.orchestration.failures import dagster_failures
from pgcdc_assets.orchestration.metadata import capture_metadata
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.runs import claim_run
from pgcdc_assets.orchestration.settings import CdcCapture, StreamPolicy
from pgcdc_assets.postgres.stream import StreamSettings
from pgcdc_assets.postgres.wire import WireSettings
from pgcdc_assets.raw.upkeep import UpkeepReport, keep_up
from pgcdc_assets.raw.zone import RawZone


def build_raw_asset(
    capture: CdcCapture, spec: dg.AssetSpec, partitions: dg.PartitionsDefinition[str]
) -> dg.AssetsDefinition:
    """Build the asset that lands windows."""
    names = Names.of(capture)

    @dg.multi_asset(
        name=f"{capture.name}_land_windows",
        specs=[spec],
        partitions_def=partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        check_specs=[
            dg.AssetCheckSpec(
                WITHOUT_GAPS,
                asset=spec.key,
                description="The landed windows follow each other without a gap or an overlap.",
            ),
            dg.AssetCheckSpec(
                COUNTED_AS_DECODED,
                asset=spec.key,
                description="The raw zone holds as many rows of the window as were decoded, "
                "counted again from its files.",
            ),
        ],
        pool=names.slot_pool,
        required_resource_keys={names.postgres, names.lake},
    )
    def raw(context: dg.AssetExecutionContext) -> Any:
        claim_run(context)
        postgres: PostgresResource = getattr(context.resources, names.postgres)
        lake: LakeResource = getattr(context.resources, names.lake)
        windows = sorted(LsnWindow.parse(key) for key in context.partition_keys)
        with dagster_failures():
            zone = lake.zone(capture.name)
            summaries = []
            for window in windows:
                try:
                    report = capture_window(
                        postgres.settings(),
                        zone,
                        capture.slot,
                        capture.publication,
                        window,
                        capture_limits(capture.stream),
                    )
                    summary = zone.changes.summary(window)
                except WindowUnavailable as error:
                    # The run fails, and the check stays red on the asset's page afterwards.
                    yield rows_missing(spec.key, error)
                    raise
                context.log.info(
                    f"Window {window.key}: {report.row_count} changes in "
                    f"{report.transaction_count} transactions"
                    + (", captured before" if report.already_captured else "")
                )
                summaries.append(summary)
                context.add_asset_metadata(
                    capture_metadata(report, summary), asset_key=spec.key, partition_key=window.key
                )
            checks = check_windows(zone, spec.key, summaries)
        _keep_up(context, zone)
        yield dg.MaterializeResult(asset_key=spec.key, check_results=checks)

    return raw


def _keep_up(context: dg.AssetExecutionContext, zone: RawZone) -> None:
    """Do the raw zone's upkeep when it is due; the window is landed whatever becomes of it."""
    try:
        report = keep_up(zone)
    except PgcdcError as error:
        context.log.warning(f"Upkeep of the raw zone was put off: {error}")
        return
    if report != UpkeepReport():
        context.log.info(
            f"Upkeep: {report.files_merged} files merged, {report.log_entries_saved} log entries "
            f"saved, {report.files_removed} files removed"
        )


def capture_limits(policy: StreamPolicy) -> CaptureLimits:
    """Turn declared settings into the capture's own."""
    return CaptureLimits(
        total_seconds=policy.total_seconds,
        slot_wait_seconds=policy.slot_wait_seconds,
        stream=StreamSettings(
            status_seconds=policy.status_seconds,
            silence_seconds=policy.silence_seconds,
            wire=WireSettings(batch_bytes=policy.batch_bytes),
        ),
    )
