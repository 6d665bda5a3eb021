"""Partitions that are attached and detached between two looks at the catalog.

The catalog has no trace of them: their rows came under the name of the root, and the root no longer
has them.
"""

from __future__ import annotations

import pytest

from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.raw.relations.schema_events import SchemaChange, SchemaEvent
from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.prepared import two_phase_limits

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

_TABLES = """
create table root (id int primary key, a int) partition by range (id);
create table kept partition of root for values from (0) to (10);
create table other (id int primary key, a int) partition by range (id);
create table mid partition of other for values from (0) to (50) partition by range (id);
create table single (a int, id int primary key);
create table plain (id int primary key, a int)
"""
_PUBLICATION = "for table root, other, plain with (publish_via_partition_root = true)"
_ATTACH = "alter table root attach partition single for values from (20) to (30)"
_DETACH = "alter table root detach partition single"


@pytest.fixture
def rooted(capturing: Capturing) -> Capturing:
    """Return a capture of two partitioned tables whose catalog was polled."""
    capturing.begin(_TABLES)
    capturing.database.execute(f"drop publication pub; create publication pub {_PUBLICATION}")
    assert poll(capturing) == []
    return capturing


def captured(
    capturing: Capturing, *windows: LsnWindow, two_phase: bool = False
) -> list[SchemaEvent]:
    """Capture windows or all commits, and return the events of partitions since the last call."""
    known = {event.identity for event in capturing.zone.schema_events.read()}
    for window in windows or (capturing.window(),):
        capturing.capture(window, two_phase_limits() if two_phase else None)
    return [e for e in capturing.zone.schema_events.read() if e.identity not in known]


def test_a_partition_that_was_attached_and_detached_needs_a_snapshot(rooted: Capturing) -> None:
    """E3, E5: rows of the passing partition are in the lake, and no longer in the table."""
    execute = rooted.database.execute
    for statement in (_ATTACH, "insert into root values (1), (25)", _DETACH):
        execute(statement)
    before = rooted.flush_lsn()
    (event,) = captured(rooted)
    assert shown([event]) == ["root partition_detached!"]
    assert event.lsn >= before, "a snapshot at or above the LSN has no row of the partition"
    assert event.seen_at is not None
    assert "public.single" in event.detail
    # The stream does not announce the partition again.
    execute("insert into root values (2)")
    assert captured(rooted) == []
    # Its relation version is known now.
    execute(f"{_ATTACH}; insert into root values (26); {_DETACH}")
    assert shown(captured(rooted)) == ["root partition_detached!"]


def test_a_partition_that_was_created_and_dropped_needs_a_snapshot(rooted: Capturing) -> None:
    """E1, E3: also below a partition, and in one session of several windows."""
    statements = (
        "create table brief partition of mid for values from (0) to (9);"
        "insert into other values (1); drop table brief; insert into plain values (1)",
        "create table brief partition of root for values from (40) to (50);"
        "insert into root values (41); insert into plain values (2); drop table brief",
        "insert into root values (3); insert into plain values (3)",
    )
    windows = []
    for statement in statements:
        for each in statement.split(";"):
            rooted.database.execute(each)
        windows.append(rooted.window())
        rooted.capture(windows[-1])
    events = rooted.zone.schema_events.read()
    assert shown(events) == ["other partition_detached!", "root partition_detached!"]


@pytest.mark.sampled
def test_partitions_that_stay_or_that_a_poll_has_seen_need_no_second_snapshot(
    rooted: Capturing,
) -> None:
    """E1, E3, E5."""
    execute = rooted.database.execute
    execute("create table new partition of root for values from (30) to (40)")
    execute("insert into root values (5), (35); insert into plain values (1)")
    assert shown(captured(rooted)) == ["root partition_attached"]
    execute("drop table new")
    assert shown(captured(rooted)) == ["root partition_detached!"]
    execute(_ATTACH)
    execute("insert into root values (25)")
    assert shown(poll(rooted)) == ["root partition_attached!"]
    execute(_DETACH)
    assert shown(poll(rooted)) == ["root partition_detached!"]
    assert captured(rooted) == []


def test_without_a_look_an_unknown_partition_needs_a_snapshot(
    rooted: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3: a capture whose time is up does not look at the catalog."""
    monkeypatch.setattr("pgcdc_assets.capture.landing.Landing._has_time", lambda landing: False)
    for statement in (_ATTACH, "insert into root values (1), (25)", _DETACH):
        rooted.database.execute(statement)
    (event,) = captured(rooted)
    assert (event.change, event.needs_snapshot) == (SchemaChange.PARTITION_DETACHED, True)
    assert captured(rooted) == []
    assert poll(rooted) == []


def test_the_detachment_of_an_unused_partition_covers_no_other_partition(
    rooted: Capturing,
) -> None:
    """E3, E5: the rows of the passing partition were captured after the poll."""
    execute = rooted.database.execute
    execute("create table empty partition of root for values from (50) to (60)")
    assert shown(captured(rooted)) == ["root partition_attached"]
    for statement in (_ATTACH, "insert into root values (25)", _DETACH):
        execute(statement)
    execute("alter table root detach partition empty")
    assert shown(poll(rooted)) == ["root partition_detached"]
    assert shown(captured(rooted)) == ["root partition_detached!"]


def test_a_table_announced_after_a_truncated_root_is_no_partition(rooted: Capturing) -> None:
    """E1: TRUNCATE announces a partitioned table without a partition."""
    rooted.database.execute("truncate root")
    rooted.database.execute("insert into plain values (1)")
    assert captured(rooted) == []
    # Each window has a stream of its own, which announces each table again.
    rooted.database.transaction("truncate root", "insert into plain values (2)")
    assert captured(rooted) == []
    rooted.database.transaction("truncate root, plain", "insert into plain values (3)")
    assert captured(rooted) == []


def test_a_passing_partition_beside_a_truncated_root_needs_a_snapshot(rooted: Capturing) -> None:
    """E3: the root is announced again before its partition."""
    rooted.database.execute(_ATTACH)
    rooted.database.transaction("truncate root", "insert into root values (25)")
    rooted.database.execute(_DETACH)
    assert shown(captured(rooted)) == ["root partition_detached!"]


@pytest.fixture
def two_phase(rooted: Capturing) -> Capturing:
    """Return a capture whose slot has two_phase already."""
    assert captured(rooted, two_phase=True) == []
    return rooted


@pytest.mark.every_pg(since=15)
def test_a_passing_partition_of_a_stored_prepared_transaction_needs_a_snapshot(
    two_phase: Capturing,
) -> None:
    """E3: the window of PREPARE is captured, and lands no row."""
    database = two_phase.database
    database.execute(_ATTACH)
    database.prepare("g", "insert into root values (25)")
    first = two_phase.window()
    database.end_prepared("g")
    database.execute(_DETACH)
    second = LsnWindow.of(1, first.end, two_phase.flush_lsn())
    assert shown(captured(two_phase, first, second, two_phase=True)) == ["root partition_detached!"]


@pytest.mark.every_pg(since=15)
def test_a_table_is_no_partition_of_the_root_of_a_stored_prepared_transaction(
    two_phase: Capturing,
) -> None:
    """E1: the root is announced at the commit, after the other table."""
    database = two_phase.database
    database.prepare("g", "insert into root values (1)")
    database.execute("insert into plain values (1)")
    assert captured(two_phase, two_phase=True) == []
    database.end_prepared("g")
    database.execute("insert into plain values (2)")
    assert captured(two_phase, two_phase=True) == []
