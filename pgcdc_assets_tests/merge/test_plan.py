"""Cases of the plan of a merge, without lake and Spark."""

from __future__ import annotations

import pytest

from pgcdc_assets.errors import MergeConflict, WatermarkGap
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge.plan import Landed, Limits, Plan, Sizes, plan_merge
from pgcdc_assets.raw.delta.sizes import RowGroup
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import StepLimit

TARGET = CdcTable("shop", "items")


def _window(start: int, end: int, changes: int = 1, epoch: int = 1) -> WindowSummary:
    counts = {"shop.items": {"I": changes}} if changes else {}
    return WindowSummary(LsnWindow.of(epoch, start, end), changes, changes, counts)


def _snapshot(lsn: int, epoch: int = 1, table: str = "items") -> Snapshot:
    return Snapshot(epoch, Lsn(lsn), "shop", table, 1, 10)


def _landed(*windows: WindowSummary) -> Landed:
    return lambda epoch: [w for w in windows if w.window.epoch == epoch]


WINDOWS = [_window(100, 200), _window(200, 300, changes=0), _window(300, 400, changes=5)]
LANDED = _landed(*WINDOWS)
NEWEST = WINDOWS[-1].window


def test_the_first_merge_folds_the_snapshot_and_every_later_window() -> None:
    plan = plan_merge(TARGET, None, [_snapshot(100)], LANDED, NEWEST)
    assert (plan.start, plan.end, plan.snapshot) == (100, 400, _snapshot(100))
    assert [w.start for w in plan.windows] == [100, 200, 300]
    assert plan.recorded_changes == 6


def test_later_merges_continue_at_the_watermark_without_the_snapshot() -> None:
    plan = plan_merge(TARGET, Position(1, Lsn(200)), [_snapshot(100)], LANDED, NEWEST)
    assert (plan.start, plan.end, plan.snapshot) == (200, 400, None)
    assert plan.recorded_changes == 5


def test_reading_begins_at_the_first_window_that_holds_a_change() -> None:
    assert plan_merge(TARGET, Position(1, Lsn(200)), [], LANDED, NEWEST).first_change == 300
    assert plan_merge(TARGET, Position(1, Lsn(350)), [], LANDED, NEWEST).first_change == 350


def test_a_later_snapshot_inside_a_window_replaces_earlier_changes() -> None:
    plan = plan_merge(
        TARGET, Position(1, Lsn(200)), [_snapshot(100), _snapshot(350)], LANDED, NEWEST
    )
    assert (plan.start, plan.snapshot) == (350, _snapshot(350))
    assert [w.start for w in plan.windows] == [300]


def test_a_snapshot_beyond_the_requested_window_is_the_whole_plan() -> None:
    plan = plan_merge(TARGET, Position(1, Lsn(100)), [_snapshot(350)], LANDED, WINDOWS[0].window)
    assert (plan.start, plan.end, plan.windows) == (350, 350, ())


def test_the_plan_for_a_window_below_the_watermark_is_empty() -> None:
    plan = plan_merge(TARGET, Position(1, Lsn(400)), [_snapshot(100)], LANDED, WINDOWS[0].window)
    assert (plan.start, plan.end, plan.snapshot, plan.windows) == (400, 400, None, ())


@pytest.mark.parametrize(
    ("missing", "expected", "found"), [(0, 100, 200), (1, 200, 300), (2, 300, 400)]
)
def test_the_error_about_a_missing_window_names_the_gap(
    missing: int, expected: int, found: int
) -> None:
    windows = [w for i, w in enumerate(WINDOWS) if i != missing]
    with pytest.raises(WatermarkGap) as caught:
        plan_merge(TARGET, None, [_snapshot(100)], _landed(*windows), NEWEST)
    assert (caught.value.expected, caught.value.found) == (expected, found)


