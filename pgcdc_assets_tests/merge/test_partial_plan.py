"""The steps of a merge with partial snapshots, without lake and Spark."""

from __future__ import annotations

import pytest

from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge.plan import plan_merge
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.settings import CdcTable

TARGET = CdcTable("shop", "items")
COUNTS = {"shop.items": {"I": 1}}
WINDOWS = [
    WindowSummary(LsnWindow.of(epoch, start, start + 100), 1, 1, COUNTS)
    for epoch in (1, 2)
    for start in (100, 200, 300)
]


def snapshot(lsn: int, epoch: int = 1, table: str = "items") -> Snapshot:
    return Snapshot(epoch, Lsn(lsn), "shop", table, 1, 10)


def steps(
    watermark: int | None,
    complete: list[Snapshot],
    partial: list[Snapshot],
    through: int = 400,
    epochs: tuple[int, int] = (1, 1),
    *,
    in_order: bool = False,
) -> list[str]:
    """Plan steps until the last one, and describe each by what it applies."""
    mark = None if watermark is None else Position(epochs[0], Lsn(watermark))
    found: list[str] = []
    while True:
        plan = plan_merge(
            TARGET,
            mark,
            complete,
            lambda epoch: [w for w in WINDOWS if w.window.epoch == epoch],
            LsnWindow.of(epochs[1], 0, through),
            partial=partial,
            in_order=in_order,
        )
        applied = plan.snapshot or plan.partial
        kind = "P" if plan.partial is not None else "S"
        name = "" if applied is None else f"{kind}{int(applied.snapshot_lsn)} "
        found.append(f"{name}{int(plan.start)}-{int(plan.end)}")
        mark = Position(plan.epoch, plan.end)
        if plan.is_last:
            return found


@pytest.mark.parametrize("in_order", [False, True])
def test_a_partial_snapshot_is_a_step_between_the_changes_around_it(in_order: bool) -> None:
    partial = [snapshot(248), snapshot(304), snapshot(300, table="orders"), snapshot(304, epoch=2)]
    expected = ["200-247", "P248 248-248", "248-303", "P304 304-304", "304-400"]
    assert steps(200, [snapshot(100)], partial, in_order=in_order) == expected
    expected = ["S100 100-247", *expected[1:]]
    assert steps(None, [snapshot(100)], partial, in_order=in_order) == expected


@pytest.mark.parametrize("in_order", [False, True])
def test_one_that_is_merged_or_above_the_end_is_left_out(in_order: bool) -> None:
    partial = [snapshot(200), snapshot(328)]
    assert steps(200, [], partial, 320, in_order=in_order) == ["200-320"]
    assert steps(327, [], partial, 328, in_order=in_order) == ["P328 328-328", "328-328"]
    assert steps(328, [], partial, 400, in_order=in_order) == ["328-400"]


def test_a_complete_snapshot_replaces_those_before_it_unless_the_table_keeps_history() -> None:
    complete, partial = [snapshot(100), snapshot(304)], [snapshot(248), snapshot(352)]
    expected = ["S304 304-351", "P352 352-352", "352-400"]
    assert steps(200, complete, partial) == expected
    in_order = ["200-247", "P248 248-248", "248-303", *expected]
    assert steps(200, complete, partial, in_order=True) == in_order
    # The changes before the complete snapshot cannot be folded.
    skipped = plan_merge(
        TARGET,
        Position(1, Lsn(200)),
        complete,
        lambda epoch: WINDOWS[:3],
        LsnWindow.of(1, 0, 400),
        partial=partial,
        in_order=True,
        skips_to_snapshot=True,
    )
    assert skipped.snapshot == complete[1]


@pytest.mark.parametrize("in_order", [False, True])
def test_a_new_epoch_begins_with_a_complete_snapshot(in_order: bool) -> None:
    complete, partial = [snapshot(100), snapshot(200, 2)], [snapshot(152, 2), snapshot(304, 2)]
    expected = ["S200 200-303", "P304 304-304", "304-400"]
    before = ["300-400"] if in_order else []
    found = steps(300, complete, partial, epochs=(1, 2), in_order=in_order)
    assert found == [*before, *expected]
