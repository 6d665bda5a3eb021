"""The asset of logical messages: a Delta table of its own, filled from the raw zone without Spark.

A run appends the messages of every window from the table's watermark through its newest partition,
so retries, skipped runs and ranges converge. A run that the sensor requested continues with
messages that are landed later.
"""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.orchestration.data_versions import find_shown_through
from pgcdc_assets.orchestration.metadata import THROUGH_METADATA
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.partitions import parse_windows, read_run_windows
from pgcdc_assets.orchestration.resources import LakeResource
from pgcdc_assets.orchestration.runs.claims import claimed_step
from pgcdc_assets.orchestration.runs.failures import dagster_failures
from pgcdc_assets.orchestration.runs.long_runs import LongRun
from pgcdc_assets.orchestration.runs.records import MESSAGES_PURPOSE, is_requested_by
from pgcdc_assets.settings import CdcCapture
from pgcdc_assets.tables.messages import AppendReport, MessageTable


def build_messages_asset(
    capture: CdcCapture,
    spec: dg.AssetSpec,
    raw: dg.AssetKey,
    partitions: dg.PartitionsDefinition[str],
) -> dg.AssetsDefinition:
    """Build the asset.

    Args:
        raw: the raw asset.
    """
    names = Names.of(capture)
    window_of_raw = dg.AssetDep(raw, partition_mapping=dg.IdentityPartitionMapping())

    @dg.multi_asset(
        name=names.messages_step,
        specs=[spec.replace_attributes(deps=[window_of_raw])],
        partitions_def=partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=names.messages_pool,
        required_resource_keys={names.lake},
    )
    @claimed_step
    def messages(context: dg.AssetExecutionContext) -> Any:
        lake: LakeResource = getattr(context.resources, names.lake)
        following = LongRun.of(context, names.messages_pool, capture.windows)
        with dagster_failures(capture.name):
            table = MessageTable(lake.zone(capture.name))
            last = read_run_windows(context.partition_keys)[-1]
            report = table.append(last.end_position)
            newest = _find_newest(context, spec.key, last)
            yield dg.MaterializeResult(asset_key=spec.key, metadata=_metadata(report, newest))
            later, shown = LaterMessages(table, last.end_position), last.end_position
            while (found := following.find(later.find)) is not None:
                report = table.append(found)
                known = context.instance.get_dynamic_partitions(capture.windows_name)
                for window in _windows_between(known, shown, found):
                    yield dg.AssetMaterialization(
                        spec.key, partition=window.key, metadata=_metadata(report, window)
                    )
                later.through = shown = found

    return messages


class LaterMessages:
    """The messages that are landed during a run.

    Attributes:
        through: the position below which no message waits.
    """

    def __init__(self, table: MessageTable, through: Position) -> None:
        self._table = table
        self.through = through

    def find(self) -> Position | None:
        """Return the end of the newest window with a message that waits, or None."""
        epoch = self.through.epoch
        captured = self._table.zone.changes.captured_through(epoch) or Lsn(0)
        if Position(epoch, captured) <= self.through:
            return None
        found = self._table.find_waiting(self.through, Position(epoch, captured))
        if found is None:
            self.through = Position(epoch, captured)
        return found


def _windows_between(keys: list[str], since: Position, through: Position) -> Iterator[LsnWindow]:
    for window in sorted(parse_windows(keys)):
        if since < window.end_position <= through:
            yield window


def _find_newest(
    context: dg.AssetExecutionContext, key: dg.AssetKey, through: LsnWindow
) -> LsnWindow:
    """Return the newest appended window.

    A person may select windows that were appended before. The sensor selects the newest ones.
    """
    if is_requested_by(context.run, MESSAGES_PURPOSE):
        return through
    return max(through, find_shown_through(context.instance, key) or through)


def _metadata(report: AppendReport, through: LsnWindow) -> dict[str, Any]:
    """Describe an append.

    Args:
        through: the newest window that is materialised, by which the sensor finds windows that a
            killed run has not materialised.
    """
    metadata: dict[str, Any] = {
        "appended_messages": report.row_count,
        THROUGH_METADATA: through.key,
    }
    if report.watermark is not None:
        metadata["watermark"] = str(report.watermark.lsn)
    return metadata
