"""The pre-flight check of a test's database, and its findings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg2 import sql

from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.preflight.run import Finding, run_preflight
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.database import Database


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """Create a role with only LOGIN."""
    name = f"role_{database.name}"
    database.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    yield name
    database.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


def findings_of(
    settings: ConnectionSettings,
    tables: list[tuple[str, str]] | None = None,
    slot: str = "no_such_slot",
    publication: str = "pub",
    **options: object,
) -> list[Finding]:
    names = None if tables is None else [TableName(*table) for table in tables]
    return run_preflight(settings, publication, slot, names, **options)  # type: ignore[arg-type]


def problems_in(findings: list[Finding]) -> dict[tuple[str, str | None], str]:
    """Return errors and warnings by code and table, without the expected warnings."""
    return {
        (finding.code, finding.table): f"{finding.severity}: {finding}"
        for finding in findings
        if finding.severity != "ok" and finding.code != "max_slot_wal_keep_size"
    }


def settings_as(database: Database, role: str) -> ConnectionSettings:
    return ConnectionSettings(database.conninfo.replace("user=postgres", f"user={role}"), "test")
