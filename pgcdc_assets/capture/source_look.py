"""What a look at the source's catalog reads: the definitions of the published tables."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.table_definitions import read_catalog_digest, read_definitions
from pgcdc_assets.postgres.catalog.unused_tables import read_unused_tables
from pgcdc_assets.postgres.wal.positions import read_barrier, read_clock
from pgcdc_assets.protocol.table_definition import TableDefinition
from pgcdc_assets.raw.relations.definitions import CatalogLook

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

# The catalog may change while a look reads.
_ATTEMPTS = 5


@dataclass(frozen=True)
class SourceLook:
    """What a look at the catalog has read.

    Attributes:
        digest: digest of the rows.
        lsn: end of the WAL after the last query.
        at: the source's clock at that time.
        tables: definitions by OID; empty if they are those of the look before.
        is_unchanged: the catalog is as at the look before.
        unused: OIDs of attached and detached partitions that never had a row.
    """

    digest: str
    lsn: Lsn
    tables: Mapping[int, TableDefinition]
    is_unchanged: bool = False
    at: dt.datetime | None = None
    unused: frozenset[int] = frozenset()


def read_source(conn: Connection, publication: str, base: CatalogLook) -> SourceLook:
    """Read the definitions of the published tables, if the catalog has changed since a look.

    Args:
        conn: a connection to the source database in autocommit mode.
        publication: the publication's name.
        base: the look before.

    Raises:
        TransientError: the catalog changed during each attempt.
    """
    digest = read_catalog_digest(conn, publication, base.tables)
    for _ in range(_ATTEMPTS):
        if digest == base.digest:
            return SourceLook(digest, Lsn(0), {}, is_unchanged=True)
        tables = read_definitions(conn, publication, base.tables)
        again = read_catalog_digest(conn, publication, base.tables)
        if again == digest:
            unused = read_unused_tables(conn, base.moved_partitions(tables))
            return SourceLook(
                digest, read_barrier(conn), tables, at=read_clock(conn), unused=unused
            )
        digest = again
    raise TransientError(reason="The catalog changed during each attempt to read it. Run it again.")