def test_a_table_without_a_snapshot_is_refused() -> None:
    with pytest.raises(MergeConflict, match="snapshot"):
        plan_merge(TARGET, None, [_snapshot(100, table="other")], LANDED, NEWEST)


def test_a_new_epoch_needs_a_new_snapshot() -> None:
    windows = [_window(50, 60, epoch=2)]
    with pytest.raises(MergeConflict, match="epoch 2"):
        plan_merge(
            TARGET, Position(1, Lsn(400)), [_snapshot(100)], _landed(*windows), windows[0].window
        )


def test_a_snapshot_of_a_later_epoch_is_newer_at_any_lsn() -> None:
    windows = [_window(50, 60, epoch=2)]
    plan = plan_merge(
        TARGET,
        Position(1, Lsn(400)),
        [_snapshot(100), _snapshot(50, epoch=2)],
        _landed(*windows),
        windows[0].window,
    )
    assert (plan.epoch, plan.start, plan.end) == (2, 50, 60)


def test_a_window_of_an_older_epoch_has_no_effect() -> None:
    plan = plan_merge(TARGET, Position(2, Lsn(50)), [], LANDED, NEWEST)
    assert (plan.epoch, plan.start, plan.end) == (2, 50, 50)


def test_a_merge_may_end_inside_a_window() -> None:
    plan = plan_merge(TARGET, Position(1, Lsn(100)), [], LANDED, LsnWindow.of(1, 0, 350))
    assert (plan.start, plan.end) == (100, 350)
    assert [w.start for w in plan.windows] == [100, 200, 300]


def test_a_merge_ignores_snapshots_above_its_end() -> None:
    copies = [_snapshot(100), _snapshot(350)]
    through = LsnWindow.of(1, 0, 300)
    plan = plan_merge(TARGET, None, copies, LANDED, through, is_bounded=True)
    assert (plan.snapshot, plan.end) == (_snapshot(100), 300)


def test_a_history_folds_changes_and_snapshots_in_order() -> None:
    """A snapshot in between is applied as the difference to the result of the earlier changes."""
    copies = [_snapshot(100), _snapshot(350)]
    first = plan_merge(TARGET, None, copies, LANDED, NEWEST, in_order=True)
    assert (first.snapshot, first.start, first.end, first.is_last) == (
        _snapshot(100),
        100,
        349,
        False,
    )
    second = plan_merge(TARGET, Position(1, Lsn(349)), copies, LANDED, NEWEST, in_order=True)
    assert (second.snapshot, second.start, second.end, second.is_last) == (
        _snapshot(350),
        350,
        400,
        True,
    )
    late = plan_merge(TARGET, Position(1, Lsn(200)), copies, LANDED, NEWEST, in_order=True)
    assert (late.snapshot, late.start, late.end, late.is_last) == (None, 200, 349, False)


def test_a_history_waits_for_changes_before_a_snapshot_that_is_ahead() -> None:
    """The changes between the window and the snapshot must be folded."""
    plan = plan_merge(
        TARGET, Position(1, Lsn(100)), [_snapshot(350)], LANDED, WINDOWS[0].window, in_order=True
    )
    assert (plan.snapshot, plan.start, plan.end, plan.is_last) == (None, 100, 200, True)


def test_a_history_that_cannot_be_folded_continues_with_the_next_snapshot() -> None:
    plan = plan_merge(
        TARGET,
        Position(1, Lsn(200)),
        [_snapshot(350)],
        LANDED,
        NEWEST,
        in_order=True,
        skips_to_snapshot=True,
    )
    assert (plan.snapshot, plan.start, plan.end, plan.is_last) == (_snapshot(350), 350, 400, True)


def test_the_changes_that_a_snapshot_replaces_are_named_without_a_remedy() -> None:
    plan = plan_merge(TARGET, None, [_snapshot(350)], LANDED, NEWEST)
    gap = WatermarkGap(table="shop.orders", expected=Lsn(200), found=Lsn(300))
    assert "pgcdc resnapshot" in str(gap)
    sentence = plan.after_left_out(Lsn(200), gap).left_out
    assert f"The changes from {Lsn(200)} to {Lsn(350)} could not be merged" in sentence
    assert "never captured" in sentence and "pgcdc resnapshot" not in sentence


