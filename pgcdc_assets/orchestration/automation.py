"""When an asset of one's own, made of SCD tables, is to be materialised."""

from __future__ import annotations

from typing import Any

import dagster as dg


def on_new_merges() -> dg.AutomationCondition[Any]:
    """Ask for an asset when a merge has materialised one of the tables that it depends on.

    For assets without partitions. `AutomationCondition.eager()` never asks for them: it waits until
    every window of each table is materialised, and until no run merges, and here there is always a
    window that is not merged yet, or a run that goes on with the next one.

    The asset is asked for once at first, when each table that it depends on has been merged. None
    is asked for while a run of it is under way; a merge in that time asks afterwards.
    """
    condition = dg.AutomationCondition
    has_contents = condition.all_deps_match(~condition.missing())
    # Of two events of one evaluation the latter condition of `since` counts. So this is not merges
    # since the last request: a merge between a request and the next evaluation would be lost.
    is_done = condition.newly_requested().since(condition.any_deps_updated())
    return (~is_done & has_contents & ~condition.in_progress()).with_label("on_new_merges")
