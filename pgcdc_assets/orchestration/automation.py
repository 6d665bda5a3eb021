"""Automation conditions for assets that depend on SCD tables."""

from __future__ import annotations

from typing import Any

import dagster as dg

from pgcdc_assets.orchestration.translator import LAYER_TAG, Layer


def on_new_merges() -> dg.AutomationCondition[Any]:
    """Return a condition that requests an asset after a merge changed one of its tables.

    Use the condition for assets without partitions. `AutomationCondition.eager()` waits until every
    window of each table is materialised and no merge runs. This is rarely true while changes
    arrive, so `eager()` may never request the asset.

    A merge materialises every table of its run, but only the tables that it changed get a new data
    version. A dependency of another kind requests the asset at each materialisation.

    The first request follows after each table of the asset has been merged. During a run of the
    asset there is no request. A merge during the run causes a request after the run.
    """
    condition = dg.AutomationCondition
    has_contents = condition.all_deps_match(~condition.missing())
    one, two = (dg.AssetSelection.tag(LAYER_TAG, kind.value) for kind in (Layer.SCD1, Layer.SCD2))
    tables = one | two
    is_changed = condition.data_version_changed() & ~condition.executed_with_root_target()
    table_changed = condition.any_deps_match(is_changed).allow(tables)
    is_news = table_changed | condition.any_deps_updated().ignore(tables)
    # If both events of `since` occur in one evaluation, the second one counts. "Merges since the
    # last request" would therefore lose a merge between a request and the next evaluation.
    is_done = condition.newly_requested().since(is_news)
    return (~is_done & has_contents & ~condition.in_progress()).with_label("on_new_merges")
