"""Statistics of the changes of tables over different ranges."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge.change_stats import FollowedTable, read_change_stats
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.merge.history import (
    Change,
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)

COLUMNS = [column("id"), column("v", "text")]
RELATIONS = [relation(*COLUMNS, relation_id=100 + n, table=f"t{n}") for n in range(4)]


def some_changes(rng: random.Random) -> list[Change]:
    place: dict[str, Any] = {"relation_id": rng.choice(RELATIONS).relation_id}
    made = [
        insert("1", "a", **place),
        update("1", None, unchanged=(1,), **place),
        update("2", "b", old=["1", None], old_kind="K", **place),
        delete("2", None, **place),
        truncate(**place),
    ]
    return rng.sample(made, rng.randint(1, 3))


def test_overlapping_ranges_are_read_in_one_scan_with_the_results_of_each_range(
    zone: RawZone, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = Landing(zone, RELATIONS)
    landing.begin()
    for _ in range(12):
        landing.land(*(some_changes(rng) for _ in range(rng.randint(1, 3))))
    lsns = range(int(landing.windows[0].start), int(landing.windows[-1].end) + 1, 0x10)
    names = [each.name for each in RELATIONS]
    ranges: dict[LsnWindow, set[FollowedTable]] = {}
    for _ in range(10):
        start, end = sorted(rng.sample(lsns, 2))
        # A table under the name of another one, too.
        table = FollowedTable(rng.choice(names), rng.choice(RELATIONS).relation_id)
        ranges.setdefault(LsnWindow(1, Lsn(start), Lsn(end)), set()).add(table)
    scans: list[tuple[int, int]] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        scans.append((options["start"], options["end"]))
        return scan_changes(*arguments, **options)

    monkeypatch.setattr("pgcdc_assets.merge.change_stats.scan_changes", counted)
    together = read_change_stats(zone, ranges).stats
    read = sorted(scans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(read))
    apart: dict[Any, Any] = {}
    for within, tables in ranges.items():
        for table in tables:
            apart |= read_change_stats(zone, {within: [table]}).stats
    assert together == apart
    assert apart
