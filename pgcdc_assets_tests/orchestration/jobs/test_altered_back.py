"""Tables that are altered, and altered back after a snapshot: the stream announces no new version.

The merge comes before the re-snapshot that the poll of the catalog asks for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.orchestration.jobs.sync import sync_capture
from pgcdc_assets.orchestration.state import read_state
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import read_scd_state, table_path
from pgcdc_assets_tests.orchestration.conftest import LIMITS, NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

# Statements that alter a table, and the statements that alter it back.
_CHANGES = {
    "key": (
        "alter table a drop constraint a_pkey, add primary key (id, k)",
        "alter table a drop constraint a_pkey, add primary key (id)",
    ),
    "type": (
        "alter table a alter n type date using null",
        "alter table a alter n type integer using null",
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "type" else pytest.mark.soak) for n in _CHANGES],
)
def test_a_merge_waits_for_the_snapshot_of_a_table_that_was_altered_back(
    orchestrated: Orchestrated, spark: SparkSession, name: str
) -> None:
    """F5, F9."""
    there, back = _CHANGES[name]
    orchestrated.commit("alter table a add k int not null default 0, add n int")
    tables = (CdcTable("public", "a", scd=(1, 2)), orchestrated.capture.tables[1])
    made = replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))
    made.sync()
    made.commit(there)
    made.commit("insert into a values (100, 'there', 0, null)")
    made.sync()
    assert made.equals_source("a")
    made.commit(back)
    made.commit("update a set v = 'back' where id < 5; insert into b values (1, 1)")
    requests = made.tick("lag", one_shot=True).run_requests
    (capture,) = [each for each in requests if each.job_name == f"{NAME}_capture"]
    assert made.execute(capture, "capture").success
    (request,) = made.tick("merges").run_requests
    assert made.execute(request, "merge").success, "the table waits"
    gates = {table.table.table: table.gate for table in read_state(made.zone, made.capture).tables}
    assert gates["a"] is not None
    assert gates["a"].heals
    made.sync()
    assert made.equals_source("a")
    assert made.equals_source("b")


@pytest.mark.sampled
def test_with_stop_a_table_that_is_altered_back_stops_before_its_first_row(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """F4. A snapshot accepts a new column, which is then dropped: the version is not new."""
    tables = (CdcTable("public", "a", on_schema_change="stop"), orchestrated.capture.tables[1])
    # After each sync, only captures look at the catalog.
    capture = replace(orchestrated.capture, tables=tables, catalog_poll_seconds=3600)
    made = replace(orchestrated, capture=capture)
    made.sync()
    made.commit("update a set v = 'before' where id = 1")
    made.sync()
    made.commit("alter table a add k int")
    made.commit("update a set k = 7 where id = 1")
    with pytest.raises(PgcdcError, match="column_added"):
        made.sync()
    sync_capture(
        made.instance,
        made.location,
        made.location.captures[NAME],
        limits=LIMITS,
        resnapshot=tables[:1],
    )
    assert made.equals_source("a")
    made.commit("alter table a drop k")
    made.commit("update a set v = 'back' where id = 2")
    requests = made.tick("lag").run_requests
    (wanted,) = [each for each in requests if each.job_name == f"{NAME}_capture"]
    # The look is behind the end of the window.
    made.commit("insert into b values (2, 2)")
    assert made.execute(wanted, "capture").success
    (request,) = made.tick("merges").run_requests
    assert not made.execute(request, "merge").success
    state = read_scd_state(made.lake, NAME, table_path(made.lake, NAME, "public", "a", 1))
    assert state is not None
    assert "k" in state.columns
