"""A table that is locked or dropped during the copy stops neither the capture nor other tables.

VACUUM FULL and some forms of ALTER TABLE hold the lock ACCESS EXCLUSIVE for hours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg2
import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table, snapshot_tables
from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.postgres.catalog.moved_tables import read_source_places
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.stream_statistics import read_source_facts
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

TABLES = (
    "create table locked (id int primary key) partition by range (id)",
    "create table part partition of locked for values from (0) to (10)",
    "create table other (id int primary key)",
)


@contextmanager
def _locked(database: Database, *statements: str) -> Iterator[psycopg2.extensions.connection]:
    """Execute the statements in a transaction that is open during the block."""
    with database.connect(autocommit=False) as holder, holder.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        yield holder


def _impatient(settings: ConnectionSettings) -> ConnectionSettings:
    return replace(settings, lock_timeout_ms=300)


def test_a_locked_table_does_not_delay_the_capture_of_others(capturing: Capturing) -> None:
    capturing.begin(*TABLES)
    capturing.database.execute("insert into locked values (1); insert into other values (1)")
    window = capturing.window()
    with _locked(capturing.database, "lock table locked, part in access exclusive mode"):
        assert capturing.capture(window).row_count == 2


def test_a_table_that_is_dropped_during_the_copy_does_not_stop_the_capture(
    capturing: Capturing,
) -> None:
    capturing.begin(*TABLES)
    capturing.database.execute("insert into other values (1)")
    window = capturing.window()
    waiting = "select exists (select from pg_locks where not granted and locktype = 'relation')"
    with (
        _locked(capturing.database, "drop table locked") as holder,
        capturing.capture_aside(window) as outcome,
    ):
        wait_until(
            lambda: outcome.report or outcome.error or capturing.database.value(waiting),
            "the capture to end, or to wait for the dropped table",
        )
        holder.commit()
    assert outcome.error is None
    assert outcome.report is not None
    assert outcome.report.row_count == 1


def test_a_locked_table_does_not_delay_questions_about_others(capturing: Capturing) -> None:
    capturing.begin(*TABLES)
    database, settings = capturing.database, _impatient(capturing.settings)
    tables = (CdcTable("public", "other"), CdcTable("public", "locked"))
    capture = CdcCapture("test", "pub", tables, slot=capturing.slot)
    other = TableName("public", "other")
    oid = database.value("select 'other'::regclass::oid::bigint")
    with _locked(database, "lock table locked, part in access exclusive mode"):
        with query_connection(settings, "test") as conn:
            assert read_source_places(conn, "pub", {other: oid})[other].name == other
            facts = read_source_facts(conn, capturing.slot, "pub")
            assert facts is not None
            assert facts.table_count == 2
        findings = examine_capture(settings, capture, capturing.zone)
        assert {"table"} <= {finding.code for finding in findings}
        reports = snapshot_tables(settings, capturing.zone, capturing.slot, "pub", [other])
        assert [report.table for report in reports] == ["other"]


def test_a_locked_table_does_not_delay_the_snapshots_of_others(capturing: Capturing) -> None:
    """The lock has no transaction id, so no slot waits for it."""
    capturing.begin(*TABLES, "insert into other values (1)", "insert into locked values (1), (2)")
    database, settings = capturing.database, _impatient(capturing.settings)

    def copied() -> dict[str, int | PgcdcError]:
        return {
            each.table: each.row_count if isinstance(each, SnapshotReport) else each.error
            for each in snapshot_each_table(settings, capturing.zone, capturing.slot, "pub")
        }

    with _locked(database, "lock table locked, part in access exclusive mode"):
        found = copied()
    assert found["other"] == 1
    assert isinstance(found["part"], TransientError)
    assert copied() == {"part": 2}
