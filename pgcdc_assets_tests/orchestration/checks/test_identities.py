"""The check `replica_identity`: updates and deletes of each table identify their row."""

from __future__ import annotations

import dagster as dg
import psycopg2
import pytest

from pgcdc_assets.orchestration.checks.identities import REPLICA_IDENTITY
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

pytestmark = pytest.mark.postgres

KEY = dg.AssetCheckKey(dg.AssetKey([NAME, "snapshot"]), REPLICA_IDENTITY)
PARTITIONED = """
drop table b;
create table b (id int primary key, n numeric(10, 2)) partition by range (id);
create table b1 partition of b for values from (0) to (10);
create table b2 partition of b default;
alter table b2 alter n set not null; create unique index by_n on b2 (n);
insert into b values (1, 1), (20, 1);
alter publication pub add table b;
alter publication pub set (publish_via_partition_root = true)
"""


def run_check(orchestrated: Orchestrated) -> tuple[bool, object]:
    """Run the check, and return its result and the tables that fail."""
    (found,) = orchestrated.evaluate(KEY)
    return found.passed, found.metadata["tables"].value


def tick(orchestrated: Orchestrated) -> list[bool]:
    """Evaluate the sensor, and return the results of the check that the sensor records."""
    events = orchestrated.tick("lag", one_shot=True).asset_events
    checks = [event for event in events if isinstance(event, dg.AssetCheckEvaluation)]
    return [check.passed for check in checks if check.asset_check_key == KEY]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("lose", "restore", "is_refused"),
    [
        ("replica identity nothing", "replica identity default", True),
        ("replica identity using index by_n; drop index by_n", "replica identity full", True),
        ("replica identity using index by_n", "replica identity default", False),
    ],
)
def test_the_identity_of_each_partition_is_checked(
    orchestrated: Orchestrated, lose: str, restore: str, is_refused: bool
) -> None:
    """D10, D13: the identity of the root makes no difference to the rows of a partition."""
    execute = orchestrated.database.execute
    execute(PARTITIONED)
    orchestrated.copy()
    assert run_check(orchestrated) == (True, "none")
    execute(f"alter table b2 {lose}")
    if is_refused:
        with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState):
            execute("delete from b where id = 20")
    assert run_check(orchestrated) == (False, "public.b")
    # A catalog poll does not know the partitions, and does not overrule the run.
    execute("alter table a replica identity full")
    assert tick(orchestrated) == []
    execute(f"alter table b2 {restore}")
    execute("update b set n = 2")
    assert run_check(orchestrated) == (True, "none")
    assert tick(orchestrated) == []


def test_a_deferrable_key_fails_and_a_publication_of_inserts_needs_no_identity(
    orchestrated: Orchestrated,
) -> None:
    execute = orchestrated.database.execute
    execute("alter table b drop constraint b_pkey; alter table b add primary key (id) deferrable")
    assert run_check(orchestrated) == (False, "public.b")
    execute("alter publication pub set (publish = 'insert')")
    assert run_check(orchestrated) == (True, "none")
