"""Unlogged partitions, whose rows are not in the WAL (E5)."""

from __future__ import annotations

import pytest

from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

_LOADED = "create unlogged table {name} partition of root for values in ({value})"


@pytest.fixture
def rooted(capturing: Capturing) -> Capturing:
    """Return a capture of a partitioned table whose catalog was polled."""
    capturing.begin(
        "create table root (id int primary key, v text) partition by list (id)",
        "create table kept partition of root for values in (0)",
    )
    capturing.database.execute("alter publication pub set (publish_via_partition_root = true)")
    poll(capturing)
    return capturing


def test_a_partition_that_becomes_logged_needs_a_snapshot(rooted: Capturing) -> None:
    """A load into an unlogged partition is faster."""
    execute = rooted.database.execute
    execute(_LOADED.format(name="slow", value=1))
    execute("insert into root values (1)")
    assert poll(rooted) == []
    execute("alter table slow set logged")
    assert shown(poll(rooted)) == ["root partition_attached!"]
    assert poll(rooted) == []
    execute("alter table slow set unlogged")
    assert shown(poll(rooted)) == ["root partition_detached!"]


def test_a_partition_that_was_loaded_between_two_polls_needs_a_snapshot(rooted: Capturing) -> None:
    execute = rooted.database.execute
    execute(_LOADED.format(name="quick", value=2))
    execute("insert into root values (2)")
    execute("alter table quick set logged")
    assert shown(poll(rooted)) == ["root partition_attached!"]
    execute("create table logged partition of root for values in (3)")
    execute("insert into root values (3)")
    assert shown(poll(rooted)) == ["root partition_attached"]


def test_a_partition_that_was_unlogged_between_two_polls_needs_a_snapshot(
    rooted: Capturing,
) -> None:
    """VACUUM FULL keeps the TOAST table, and ALTER TABLE does not."""
    execute = rooted.database.execute
    execute("create table other partition of root for values in (4)")
    execute("insert into root values (0, 'a')")
    assert shown(poll(rooted)) == ["root partition_attached"]
    execute("alter table kept set unlogged; delete from kept; alter table kept set logged")
    (event,) = poll(rooted)
    assert shown([event]) == ["root table_rewritten!"]
    assert "public.kept." in event.detail
    execute("vacuum full kept")
    assert poll(rooted) == []