def test_a_history_folds_the_rest_of_an_epoch_before_the_next_epoch() -> None:
    copies = [_snapshot(100), _snapshot(50, epoch=2)]
    landed = _landed(*WINDOWS, _window(50, 60, epoch=2))
    through = LsnWindow.of(2, 50, 60)
    rest = plan_merge(TARGET, Position(1, Lsn(300)), copies, landed, through, in_order=True)
    assert (rest.epoch, rest.snapshot, rest.start, rest.end) == (1, None, 300, 400)
    after = plan_merge(TARGET, Position(1, Lsn(400)), copies, landed, through, in_order=True)
    assert (after.epoch, after.snapshot, after.end, after.is_last) == (2, copies[1], 60, True)


def test_a_history_begins_an_epoch_with_its_first_snapshot() -> None:
    """No change of the epoch precedes its first snapshot, even if the snapshot is ahead."""
    copies = [_snapshot(100), _snapshot(90, epoch=2), _snapshot(95, epoch=2)]
    landed = _landed(*WINDOWS, _window(50, 60, epoch=2))
    through = LsnWindow.of(2, 50, 60)
    rest = plan_merge(TARGET, Position(1, Lsn(300)), copies, landed, through, in_order=True)
    assert (rest.epoch, rest.snapshot, rest.start, rest.end) == (1, None, 300, 400)
    assert not rest.is_last
    first = plan_merge(TARGET, Position(1, Lsn(400)), copies, landed, through, in_order=True)
    assert (first.snapshot, first.start, first.end, first.is_last) == (copies[1], 90, 90, True)
    then = plan_merge(TARGET, Position(2, Lsn(90)), copies, landed, through, in_order=True)
    assert (then.epoch, then.snapshot, then.start, then.end) == (2, None, 90, 90)
    # A window of the previous epoch is folded without the snapshot, because windows may follow.
    older = plan_merge(TARGET, Position(1, Lsn(200)), copies, landed, NEWEST, in_order=True)
    assert (older.snapshot, older.end, older.is_last) == (None, 400, True)


def test_a_rebuild_does_not_begin_an_epoch_with_a_snapshot_above_its_end() -> None:
    through = LsnWindow.of(2, 50, 60)
    landed = _landed(*WINDOWS, _window(50, 60, epoch=2))
    copies = [_snapshot(100), _snapshot(90, epoch=2)]
    with pytest.raises(MergeConflict, match="epoch 2 of the slot has no snapshot of the table"):
        plan_merge(
            TARGET, Position(1, Lsn(400)), copies, landed, through, in_order=True, is_bounded=True
        )


@pytest.mark.parametrize("in_order", [False, True])
def test_a_table_without_a_snapshot_of_the_epoch_is_merged_through_the_end_of_its_own(
    in_order: bool,
) -> None:
    through = LsnWindow.of(2, 50, 60)
    landed = _landed(*WINDOWS, _window(50, 60, epoch=2))

    def plan(start: int) -> Plan:
        mark = Position(1, Lsn(start))
        return plan_merge(TARGET, mark, [_snapshot(100)], landed, through, in_order=in_order)

    rest = plan(200)
    assert (rest.epoch, rest.snapshot, rest.start, rest.end) == (1, None, 200, 400)
    assert rest.is_last
    with pytest.raises(MergeConflict, match="epoch 2 of the slot has no snapshot of the table"):
        plan(400)


MEGABYTE = 1024 * 1024


def _step(changes: int = 10**9, size: int = 10**18, sizes: Sizes | None = None) -> Limits:
    return Limits(StepLimit(changes, size), sizes)


