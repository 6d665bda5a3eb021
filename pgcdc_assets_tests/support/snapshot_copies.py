"""Snapshots by the pool, and their effects in the lake and on the server."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import pyarrow as pa
import pytest

from pgcdc_assets.capture.snapshots.pool import (
    SnapshotFailure,
    SnapshotPool,
    SnapshotReport,
    UnfinishedSnapshot,
)
from pgcdc_assets.postgres.catalog.relations import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.reader import Pages, SnapshotReader
from pgcdc_assets.postgres.slots.status import create_slot
from pgcdc_assets.raw.delta.scan import DataFile, data_files
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.waits import wait_until

PAGE_BYTES = 8192


def copy_all(
    database: Database,
    zone: RawZone,
    parallelism: int = 3,
    range_bytes: int = 4 * PAGE_BYTES,
    role: str = "postgres",
) -> Iterator[SnapshotReport | SnapshotFailure]:
    """Take snapshots of all tables of publication `pub`."""
    conninfo = database.conninfo.replace("user=postgres", f"user={role}")
    settings = ConnectionSettings(conninfo, "test")
    return copy_published(database, settings, zone, SnapshotPolicy(parallelism, range_bytes))


def copy_published(
    database: Database, settings: ConnectionSettings, zone: RawZone, policy: SnapshotPolicy
) -> Iterator[SnapshotReport | SnapshotFailure]:
    """Take snapshots of all tables of publication `pub` over connections with these settings."""
    with create_slot(settings, f"copy_{database.name}", temporary=True) as snapshot:
        with query_connection(settings, "test") as conn:
            tables = published_tables(conn, "pub")
        for outcome in SnapshotPool(settings, zone, 1, snapshot, policy).copy(tables):
            assert not isinstance(outcome, UnfinishedSnapshot)
            yield outcome


def act_before_range(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], number: int = 3
) -> list[object]:
    """Act before a range is read, by default the third one; return a list that gets each range."""
    original = SnapshotReader.read
    reads: list[object] = []

    def read(
        reader: SnapshotReader,
        table: PublishedTable,
        pages: Pages | None = None,
        condition: str = "",
    ) -> Generator[pa.RecordBatch, None, None]:
        reads.append(pages)
        if len(reads) == number:
            act()
        return original(reader, table, pages, condition)

    monkeypatch.setattr(SnapshotReader, "read", read)
    return reads


def snapshot_files(zone: RawZone) -> list[DataFile]:
    loaded = zone.snapshots.table.load()
    assert loaded is not None
    return data_files(loaded)


def snapshot_rows(zone: RawZone, table: str) -> list[list[str | None]]:
    loaded = zone.snapshots.table.load()
    assert loaded is not None
    found: list[list[str | None]] = loaded.to_pyarrow_table(filters=[("table", "=", table)])[
        "new"
    ].to_pylist()
    return found


def await_no_sessions(database: Database) -> None:
    """Wait until the server has ended each session that reads rows: a session that was closed ends
    later than the client, and a session that was left open does not end.
    """
    wait_until(lambda: _copy_sessions(database) == 0, "the end of the sessions that read rows")


def _copy_sessions(database: Database) -> int:
    return int(
        database.value(
            "select count(*) from pg_stat_activity where application_name = 'pgcdc copy test'"
        )
    )


def is_everything_copied(database: Database, zone: RawZone, table: str) -> bool:
    expected = database.query(f"select array[id::text, note] from {table} order by id")
    found = sorted(snapshot_rows(zone, table), key=lambda row: int(row[0] or 0))
    return found == [list(row[0]) for row in expected]
