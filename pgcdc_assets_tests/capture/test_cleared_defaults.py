"""A rewrite of a table clears the value of the rows that are older than a column (F2)."""

from __future__ import annotations

import pytest

from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]


def _add_column(capturing: Capturing) -> None:
    """Add a column with a default to a known table, and poll the catalog."""
    capturing.begin("create table t (id int primary key)")
    capturing.database.execute("insert into t values (1)")
    capturing.capture()
    assert poll(capturing) == []
    capturing.database.execute("alter table t add c int default 5")
    assert shown(poll(capturing)) == ["t column_added c"]


def _first_row(capturing: Capturing) -> str | None:
    """Capture the first row with the column, and return the known value of older rows."""
    capturing.database.execute("insert into t (id) values (2)")
    capturing.capture()
    newest = capturing.zone.relations.versions(1)[-1]
    return newest.relation.columns[-1].missing


@pytest.mark.parametrize("is_polled", [False, True])
def test_a_poll_keeps_the_default_of_a_column_for_its_first_row(
    capturing: Capturing, is_polled: bool
) -> None:
    _add_column(capturing)
    for statement in ("vacuum full t", "alter table t alter c set default 7", "vacuum full t"):
        capturing.database.execute(statement)
        if is_polled:
            assert poll(capturing) == []
    assert _first_row(capturing) == "5"
    opened = [] if is_polled else ["t table_rewritten!"]
    assert shown(capturing.zone.schema_events.read()) == ["t column_added c", *opened]


def test_a_lost_default_of_another_type_needs_a_snapshot(capturing: Capturing) -> None:
    """F5: the catalog has the value as a number of the earlier type."""
    _add_column(capturing)
    capturing.database.execute("alter table t alter c type bigint")
    poll(capturing)
    assert _first_row(capturing) is None
    assert shown(capturing.zone.schema_events.read()) == [
        "t column_added c",
        "t column_added c!",
        "t type_widened c",
        "t values_uncertain c",
    ]