def test_a_step_ends_before_the_limit_of_changes() -> None:
    """A window without changes is part of the step, because it costs nothing."""
    plan = plan_merge(TARGET, None, [_snapshot(100)], LANDED, NEWEST, limits=_step(changes=5))
    assert (plan.start, plan.end, plan.recorded_changes, plan.is_last) == (100, 300, 1, False)
    assert [w.start for w in plan.windows] == [100, 200]
    rest = plan_merge(TARGET, Position(1, plan.end), [], LANDED, NEWEST, limits=_step(changes=5))
    assert (rest.start, rest.end, rest.recorded_changes, rest.is_last) == (300, 400, 5, True)


def test_a_window_above_the_limit_is_a_separate_step() -> None:
    plan = plan_merge(TARGET, Position(1, Lsn(300)), [], LANDED, NEWEST, limits=_step(changes=1))
    assert (plan.start, plan.end, plan.recorded_changes, plan.is_last) == (300, 400, 5, True)


def test_a_step_does_not_depend_on_windows_after_it() -> None:
    few = [_window(n, n + 1) for n in range(100, 110)]
    many = [_window(n, n + 1) for n in range(100, 500)]
    steps = [
        plan_merge(
            TARGET, Position(1, Lsn(100)), [], _landed(*w), w[-1].window, limits=_step(changes=4)
        )
        for w in (few, many)
    ]
    assert {(step.end, step.recorded_changes) for step in steps} == {(104, 4)}


def test_a_step_is_bounded_by_the_bytes_of_files_and_wal() -> None:
    """A table with few large rows has a small share of the rows of all tables."""
    size = 64 * MEGABYTE
    windows = [
        WindowSummary(
            LsnWindow.of(1, n * size, (n + 1) * size),
            1000,
            1,
            {"shop.items": {"I": 10}, "shop.small": {"I": 990}},
        )
        for n in range(1, 5)
    ]

    def sizes(epoch: int, start: Lsn, end: Lsn) -> list[RowGroup]:
        lsns = (start, end - 1)
        one = RowGroup(("shop", "shop"), ("items", "items"), lsns, 4 * 60 * MEGABYTE, 40)
        other = RowGroup(("shop", "shop"), ("small", "small"), lsns, 10**12, 4 * 990)
        return [one, other]

    def plan(found: Sizes | None) -> Plan:
        limits = _step(size=130 * MEGABYTE, sizes=found)
        return plan_merge(
            TARGET, Position(1, Lsn(size)), [], _landed(*windows), windows[-1].window, limits=limits
        )

    assert (plan(None).end, plan(None).is_last) == (5 * size, True)
    assert (plan(sizes).end, plan(sizes).is_last) == (3 * size, False)
    assert plan(sizes).change_bytes == 120 * MEGABYTE


def test_the_bytes_of_a_compacted_row_group_are_divided_among_all_its_windows() -> None:
    """Otherwise the first merge after each compaction would count as large."""
    windows = [_window(n * MEGABYTE, (n + 1) * MEGABYTE) for n in range(1, 65)]
    last = windows[-1].window
    rows = sum(window.row_count for window in windows)
    group = RowGroup(
        ("shop", "shop"),
        ("items", "items"),
        (windows[0].window.start, last.end),
        640 * MEGABYTE,
        rows,
    )
    plan = plan_merge(
        TARGET,
        Position(1, last.start),
        [],
        _landed(*windows),
        last,
        limits=_step(sizes=lambda epoch, start, end: [group]),
    )
    assert plan.windows == (last,)
    assert plan.change_bytes == 10 * MEGABYTE


def test_a_step_of_a_history_after_a_snapshot_has_the_limit() -> None:
    copies = [_snapshot(100), _snapshot(500)]
    plan = plan_merge(
        TARGET, None, copies[:1], LANDED, NEWEST, in_order=True, limits=_step(changes=1)
    )
    assert (plan.snapshot, plan.end, plan.is_last) == (copies[0], 300, False)
