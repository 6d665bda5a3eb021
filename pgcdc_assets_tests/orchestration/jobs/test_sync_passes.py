"""`sync_capture` while the source alters a table: another pass heals the table.

The statements run when the sync reports the failure of the first pass, so the order is certain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.orchestration.jobs.sync import sync_capture
from pgcdc_assets.orchestration.jobs.sync_passes import PASSES
from pgcdc_assets.orchestration.runs.partial_request import PartialRequest
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.orchestration.conftest import LIMITS, NAME, Orchestrated

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]


class Altering:
    """Prints the lines of a sync, and executes a statement at each failure."""

    def __init__(self, orchestrated: Orchestrated, statements: Iterator[str]) -> None:
        self.orchestrated = orchestrated
        self.statements = statements
        self.failures = 0
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if line.endswith("Continuing with the rest."):
            self.failures += 1
            for statement in self.statements:
                self.orchestrated.commit(statement)
                break


@pytest.fixture
def keyed(orchestrated: Orchestrated, spark: SparkSession) -> Orchestrated:
    """Return a capture with a history of `a`, after its first sync."""
    tables = (CdcTable("public", "a", scd=(1, 2)), orchestrated.capture.tables[1])
    made = replace(orchestrated, capture=replace(orchestrated.capture, tables=tables))
    made.sync()
    return made


def lose_key(orchestrated: Orchestrated) -> None:
    orchestrated.commit("alter table a replica identity full, drop constraint a_pkey")
    orchestrated.commit("update a set v = 'without a key' where id = 1")


@pytest.mark.sampled
def test_a_key_that_returns_during_the_run_heals_the_table(keyed: Orchestrated) -> None:
    """F9."""
    lose_key(keyed)
    altering = Altering(keyed, iter(["alter table a add primary key (id)"]))
    keyed.sync(altering)
    assert altering.failures == 1
    assert "public.a. Continuing with another pass." in "".join(altering.lines)
    assert keyed.equals_source("a")


@pytest.mark.soak
def test_a_table_that_is_altered_in_each_pass_is_reported_and_heals_later(
    keyed: Orchestrated,
) -> None:
    lose_key(keyed)
    columns = (f"alter table a add column c{n} int" for n in range(9))
    altering = Altering(keyed, columns)
    with pytest.raises(PgcdcError, match=r"Altered at the source .*: public\.a\. The next run"):
        keyed.sync(altering)
    assert altering.failures == PASSES
    assert keyed.equals_source("b")
    keyed.commit("alter table a add primary key (id)")
    keyed.sync()
    assert keyed.equals_source("a")


@pytest.mark.soak
def test_without_a_later_change_there_is_one_pass(keyed: Orchestrated) -> None:
    lose_key(keyed)
    altering = Altering(keyed, iter(()))
    with pytest.raises(PgcdcError, match="has replica identity FULL") as caught:
        keyed.sync(altering)
    assert altering.failures == 1
    assert "Altered" not in str(caught.value)


@pytest.mark.sampled
def test_a_partial_snapshot_that_failed_is_asked_for_in_the_next_pass(keyed: Orchestrated) -> None:
    """Without the request, the next pass would succeed, and nothing would replace the rows."""
    # Postgres accepts the condition, and refuses it when it reads row 1.
    request = PartialRequest(keyed.capture.tables[0], "1 / (id - 1) = 0")
    keyed.commit("update a set v = 'captured' where id = 2")
    lines: list[str] = []

    def alter_after_the_poll(line: str) -> None:
        lines.append(line)
        if line.startswith(f"{NAME}_capture") and len(lines) < 9:
            keyed.commit("alter table a add column if not exists c int")

    with pytest.raises(PgcdcError):
        sync_capture(
            keyed.instance,
            keyed.location,
            keyed.location.captures[NAME],
            say=alter_after_the_poll,
            limits=LIMITS,
            partial=request,
        )
    said = "\n".join(lines)
    assert "public.a. Continuing with another pass." in said
    assert said.count("Continuing with the rest.") == 2
    assert request.report is None
