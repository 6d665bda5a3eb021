"""Data versions of SCD assets, by which Dagster distinguishes merges with changes from merges
without.

A merge materialises its windows for every table of the run. Dagster compares the data versions of
one partition with each other, and each window is a partition of its own: a window that is merged
for the first time has a new data version, whatever the version is. Only an empty version does not
count. So a merge that changed nothing of a table has the empty version.
"""

from __future__ import annotations

import dagster as dg
from dagster._core.definitions.data_version import DATA_VERSION_TAG

from pgcdc_assets.lsn import LsnWindow, Position
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.orchestration.metadata import THROUGH_METADATA

NO_CHANGE = ""


def find_shown_through(instance: dg.DagsterInstance, key: dg.AssetKey) -> LsnWindow | None:
    """Return the window through which a table's newest materialisation went.

    A range run reports all its partitions, in no order: what it merged through is metadata.
    """
    entry = instance.get_latest_materialization_event(key)
    event = entry.asset_materialization if entry is not None else None
    through = event.metadata.get(THROUGH_METADATA) if event is not None else None
    return LsnWindow.parse(str(through.value)) if through is not None else None


def data_version(
    instance: dg.DagsterInstance, key: dg.AssetKey, report: MergeReport, through: LsnWindow
) -> str:
    """Return the data version that a merge gave a table.

    A step that is retried merges the windows of its first attempt again, and finds nothing to do:
    they keep the version that Dagster may not have looked at yet.

    A run that is killed between its commit and its materialisation leaves changes that Dagster
    never heard of. The next merge of the table finds nothing to do, and reports them.

    Args:
        key: the table's asset, whose earlier materialisations are looked at.
        through: the newest window that was merged.
    """
    before = report.watermark_before
    if not (report.changes_read or report.snapshot_lsn is not None or before is None):
        shown = find_shown_through(instance, key)
        if shown is not None and shown.end_position >= Position(through.epoch, before):
            return _shown_version(instance, key, through)
    version = f"{through.epoch}:{report.watermark_after or through.end}"
    return version if report.snapshot_lsn is None else f"{version} snapshot {report.snapshot_lsn}"


def _shown_version(instance: dg.DagsterInstance, key: dg.AssetKey, window: LsnWindow) -> str:
    """Return the data version that a window of a table has; NO_CHANGE if none was shown."""
    records = dg.AssetRecordsFilter(asset_key=key, asset_partitions=[window.key])
    newest = instance.fetch_materializations(records, limit=1).records
    event = newest[0].asset_materialization if newest else None
    tags = event.tags if event is not None else None
    return (tags or {}).get(DATA_VERSION_TAG, NO_CHANGE)


def version_tags(version: str) -> dict[str, str]:
    """Write a data version as the tags of an event."""
    return {DATA_VERSION_TAG: version}
