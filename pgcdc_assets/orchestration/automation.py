"""When an asset of one's own, made of SCD tables, is to be materialised."""

from __future__ import annotations

from typing import Any

import dagster as dg

from pgcdc_assets.orchestration.translator import LAYER_TAG, Layer


def on_new_merges() -> dg.AutomationCondition[Any]:
    """Ask for an asset when a merge has changed one of the tables that it depends on.

    For assets without partitions. `AutomationCondition.eager()` never asks for them: it waits until
    every window of each table is materialised, and until no run merges, and here there is always a
    window that is not merged yet, or a run that goes on with the next one.

    A merge materialises every table of its run, and gives only those that it changed a new data
    version. An asset of another kind that is depended on asks at each materialisation.

    The asset is asked for once at first, when each table that it depends on has been merged. None
    is asked for while a run of it is under way; a merge in that time asks afterwards.
    """
    condition = dg.AutomationCondition
    has_contents = condition.all_deps_match(~condition.missing())
    one, two = (dg.AssetSelection.tag(LAYER_TAG, kind.value) for kind in (Layer.SCD1, Layer.SCD2))
    tables = one | two
    is_changed = condition.data_version_changed() & ~condition.executed_with_root_target()
    table_changed = condition.any_deps_match(is_changed).allow(tables)
    is_news = table_changed | condition.any_deps_updated().ignore(tables)
    # Of two events of one evaluation the latter condition of `since` counts. So this is not merges
    # since the last request: a merge between a request and the next evaluation would be lost.
    is_done = condition.newly_requested().since(is_news)
    return (~is_done & has_contents & ~condition.in_progress()).with_label("on_new_merges")
