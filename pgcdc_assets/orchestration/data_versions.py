"""Data versions of SCD assets, by which Dagster recognises merges without changes.

A merge materialises its windows for every table of the run, also for unchanged tables, except in a
wide publication (`assets/idle_tables.py`). Dagster compares the data versions of one partition, and
each window is another partition. So the first data version of a window always counts as a change,
except for the empty version. A merge that did not change a table therefore has the empty version.
"""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg
from dagster._core.definitions.data_version import DATA_VERSION_TAG

from pgcdc_assets.lsn import LsnWindow, Position
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.orchestration.metadata import THROUGH_METADATA

NO_CHANGE = ""


def find_shown_through(instance: dg.DagsterInstance, key: dg.AssetKey) -> LsnWindow | None:
    """Return the newest window of a table's newest merge.

    A range run reports its partitions in no order, so the newest window is in the metadata.
    """
    return _through(instance.get_latest_materialization_event(key))


def read_shown_windows(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetKey]
) -> dict[dg.AssetKey, LsnWindow]:
    """Return the newest window of each table's newest merge, by one query for all tables."""
    found = {}
    for record in instance.get_asset_records(keys):
        through = _through(record.asset_entry.last_materialization)
        if through is not None:
            found[record.asset_entry.asset_key] = through
    return found


def _through(entry: dg.EventLogEntry | None) -> LsnWindow | None:
    event = entry.asset_materialization if entry is not None else None
    through = event.metadata.get(THROUGH_METADATA) if event is not None else None
    return LsnWindow.parse(str(through.value)) if through is not None else None


def data_version(
    instance: dg.DagsterInstance, key: dg.AssetKey, report: MergeReport, through: LsnWindow
) -> str:
    """Return the data version of a table after a merge.

    A retried step merges the windows of its first attempt again, without a change. These windows
    keep their version, because Dagster may not have evaluated it yet.

    If a run is killed between its commit and its materialisation, Dagster does not know the
    changes of the commit. The next merge of the table reports them, even if it has no changes.

    Args:
        key: the table's asset, whose earlier materialisations are read.
        through: the newest merged window.
    """
    before = report.watermark_before
    if not (report.changes_read or report.snapshot_lsn is not None or before is None):
        shown = find_shown_through(instance, key)
        if shown is not None and shown.end_position >= Position(through.epoch, before):
            return _shown_version(instance, key, through)
    version = f"{through.epoch}:{report.watermark_after or through.end}"
    return version if report.snapshot_lsn is None else f"{version} snapshot {report.snapshot_lsn}"


def _shown_version(instance: dg.DagsterInstance, key: dg.AssetKey, window: LsnWindow) -> str:
    """Return the data version of a window of a table; NO_CHANGE without a materialisation."""
    records = dg.AssetRecordsFilter(asset_key=key, asset_partitions=[window.key])
    newest = instance.fetch_materializations(records, limit=1).records
    event = newest[0].asset_materialization if newest else None
    tags = event.tags if event is not None else None
    return (tags or {}).get(DATA_VERSION_TAG, NO_CHANGE)


def version_tags(version: str) -> dict[str, str]:
    """Return a data version as the tags of an event."""
    return {DATA_VERSION_TAG: version}
